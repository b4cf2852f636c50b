"""Decode block FP8 weights: E4M3 codes, and a scale for each 128 x 128 block of the matrix.

The form is that of DeepSeek-V3's checkpoints (its README_WEIGHTS.md: ``weight_scale_inv``, which is multiplied); the
arithmetic is docs/quantization.md's.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.errors import UsageError
from blobstore.kernels.choice import Kernel, active
from blobstore.kernels.small_floats import FP8_BLOCK

Array = np.ndarray[Any, Any]

_BF16 = np.dtype(ml_dtypes.bfloat16)


def decode_blocks(codes: Array, scales: Array, *, first: int, cols: int, kernel: Kernel | None = None) -> Array:
    """Return the BF16 values of a run of codes as a new flat array; the rest is `decode_blocks_into`."""
    out = np.empty(codes.shape, _BF16)
    decode_blocks_into(codes, scales, out, first=first, cols=cols, kernel=kernel)
    return out


def decode_blocks_into(
    codes: Array, scales: Array, out: Array, *, first: int, cols: int, kernel: Kernel | None = None
) -> None:
    """Write ``bf16(float32(code) * scale)`` of a run of codes to ``out``: both steps rounded half to even.

    ``codes``: U8 ``[count]``, the E4M3 bits of a row-major matrix ``[rows, cols]`` from flat index ``first`` on; the run may
    begin and end inside a row. ``scales``: F32 ``[ceil(rows / 128), ceil(cols / 128)]``, those of the whole matrix.
    ``out``: BF16 (ml_dtypes) ``[count]``, which shares no memory with the others. The arrays are contiguous and aligned.

    A NaN code, a NaN scale and infinity times zero give the BF16 NaN 0x7FC0; a product beyond BF16 is an infinity. No value
    depends on another one: a run in pieces gives the bits of the whole.

    Raises: UsageError for other dtypes, shapes or layouts, or a run that its matrix can't hold.
    """
    _check_array("codes", codes, np.dtype(np.uint8), 1)
    _check_array("scales", scales, np.dtype(np.float32), 2)
    _check_array("out", out, _BF16, 1)
    _check_run(codes, scales, first, cols)
    if out.size != codes.size:
        raise UsageError(f"out has {out.size:,} values for {codes.size:,} codes")
    if not out.flags.writeable:
        raise UsageError("out is read-only")
    if np.may_share_memory(out, codes) or np.may_share_memory(out, scales):
        raise UsageError("out shares memory with what it is made of")
    (kernel or active()).decode_blocks(codes, scales, first, cols, out)


def _check_array(what: str, array: Array, dtype: np.dtype[Any], rank: int) -> None:
    if array.dtype != dtype or array.ndim != rank:
        raise UsageError(f"{what} is {array.dtype} of shape {list(array.shape)}, not {dtype} of rank {rank}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise UsageError(f"{what} is not a contiguous, aligned array")


def _check_run(codes: Array, scales: Array, first: int, cols: int) -> None:
    """Raise UsageError unless a matrix with these scales can hold the run."""
    if type(first) is not int or type(cols) is not int or first < 0 or cols < 0:
        raise UsageError(f"first is {first!r} and cols is {cols!r}: both must be whole numbers of at least 0")
    blocks = -(-cols // FP8_BLOCK)
    if scales.shape[1] != blocks:
        raise UsageError(f"scales has shape {list(scales.shape)}, but {cols:,} columns have {blocks:,} blocks")
    rows, last = len(scales) * FP8_BLOCK, first + codes.size
    if last > rows * cols:
        raise UsageError(f"the run ends at {last:,}, after the at most {rows:,} x {cols:,} codes of its matrix")
