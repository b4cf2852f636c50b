"""Block FP8 weights decoded into a new array."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from blobstore import kernels
from blobstore.kernels.arrays import Array


def decode_blocks(
    codes: Array, scales: Array, run: kernels.BlockRun, *, kernel: kernels.Kernel | None = None
) -> Array:
    out = np.empty(run.count, ml_dtypes.bfloat16)
    kernels.decode_blocks_into(codes, scales, out, run, kernel=kernel)
    return out
