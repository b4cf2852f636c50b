"""The arrays and settings of a folder that ``mlx_lm.load`` opens.

mlx-lm's own network says what they are (network/). What is stored as it is wanted, or is a stack of
what is stored, is copied from the blobs; other arrays are made as they are written, one at a time a
thread. Only what mlx-lm computes from weights is made here. Source: mlx_lm/utils.py `load_model` at
version 0.32.2.

Arrays: what a stored tensor becomes in a checkpoint: its stored arrays, or its values. Pure.

Names are those of the source: experts that the import stacked are taken apart again where
blobstore.json has their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.options import Origin
from blobstore.export.outputs import Convert, Copy, Made, OutputArray, Piece
from blobstore.formats.dtypes import DType
from blobstore.importer.planning.experts import group_of
from blobstore.kernels.arrays import dtype_of
from blobstore.model.loader import open_blob
from blobstore.model.network.arrays import (
    OpenTensors,
    PlannedArray,
    computed_arrays,
    planned_arrays,
    quantize_modules,
)
from blobstore.model.network.expressions import runs
from blobstore.model.network.layouts import LogicalTensor, float_dtype
from blobstore.model.network.planning import NetworkPlan, Parameter, mlx_lm_errors, plan_network
from blobstore.model.parts import BlobFile, Weight
from blobstore.model.tensors import Blob, Tensor

_CONVERTED = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})


def output_arrays(
    weights: Iterable[Weight], prefix: str, origin: Origin, dequantize: DType | None
) -> list[OutputArray]:
    """Return the arrays of tensors whose names begin with ``prefix``, which is left out, in the order of their source.

    With ``dequantize`` quantized weights and floats become values of that dtype, everything else
    stays. Tensors that the source's files do not name come last, in stored order.
    """
    arrays = [
        array
        for weight in weights
        for array in _arrays(weight, weight.name[len(prefix) :], origin, dequantize)
    ]
    last = (len(origin.files), 0)
    return sorted(arrays, key=lambda array: origin.place(array.weight) or last)


def _arrays(
    weight: Weight, name: str, origin: Origin, dequantize: DType | None
) -> Iterator[OutputArray]:
    experts = _experts(weight, name, origin)
    for number, expert in enumerate(experts or [name]):
        share = (number, len(experts)) if experts else (0, 1)
        if dequantize is not None and (
            weight.quantization is not None or weight.dtype in _CONVERTED - {dequantize}
        ):
            yield _values(weight, expert, share, origin, dequantize)
        else:
            yield from _copies(weight, expert, share)


def _experts(weight: Weight, name: str, origin: Origin) -> list[str]:
    """Return the names of the experts that the import stacked into the tensor.

    None when it was not stacked.
    """
    group = group_of(name)
    if group is None or origin.place(name) is not None or len(weight.shape) < 3:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{group}.{number}{name[len(group) :]}" for number in range(weight.shape[0])]
    return names if all(origin.place(expert) is not None for expert in names) else []


def _values(
    weight: Weight, name: str, share: tuple[int, int], origin: Origin, dtype: DType
) -> OutputArray:
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
        shape, nbytes = (
            (part.shape, part.nbytes) if is_shared else (part.shape[1:], part.nbytes // count)
        )
        offset = part.offset + (0 if is_shared else number * nbytes)
        array = OutputArray(
            name + part.suffix, part.dtype, shape, (Copy(weight, offset, nbytes),), name
        )
        if not part.suffix:
            array = replace(
                array, quantization=weight.quantization, transposed=weight.stored.transposed
            )
        yield array


_SETTINGS = ("group_size", "bits", "mode")


class Source(Protocol):
    """What a checkpoint knows of itself: its model's name, where its tensors came from, the type that was asked for."""

    @property
    def model(self) -> str:
        """The name for messages."""

    @property
    def origin(self) -> Origin:
        """The files that were imported."""

    @property
    def file_type(self) -> str:
        """The type that was asked for; empty for none."""


class MappedWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint as tensors, by their names in it.

    Each blob is mapped when it is first needed.
    """

    def __init__(self, weights: Iterable[Weight], prefix: str) -> None:
        self._weights = {weight.name[len(prefix) :]: weight for weight in weights}
        self._blobs: dict[BlobFile, Blob] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises: KeyError; as `BlobFile.open`."""
        weight = self._weights[name]
        if weight.blob not in self._blobs:
            with weight.blob.open() as reader:
                self._blobs[weight.blob] = open_blob(reader, weight.blob.digest)
        return Tensor(weight.stored, self._blobs[weight.blob])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def weight(self, name: str) -> Weight:
        """Return where a tensor lies."""
        return self._weights[name]


def mlx_arrays(
    weights: MappedWeights, config: Mapping[str, Any], source: Source, dequantize: DType | None
) -> tuple[list[OutputArray], dict[str, Any] | None, tuple[str, ...]]:
    """Return the arrays as mlx-lm wants them, what ``quantization`` its config.json needs (None for none), and notes.

    With ``dequantize`` every quantized weight and every float becomes values of that dtype. The
    general settings are those of most modules, of those of the type ``source.file_type`` where
    there are any; a module that has others is named.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError when MLX or mlx-lm has no
    such arrays, a global scale among them, or does not know the architecture.
    """
    facts = [_fact(weights.weight(name), name, config, dequantize) for name in weights]
    names = frozenset(name for file in source.origin.files for name in file.tensors) or None
    plan = plan_network(config, facts, source.model, names)
    for parameter in plan.parameters:
        _check(parameter, plan)
    opened = OpenTensors(weights, plan.tensors)
    with mlx_lm_errors("convert", source.model):
        computed = [_held(name, array) for name, array in computed_arrays(plan, opened).items()]
        quantize_modules(plan)
    arrays = [_output(array, weights, opened, plan) for array in planned_arrays(plan)]
    return arrays + computed, _quantization(plan.network, source.file_type), plan.notes


def _fact(
    weight: Weight, name: str, config: Mapping[str, Any], dequantize: DType | None
) -> LogicalTensor:
    fact = LogicalTensor.of(weight.stored, float_dtype(config))
    is_converted = dequantize is not None and (
        weight.quantization is not None or weight.dtype.is_float
    )
    dtype = dequantize if is_converted and dequantize is not None else fact.dtype
    quantization = None if is_converted else fact.quantization
    return LogicalTensor(
        name,
        fact.shape,
        dtype,
        quantization,
        fact.transposed,
        fact.global_scale and not is_converted,
    )


def _check(parameter: Parameter, plan: NetworkPlan) -> None:
    scaled = [name for name in plan.sources(parameter) if plan.tensors[name].global_scale]
    if parameter.quantization is not None and scaled:
        message = (
            f"{quoted(min(scaled))} has a global scale, which mlx-lm takes from no folder on a CPU"
        )
        hint = 'Export it with dequantize="bfloat16", or with format="safetensors".'
        raise UnsupportedSourceError(message, tensor=min(scaled), hint=hint)


def _output(
    array: PlannedArray, weights: MappedWeights, opened: OpenTensors, plan: NetworkPlan
) -> OutputArray:
    quantization = plan.tensors[array.tensor].quantization if array.suffix == "" else None
    pieces = _mlx_copies(array, weights)
    if pieces is None:
        nbytes = array.dtype.nbytes(array.shape)
        pieces = (Made(nbytes, lambda: opened.made(array)),)
    return OutputArray(array.name, array.dtype, array.shape, pieces, array.tensor, quantization)


def _mlx_copies(array: PlannedArray, weights: MappedWeights) -> tuple[Piece, ...] | None:
    """Return the ranges of blobs that an array is, one after the other; None when it has to be made."""
    found = runs(array.expression) if array.factors is None else None
    # Values of a transposed weight are counted in the order of its source.
    if found is None or (
        array.suffix is None and any(weights.weight(name).stored.transposed for name, _, _ in found)
    ):
        return None
    return tuple(_piece(weights.weight(name), array, start, count) for name, start, count in found)


def _piece(weight: Weight, array: PlannedArray, start: int, count: int) -> Piece:
    part = weight.parts[array.suffix or ""]
    if array.suffix is None and (weight.quantization is not None or part.dtype is not array.dtype):
        return Convert(weight, array.dtype, start, count)
    return Copy(weight, part.offset + part.dtype.nbytes((start,)), part.dtype.nbytes((count,)))


def _held(name: str, array: Any) -> OutputArray:
    """Return an array that mlx-lm computed: evaluated now, because MLX evaluates in the thread that made it."""
    import mlx.core as mx

    is_bfloat16 = array.dtype == mx.bfloat16
    values = np.array(array.view(mx.uint16) if is_bfloat16 else array)
    dtype = DType.BF16 if is_bfloat16 else dtype_of(values)
    return OutputArray(
        name, dtype, tuple(array.shape), (Made(values.nbytes, lambda: values),), name
    )


def _quantization(network: Any, file_type: str) -> dict[str, Any] | None:
    settings = {
        path: {key: getattr(module, key) for key in _SETTINGS}
        for path, module in sorted(network.named_modules(), key=lambda item: item[0])
        if hasattr(module, "bits")
    }
    if not settings:
        return None
    counts = Counter(tuple(one.values()) for one in settings.values())
    asked = Counter({one: count for one, count in counts.items() if _type_name(*one) == file_type})
    general = dict(zip(_SETTINGS, (asked or counts).most_common(1)[0][0], strict=True))
    return {**general, **{path: one for path, one in settings.items() if one != general}}


def _type_name(_: int, bits: int, mode: str) -> str:
    return f"int{bits}" if mode == "affine" else mode
