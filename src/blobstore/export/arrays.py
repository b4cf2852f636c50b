"""Arrays: what a stored tensor becomes in a checkpoint: its stored arrays, or its values. Pure.

Names are those of the source: experts that the import stacked are taken apart again where blobstore.json has their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from blobstore.dtypes import DType
from blobstore.export.origin import Origin
from blobstore.export.outputs import Convert, Copy, OutputArray
from blobstore.export.stored_model import Weight
from blobstore.importer.planning.experts import group_of

_CONVERTED = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})


def output_arrays(weights: Iterable[Weight], prefix: str, origin: Origin, dequantize: DType | None) -> list[OutputArray]:
    """Return the arrays of tensors whose names begin with ``prefix``, which is left out, in the order of their source.

    With ``dequantize`` quantized weights and floats become values of that dtype, everything else stays. Tensors that the
    source's files do not name come last, in stored order.
    """
    arrays = [array for weight in weights for array in _arrays(weight, weight.name[len(prefix) :], origin, dequantize)]
    last = (len(origin.files), 0)
    return sorted(arrays, key=lambda array: origin.place(array.weight) or last)


def _arrays(weight: Weight, name: str, origin: Origin, dequantize: DType | None) -> Iterator[OutputArray]:
    experts = _experts(weight, name, origin)
    for number, expert in enumerate(experts or [name]):
        share = (number, len(experts)) if experts else (0, 1)
        if dequantize is not None and (weight.quantization is not None or weight.dtype in _CONVERTED - {dequantize}):
            yield _values(weight, expert, share, origin, dequantize)
        else:
            yield from _copies(weight, expert, share)


def _experts(weight: Weight, name: str, origin: Origin) -> list[str]:
    """Return the names of the experts that the import stacked into the tensor; none when it was not stacked."""
    group = group_of(name)
    if group is None or origin.place(name) is not None or len(weight.shape) < 3:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{group}.{number}{name[len(group) :]}" for number in range(weight.shape[0])]
    return names if all(origin.place(expert) is not None for expert in names) else []


def _values(weight: Weight, name: str, share: tuple[int, int], origin: Origin, dtype: DType) -> OutputArray:
    number, count = share
    unpacked = origin.unpacked(name) if weight.quantization is not None else None
    transposed = weight.stored.transposed or unpacked is not None
    values = math.prod(weight.shape) // count
    piece = Convert(weight, dtype, number * values, values, transposed)
    shape = piece.shape[1:] if count > 1 else piece.shape
    return OutputArray(unpacked or name, dtype, shape, (piece,), name)


def _copies(weight: Weight, name: str, share: tuple[int, int]) -> Iterator[OutputArray]:
    number, count = share
    for part in weight.parts.values():
        # The one global scale of a stack is that of each expert.
        is_shared = count == 1 or part.suffix == ".global_scale"
        shape, nbytes = (part.shape, part.nbytes) if is_shared else (part.shape[1:], part.nbytes // count)
        offset = part.offset + (0 if is_shared else number * nbytes)
        array = OutputArray(name + part.suffix, part.dtype, shape, (Copy(weight, offset, nbytes),), name)
        if not part.suffix:
            array = replace(array, quantization=weight.quantization, transposed=weight.stored.transposed)
        yield array
