"""MLX arrays: what the stored tensors of a checkpoint become in a folder that mlx-lm loads.

mlx-lm's own network says which arrays there are (model/network_plan.py). Arrays that are stored as
needed, or are stacks of stored ones, are copied from the blobs; the others are made as they are
written, one at a time in each thread. Only the arrays that mlx-lm computes from weights are made
here. Source: mlx_lm/utils.py `load_model` at version 0.32.2.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.exported_arrays import Checkpoint
from blobstore.export.planned_files import (
    BlobRange,
    Computed,
    OutputArray,
    Piece,
    Weight,
)
from blobstore.export.values import value_piece
from blobstore.formats.dtypes import DType
from blobstore.io.ranges import MappedFile
from blobstore.kernels.arrays import dtype_of, numpy_dtype
from blobstore.model.expressions import leaves, runs
from blobstore.model.facts import TensorFacts, float_dtype
from blobstore.model.network import (
    OpenTensors,
    PlannedArray,
    computed_arrays,
    planned_arrays,
    quantize_modules,
)
from blobstore.model.network_plan import NetworkPlan, Parameter, mlx_lm_errors, plan_network
from blobstore.model.tensors import MappedBlob, Tensor
from blobstore.store.stored_model import TensorBlob

_STEP = 2**22
_SETTINGS = ("group_size", "bits", "mode")


def mlx_arrays(
    checkpoint: Checkpoint, config: Mapping[str, Any], dequantize: DType | None
) -> tuple[list[OutputArray], dict[str, Any] | None, tuple[str, ...]]:
    """Return the arrays that mlx-lm loads, ``quantization`` for config.json or None, and notes.

    With ``dequantize`` every quantized weight and every float becomes values of that dtype. The
    general settings are those of most modules, of those of the type ``checkpoint.file_type`` where
    there are any; a module that has others is named.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError when MLX or mlx-lm has no
    such arrays, a global scale among them, or does not know the architecture.
    """
    weights = checkpoint.named
    facts = [_facts(weight, name, config, dequantize) for name, weight in weights.items()]
    names = frozenset(name for file in checkpoint.origin.files for name in file.tensors) or None
    plan = plan_network(config, facts, checkpoint.model, names)
    for parameter in plan.parameters:
        _check_scales(parameter, plan)

    @functools.cache
    def mapped(blob: TensorBlob) -> MappedBlob:
        with blob.open() as reader:
            return MappedBlob(blob, MappedFile(reader))

    def tensor(name: str) -> Tensor:
        return Tensor.of(weights[name].stored, mapped(weights[name].blob))

    opened = OpenTensors(tensor, plan.tensors)
    with mlx_lm_errors("convert", checkpoint.model):
        computed = [_evaluated(name, one) for name, one in computed_arrays(plan, opened).items()]
        quantize_modules(plan)
    arrays = [_output(array, weights, opened, plan) for array in planned_arrays(plan)]
    return arrays + computed, _quantization(plan.network, checkpoint.file_type), plan.notes


def _facts(
    weight: Weight, name: str, config: Mapping[str, Any], dequantize: DType | None
) -> TensorFacts:
    facts = TensorFacts.of(weight.stored, float_dtype(config))._replace(name=name)
    is_float = weight.stored.quantization is not None or weight.stored.dtype.is_float
    if dequantize is None or not is_float:
        return facts
    return facts._replace(dtype=dequantize, quantization=None, double_scaled=False)


def _check_scales(parameter: Parameter, plan: NetworkPlan) -> None:
    scaled = [name for name in leaves(parameter.expression) if plan.tensors[name].double_scaled]
    if parameter.quantization is not None and scaled:
        raise UnsupportedSourceError(
            f"{quoted(min(scaled))} has a global scale, which mlx-lm does not read on a CPU",
            tensor=min(scaled),
            hint='Export it with dequantize="bfloat16", or with format="safetensors".',
        )


def _output(
    array: PlannedArray, weights: Mapping[str, Weight], opened: OpenTensors, plan: NetworkPlan
) -> OutputArray:
    quantization = plan.tensors[array.tensor].quantization if array.suffix == "" else None
    pieces = _stored_pieces(array, weights)
    if pieces is None:
        nbytes, kind = array.dtype.nbytes(array.shape), numpy_dtype(array.dtype)

        def fill(_: int, data: memoryview) -> None:
            opened.fill(np.frombuffer(data, kind).reshape(array.shape), array)

        pieces = (Computed(nbytes, kind.itemsize, nbytes, fill),)
    return OutputArray(array.name, array.dtype, array.shape, pieces, array.tensor, quantization)


def _stored_pieces(array: PlannedArray, weights: Mapping[str, Weight]) -> tuple[Piece, ...] | None:
    """Return the ranges of blobs that an array consists of; None when it has to be made."""
    found = runs(array.expression) if array.factors is None else None
    if found is None:
        return None
    # Values of a transposed weight are counted in the order of its source.
    if array.suffix is None and any(weights[name].stored.transposed for name, _, _ in found):
        return None
    return tuple(_piece(weights[name], array, start, count) for name, start, count in found)


def _piece(weight: Weight, array: PlannedArray, start: int, count: int) -> Piece:
    entry = weight.stored.entries[array.suffix or ""]
    is_quantized = weight.stored.quantization is not None
    if array.suffix is None and (is_quantized or entry.dtype is not array.dtype):
        return value_piece(weight, array.dtype, start, count)
    offset = weight.blob.offset(entry) + entry.dtype.nbytes((start,))
    return BlobRange(weight.blob, offset, entry.dtype.nbytes((count,)))


def _evaluated(name: str, array: Any) -> OutputArray:
    """Return an array that mlx-lm computed; MLX evaluates it in the thread that made it."""
    import mlx.core as mx

    is_bfloat16 = array.dtype == mx.bfloat16
    values = np.array(array.view(mx.uint16) if is_bfloat16 else array)
    dtype = DType.BF16 if is_bfloat16 else dtype_of(values)
    raw = values.reshape(-1).view(np.uint8).data

    def fill(begin: int, data: memoryview) -> None:
        data[:] = raw[begin : begin + len(data)]

    piece = Computed(values.nbytes, values.itemsize, _STEP, fill)
    return OutputArray(name, dtype, tuple(array.shape), (piece,), name)


def _quantization(network: Any, file_type: str) -> dict[str, Any] | None:
    settings = {
        path: {key: getattr(module, key) for key in _SETTINGS}
        for path, module in sorted(network.named_modules(), key=lambda item: item[0])
        if hasattr(module, "bits")
    }
    if not settings:
        return None
    counts = Counter(tuple(one.values()) for one in settings.values())
    asked = Counter(
        {
            (size, bits, mode): count
            for (size, bits, mode), count in counts.items()
            if file_type == (f"int{bits}" if mode == "affine" else mode)
        }
    )
    general = dict(zip(_SETTINGS, (asked or counts).most_common(1)[0][0], strict=True))
    return {**general, **{path: one for path, one in settings.items() if one != general}}
