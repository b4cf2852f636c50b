"""Decode block FP8 weights: E4M3 codes, and a scale for each 128 x 128 block of their matrix.

The form is that of DeepSeek-V3's checkpoints (its README_WEIGHTS.md: ``weight_scale_inv``, which is
multiplied); the arithmetic is docs/quantization.md's.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.errors import UsageError
from blobstore.kernels.native import Kernel, active
from blobstore.kernels.scales import BlockRun

Array = np.ndarray[Any, Any]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_CODES = (np.dtype(np.uint8),)
_SCALES = (np.dtype(np.float32), np.dtype(np.float16), _BF16)


def decode_blocks(
    codes: Array, scales: Array, run: BlockRun, *, kernel: Kernel | None = None
) -> Array:
    """Return the BF16 values of a run of codes as a new flat array.

    The rest is `decode_blocks_into`.
    """
    out = np.empty(run.count, _BF16)
    decode_blocks_into(codes, scales, out, run, kernel=kernel)
    return out


def decode_blocks_into(
    codes: Array, scales: Array, out: Array, run: BlockRun, *, kernel: Kernel | None = None
) -> None:
    """Write ``bf16(float32(code) * float32(scale))`` of a run of codes to ``out``: each step rounded half to even.

    ``codes``: U8 ``[run.count]``, the bits of E4M3. ``scales``: F32, F16 or BF16
    ``[len(run.scales)]``, those that the run needs and no others. ``out``: BF16 (ml_dtypes)
    ``[run.count]``, which shares no memory with the others. The arrays are contiguous and aligned.
    One call decodes a run through any number of matrices, without the interpreter lock.

    A NaN code, a NaN scale and infinity times zero give the BF16 NaN 0x7FC0; a product beyond BF16
    is an infinity. No value depends on another one: a run in pieces gives the bits of the whole.

    Raises: UsageError for other types, dtypes, shapes or layouts.
    """
    _check_array("codes", codes, _CODES, run.count)
    _check_array("scales", scales, _SCALES, len(run.scales))
    _check_array("out", out, (_BF16,), run.count)
    if not out.flags.writeable:
        raise UsageError("out is read-only")
    if np.may_share_memory(out, codes) or np.may_share_memory(out, scales):
        raise UsageError("out shares memory with what it is made of")
    if run.count:
        (kernel or active()).decode_blocks(codes, scales, run, out)


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
