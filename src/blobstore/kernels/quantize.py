"""Quantize and dequantize arrays, and decode block FP8 weights: the public functions.

The implementations, and which of them runs, are in native.py; how scales are chosen is in
scales.py. Block FP8 is the form of DeepSeek-V3's checkpoints (README_WEIGHTS.md:
``weight_scale_inv``, which is multiplied): E4M3 codes, and a scale for each 128 x 128 block of
their matrix. The arithmetic is docs/quantization.md's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from blobstore.errors import NonFiniteWeightError, UsageError
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.io.workers import results_of
from blobstore.kernels.arrays import (
    Array,
    QuantizedArray,
    array_of,
    dtype_of,
    flat_parts,
    map_parts,
    numpy_dtype,
)
from blobstore.kernels.native import Kernel, choose_kernel
from blobstore.kernels.reference import Comparison
from blobstore.kernels.scales import (
    BlockRun,
    ScaleChoice,
    check_method,
    checked_importance,
    global_scale_of,
    largest_magnitude,
)

_MOST_THREADS = 256
_BF16 = np.dtype(ml_dtypes.bfloat16)
_CODES = (np.dtype(np.uint8),)
_SCALES = (np.dtype(np.float32), np.dtype(np.float16), _BF16)


def quantization_of(quant_type: str | QuantType, group_size: int | None = None) -> Quantization:
    """Return the quantization of a type's name and a group size.

    None means groups of 32 for int4, of 64 for int8, else of the type's only size. Raises:
    UsageError for an unknown type or a group size that the type does not have.
    """
    kind = quant_type if isinstance(quant_type, QuantType) else QuantType.parse(quant_type)
    if group_size is None:
        group_size = 64 if kind is QuantType.INT8 else kind.group_sizes[0]
    return Quantization(kind, group_size)


def quantize(
    array: Array,
    quant_type: str | QuantType,
    *,
    group_size: int | None = None,
    method: str = "minmax",
    importance: Array | None = None,
    global_scale: bool = False,
    jobs: int = 1,
    kernel: Kernel | None = None,
) -> QuantizedArray[Array]:
    """Return ``array`` quantized along its last dimension.

    ``array``: BF16 (ml_dtypes), F16 or F32 of shape ``[..., rows, cols]``, rank 2 or more, cols a
    multiple of the group size; it may be read-only or empty. ``method``: "minmax" takes each
    group's scale from its extremes, the same bits as ``mx.quantize`` for int4 and int8; "search"
    finds the scale (and bias), as stored, with the least squared error, and is never worse in any
    group. ``importance``: ``[cols]`` finite numbers >= 0, what each column's squared error counts,
    for "search" only. ``global_scale``: divide an nvfp4 tensor by a power of two first, so that
    small weights do not fall among E4M3's subnormals; it is stored. ``jobs``: threads, each with a
    range of groups; the bits do not depend on it.

    The result owns new arrays; the input is read in place (a non-contiguous, misaligned or
    big-endian one is copied first). Affine scales and biases have the input's dtype. The arithmetic
    is docs/quantization.md's.

    Raises: UsageError (unknown type or method, rank under 2, a group that does not divide cols,
    another dtype, importance of wrong length or without "search", a global scale for another type,
    jobs under 1, masked values, an argument of another type); UnsupportedSourceError (a dtype that
    safetensors does not have); NonFiniteWeightError with the index of the first NaN or infinity.
    """
    quantization = quantization_of(quant_type, group_size)
    array = array_of(array, "the array")
    _check_quantizable(array, quantization)
    if type(global_scale) is not bool:
        raise UsageError(f"global_scale is {global_scale!r}: it must be True or False")
    if global_scale and quantization.quant_type is not QuantType.NVFP4:
        raise UsageError(f"only nvfp4 has a global scale, not {quantization.quant_type}")
    if importance is not None and check_method(method) != "search":
        raise UsageError("importance needs the method search", hint='Use method="search".')
    if type(jobs) is not int or jobs < 1:
        raise UsageError(f"jobs is {jobs!r}: it must be a whole number of threads")
    choice = ScaleChoice(check_method(method))
    if importance is not None:
        choice = replace(choice, importance=checked_importance(importance, array.shape[-1]))
    weights = np.require(array, numpy_dtype(dtype_of(array)), ("C", "A"))
    parts = _empty_parts(weights, quantization)
    if global_scale:
        choice = replace(choice, global_scale=global_scale_of(largest_magnitude(weights)))
        parts = replace(parts, global_scale=np.array([choice.global_scale], np.float32))
    bad = _quantize_ranges(weights.reshape(-1), parts, choice, jobs, choose_kernel(kernel))
    if bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(bad, array.shape))
        raise NonFiniteWeightError(
            f"the weight at {list(index)} is {array[index]}: it can't be quantized", index=index
        )
    return parts


def _check_quantizable(array: Array, quantization: Quantization) -> None:
    if not dtype_of(array).is_float:
        raise UsageError(f"only BF16, F16 and F32 arrays can be quantized, not {dtype_of(array)}")
    if array.ndim < 2:  # noqa: PLR2004
        raise UsageError(f"only arrays of rank 2 or more can be quantized, not shape {array.shape}")
    if not quantization.divides(array.shape):
        raise UsageError(
            f"groups of {quantization.group_size} do not divide the last dimension of shape "
            f"{array.shape}"
        )


def _empty_parts(weights: Array, quantization: Quantization) -> QuantizedArray[Array]:
    described = quantization.parts(weights.shape, dtype_of(weights))
    weight, scale, *rest = (np.empty(part.shape, numpy_dtype(part.dtype)) for part in described)
    return QuantizedArray(weight, scale, rest[0] if rest else None, None, quantization)


def _quantize_ranges(
    weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice, jobs: int, kernel: Kernel
) -> int:
    """Quantize flat weights in ``jobs`` ranges of groups at once.

    Return the index of the first non-finite weight, or -1. An infinite scale is stored, as MLX
    does.
    """
    group_size = parts.group_size
    groups = weights.size // group_size
    jobs = min(jobs, groups, _MOST_THREADS) or 1
    ranges = list(pairwise(groups * job // jobs for job in range(jobs + 1)))
    columns = 0 if choice.importance is None else choice.importance.size

    def quantize_range(bounds: tuple[int, int]) -> int:
        first, last = (bound * group_size for bound in bounds)
        part = replace(choice, first_column=first % columns if columns else 0)
        bad = kernel.quantize(weights[first:last], group_range(parts, *bounds), part)
        return first + bad if bad >= 0 and not math.isfinite(weights[first + bad]) else -1

    if jobs == 1:
        return quantize_range((0, groups))
    counts = results_of(ranges, quantize_range, jobs, name="quantize")
    return next((bad for bad in counts if bad >= 0), -1)


def group_range(parts: QuantizedArray[Array], start: int, stop: int) -> QuantizedArray[Array]:
    """Return the groups ``start`` to ``stop``, counted through all rows, as flat views.

    The parts are contiguous.
    """
    words = parts.group_size * parts.quant_type.bits // 32
    return map_parts(
        parts,
        lambda weight: weight.reshape(-1)[start * words : stop * words],
        lambda part: part.reshape(-1)[start:stop],
    )


def matrix_of(parts: QuantizedArray[Array], number: int) -> QuantizedArray[Array]:
    """Return a matrix of a stack as views; ``number`` counts through the stack's dimensions."""
    return map_parts(parts, lambda part: part.reshape(-1, *part.shape[-2:])[number])


def block_of(parts: QuantizedArray[Array], rows: slice, columns: slice) -> QuantizedArray[Array]:
    """Return rows and columns of a quantized matrix as views.

    The columns begin and end where groups do.
    """
    words = slice(*(bound * parts.quant_type.bits // 32 for bound in (columns.start, columns.stop)))
    groups = slice(columns.start // parts.group_size, columns.stop // parts.group_size)
    return map_parts(parts, lambda weight: weight[rows, words], lambda part: part[rows, groups])


def quantize_into(
    weights: Array,
    parts: QuantizedArray[Array],
    choice: ScaleChoice | None = None,
    *,
    kernel: Kernel | None = None,
) -> int:
    """Quantize whole groups of flat, contiguous ``weights`` into ``parts``, whose arrays are flat.

    Returns the index of the first non-finite weight, and then the parts are unspecified. If all are
    finite, returns the index of the first weight of the first group whose scale is infinite,
    because it spans more than its dtype can scale; the parts are then what `quantize` returns.
    Else returns -1. A caller tells the two apart by that weight.
    """
    return choose_kernel(kernel).quantize(weights, parts, choice or ScaleChoice())


def dequantize(
    quantized: QuantizedArray[Array],
    dtype: str | DType = DType.F32,
    *,
    kernel: Kernel | None = None,
) -> Array:
    """Return the values ``[..., rows, cols]`` of a quantized numpy array, as a new array.

    ``code * scale + bias`` for the affine types, ``code * scale`` (``* global_scale``) for the
    others, each operation rounded to float32, and the result to ``dtype``: "float32", "bfloat16"
    (ml_dtypes) or "float16".

    Raises: UsageError for anything but numpy arrays with the shapes and dtypes of the type (a scale
    for each whole group), for masked values, or for another dtype; UnsupportedSourceError for a
    part's dtype that safetensors does not have.
    """
    wanted = dtype if isinstance(dtype, DType) else DType.parse_float(dtype)
    if not wanted.is_float:
        raise UsageError(f"values can be float32, bfloat16 or float16, not {wanted}")
    parts = flat_parts(quantized)
    out = np.empty(quantized.shape, numpy_dtype(wanted))
    dequantize_into(parts, out.reshape(-1), kernel=choose_kernel(kernel))
    return out


def dequantize_into(
    parts: QuantizedArray[Array], out: Array, *, kernel: Kernel | None = None
) -> None:
    """Fill ``out`` with the values that `dequantize` returns; arrays are flat and contiguous."""
    choose_kernel(kernel).dequantize(*_with_factor(parts), out)


def _with_factor(parts: QuantizedArray[Array]) -> tuple[QuantizedArray[Array], float]:
    """Return the parts as a `Kernel` takes them, and their global scale."""
    factor = 1.0 if parts.global_scale is None else float(parts.global_scale.reshape(-1)[0])
    if not parts.quant_type.is_affine:
        parts = replace(parts, scale=parts.scale.view(np.uint8))
    return parts, factor


def compare(
    weights: Array, read: Array | QuantizedArray[Array], *, kernel: Kernel | None = None
) -> Comparison:
    """Return the sums over flat ``weights`` and what they are read back as, in float64.

    ``weights``: any real type; ``read``: as many values of any real type, or whole groups, which
    count as the float32 values that `dequantize` returns. The bits do not depend on the kernel.

    Raises: UsageError for arrays of different sizes, and as `dequantize`.
    """
    if weights.size != read.size:
        raise UsageError(f"{weights.size:,} weights are not read back as {read.size:,} values")
    if isinstance(read, QuantizedArray):
        return choose_kernel(kernel).compare_stored(
            _floats(weights), *_with_factor(flat_parts(read))
        )
    return choose_kernel(kernel).compare(_floats(weights), _floats(read))


def _floats(array: Array) -> Array:
    """Return the array flat, contiguous and aligned, as float64 if it is not BF16, F16 or F32."""
    plain = array.reshape(-1)
    kind = plain.dtype if plain.dtype in _SCALES else np.dtype(np.float64)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value here, not an accident
        return np.require(plain, kind, ("C", "A"))


def decode_blocks_into(
    codes: Array, scales: Array, out: Array, run: BlockRun, *, kernel: Kernel | None = None
) -> None:
    """Write ``float32(code) * float32(scale)`` of a run of codes, rounded, to ``out``.

    Each step is rounded half to even. ``codes``: U8 ``[run.nbytes]``. ``scales``: F32, F16 or BF16
    ``[len(run.scales)]``, only those that the run needs. ``out``: BF16 (ml_dtypes), F16 or F32
    ``[run.count]``, which shares no memory with the others. The arrays are contiguous and aligned.
    One call decodes a run through any number of matrices, without the interpreter lock.

    A NaN code, a NaN scale and infinity times zero give NaN, in BF16 always 0x7FC0; a product
    beyond ``out``'s type is an infinity. Values do not depend on each other: a run in pieces gives
    the bits of the whole.

    Raises: UsageError for other types, dtypes, shapes or layouts.
    """
    _check_array("codes", codes, _CODES, run.nbytes)
    _check_array("scales", scales, _SCALES, len(run.scales))
    _check_array("out", out, _SCALES, run.count)
    if not out.flags.writeable:
        raise UsageError("out is read-only")
    if np.may_share_memory(out, codes) or np.may_share_memory(out, scales):
        raise UsageError("out shares memory with codes or scales")
    if run.count:
        choose_kernel(kernel).decode_blocks(codes, scales, run, out)


def _check_array(what: str, array: Array, dtypes: tuple[np.dtype[Any], ...], count: int) -> None:
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{what} is {type(array).__name__}, not an array")
    if array.dtype not in dtypes or array.shape != (count,):
        wanted = " or ".join(map(str, dtypes))
        raise UsageError(
            f"{what} is {array.dtype} of shape {list(array.shape)}, not {wanted} of shape [{count}]"
        )
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise UsageError(f"{what} is not a contiguous, aligned array")
