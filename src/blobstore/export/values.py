"""Values of an export: what a stored weight becomes where its bytes are not copied.

Only an export that computes values imports this file, and NumPy and the kernels with it.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.planned_files import (
    BlobRange,
    Checkpoint,
    Computed,
    OutputArray,
    Piece,
    Weight,
)
from blobstore.formats.dtypes import DType, float_dtype
from blobstore.io.ranges import MappedFile
from blobstore.kernels.arrays import Array, QuantizedArray, dtype_of, numpy_dtype
from blobstore.model.facts import Config, TensorFacts
from blobstore.model.loader import (
    MappedBlob,
    StoredArray,
    Tensor,
    assemble,
    fill_values,
    run_of,
    values_of,
)
from blobstore.model.network import (
    NetworkPlan,
    OpenTensors,
    PlannedArray,
    computed_arrays,
    plan_network,
    planned_arrays,
    quantize_modules,
)
from blobstore.model.on_mlx_lm import mlx_lm_errors
from blobstore.model.sanitize import leaves, runs
from blobstore.source.weights import tiles_of
from blobstore.store.stored_model import TensorBlob

VALUES_AT_ONCE = 2**20
"""A multiple of every group size."""
# Rows of a transposed weight are columns of what is stored: a multiple of every group size.
_ROWS_AT_ONCE = 128
# Values of a transposed weight that are dequantized at a time.
_BAND_VALUES = 2**20


def value_piece(
    weight: Weight, dtype: DType, start: int, count: int, *, transposed: bool = False
) -> Computed:
    """Return ``count`` values of a weight from index ``start`` on, converted to ``dtype``.

    They are counted in the order of the exported tensor. ``transposed``: its last two axes are
    those of the stored one, swapped; only a quantized weight can be. The values are bit for bit
    those of `Tensor.dequantize`. Filling raises: UnsupportedSourceError, with tensor and index,
    when a finite value is beyond the range of the dtype; as `BlobFile.open`.
    """
    itemsize = dtype.nbytes((1,))
    at_once = VALUES_AT_ONCE
    if transposed:  # whole groups of rows
        cols = weight.shape[-2]
        rows = VALUES_AT_ONCE // cols
        at_once = (rows - rows % _ROWS_AT_ONCE or rows) * cols or VALUES_AT_ONCE

    def fill(begin: int, data: memoryview) -> None:
        stored = assemble(weight, _map_blob(weight.blob).array)
        out: Array = np.frombuffer(data, numpy_dtype(dtype))
        write = _fill_transposed if transposed else _fill_run
        write(weight.name, stored, start + begin // itemsize, out)

    return Computed(count * itemsize, itemsize, at_once * itemsize, fill)


def _map_blob(blob: TensorBlob) -> MappedBlob:
    with blob.open() as reader:
        return MappedBlob(blob, MappedFile(reader))


def _fill_run(name: str, stored: StoredArray, start: int, out: Array) -> None:
    run = run_of(stored, start, out.size)
    fill_values(out, run)
    if (beyond := _first_beyond(out, run)) is not None:
        (place,), exact = beyond
        raise _too_large(name, np.unravel_index(start + place, stored.shape), exact, out)


def _first_beyond(values: Array, stored: StoredArray) -> tuple[tuple[Any, ...], Any] | None:
    """Return the index and exact value of the first one that became infinite; None without one."""
    if are_finite(values):
        return None
    numbers = values_of(stored)
    beyond = np.isinf(values) & np.isfinite(numbers)
    if not beyond.any():
        return None
    place = np.unravel_index(np.argmax(beyond), beyond.shape)
    return place, numbers[place]


def are_finite(values: Array) -> bool:
    """Return True if no value is infinite or not a number.

    Of the bits of such values, those without a sign are the largest signed integers, and those with
    one the largest unsigned integers. NumPy finds these two 20 times as fast as ml_dtypes tests
    BF16 values, and needs no memory for it.
    """
    size = values.itemsize
    infinity = np.array([np.inf, -np.inf], values.dtype)
    return all(
        values.view(kind).max(initial=0) < bound
        for kind, bound in (
            (f"i{size}", infinity.view(f"i{size}")[0]),
            (f"u{size}", infinity.view(f"u{size}")[1]),
        )
    )


def _fill_transposed(name: str, whole: QuantizedArray[Array], start: int, out: Array) -> None:
    """Write values of a quantized weight whose last two axes are stored the other way round.

    In the file they lie a row apart; memory is that of ``_BAND_VALUES`` values.
    """
    *lead, cols, rows = whole.shape
    for tile in tiles_of(start, out.size, rows, cols):
        stored = kernels.matrix_of(whole, tile.matrix)
        size = stored.group_size
        begin, end = tile.row // size * size, -(-tile.stop_row // size) * size
        place = out[tile.at : tile.at + tile.size].reshape(tile.shape)
        band = max(1, _BAND_VALUES // (end - begin))
        for first in range(tile.col, tile.stop_col, band):
            last = min(first + band, tile.stop_col)
            block = kernels.block_of(stored, slice(first, last), slice(begin, end))
            values = kernels.dequantize(block, dtype_of(out))
            if (beyond := _first_beyond(values, block)) is not None:
                (col, row), exact = beyond
                index = (*np.unravel_index(tile.matrix, lead), begin + row, first + col)
                raise _too_large(name, index, exact, out)
            place[:, first - tile.col : last - tile.col] = values.T[
                tile.row - begin : tile.stop_row - begin
            ]


def _too_large(name: str, index: tuple[Any, ...], exact: Any, out: Array) -> UnsupportedSourceError:
    at = tuple(int(i) for i in index)
    return UnsupportedSourceError(
        f"{quoted(name)}: the weight at {list(at)} is {exact}, which does not fit {dtype_of(out)}",
        tensor=name,
        index=at,
        hint="Dequantize to bfloat16 or float32.",
    )


_STEP = 2**22


def mlx_arrays(
    checkpoint: Checkpoint, config: Config, dequantize: DType | None
) -> tuple[list[OutputArray], dict[str, Any] | None, tuple[str, ...]]:
    """Return the arrays that mlx-lm loads, ``quantization`` for config.json or None, and notes.

    With ``dequantize`` every quantized weight and every float becomes values of that dtype. The
    general settings are those of most modules, of those of the type ``checkpoint.file_type`` where
    there are any; a module that has others is named.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError when MLX or mlx-lm has no
    such arrays, a global scale among them, or does not know the architecture.
    """
    weights = checkpoint.weights
    facts = [_facts(weight, name, config, dequantize) for name, weight in weights.items()]
    plan = plan_network(config, facts, checkpoint.model, checkpoint.origin.places.keys() or None)
    _check_scales(plan)

    mapped = cache(_map_blob)

    def tensor(name: str) -> Tensor:
        return Tensor.of(weights[name], mapped(weights[name].blob))

    opened = OpenTensors(tensor, plan.tensors)
    with mlx_lm_errors("convert", checkpoint.model):
        computed = [_evaluate(name, one) for name, one in computed_arrays(plan, opened).items()]
        settings = dict(sorted(quantize_modules(plan).items()))
    arrays = [_output(array, weights, opened, plan) for array in planned_arrays(plan)]
    return arrays + computed, _quantization(settings, checkpoint.file_type), plan.notes


def _facts(weight: Weight, name: str, config: Config, dequantize: DType | None) -> TensorFacts:
    facts = TensorFacts.of(name, weight, float_dtype(config))
    if dequantize is None or (weight.quantization is None and not weight.dtype.is_float):
        return facts
    return facts._replace(dtype=dequantize, quantization=None, double_scaled=False)


def _check_scales(plan: NetworkPlan) -> None:
    for parameter in plan.parameters:
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
    pieces = runs(array.expression) if array.factors is None else None
    if pieces is None:
        return None
    # Values of a transposed weight are counted in the order of its source.
    if array.suffix is None and any(weights[name].transposed for name, _, _ in pieces):
        return None
    return tuple(_piece(weights[name], array, start, count) for name, start, count in pieces)


def _piece(weight: Weight, array: PlannedArray, start: int, count: int) -> Piece:
    entry = weight.entries[array.suffix or ""]
    if array.suffix is None and (weight.quantization is not None or entry.dtype is not array.dtype):
        return value_piece(weight, array.dtype, start, count)
    return BlobRange(
        weight.blob,
        weight.blob.offset(entry) + entry.dtype.nbytes((start,)),
        entry.dtype.nbytes((count,)),
    )


def _evaluate(name: str, array: Any) -> OutputArray:
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


def _quantization(
    settings: Mapping[str, Mapping[str, Any]], file_type: str
) -> dict[str, Any] | None:
    if not settings:
        return None
    counts = Counter(tuple(setting.values()) for setting in settings.values())

    def rank(one: Mapping[str, Any]) -> tuple[bool, int]:
        name = f"int{one['bits']}" if one["mode"] == "affine" else one["mode"]
        return name == file_type, counts[tuple(one.values())]

    general = max(settings.values(), key=rank)
    return {**general, **{path: one for path, one in settings.items() if one != general}}
