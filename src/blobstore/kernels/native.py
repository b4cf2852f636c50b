"""The C++ kernels, called with the bit patterns of the arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.kernels import _native
from blobstore.quant import QuantType

Array = np.ndarray[Any, Any]

_FORMATS = {
    np.dtype(ml_dtypes.bfloat16): ("bf16", np.uint16),
    np.dtype(np.float16): ("f16", np.uint16),
    np.dtype(np.float32): ("f32", np.uint32),
}


class NativeKernel:
    """quantize.h through bindings.cpp; releases the interpreter lock while it works."""

    name = "native"

    def quantize_affine(self, weights: Array, bits: int, group_size: int, words: Array, scales: Array, biases: Array) -> int:
        """See `blobstore.kernels.Kernel`."""
        name, raw = _FORMATS[weights.dtype]
        kernel = getattr(_native, f"quantize_affine_{name}")
        return int(kernel(weights.view(raw), bits, group_size, words, scales.view(raw), biases.view(raw)))

    def quantize_fp(self, weights: Array, quant_type: QuantType, words: Array, scales: Array) -> int:
        """See `blobstore.kernels.Kernel`."""
        name, raw = _FORMATS[weights.dtype]
        return int(getattr(_native, f"quantize_fp_{name}")(weights.view(raw), quant_type.value, words, scales))

    def dequantize_affine(self, words: Array, scales: Array, biases: Array, bits: int, group_size: int, out: Array) -> None:
        """See `blobstore.kernels.Kernel`."""
        name, raw = _FORMATS[scales.dtype]
        kernel = getattr(_native, f"dequantize_affine_{name}")
        kernel(words, scales.view(raw), biases.view(raw), bits, group_size, out)

    def dequantize_fp(self, words: Array, scales: Array, quant_type: QuantType, global_scale: float, out: Array) -> None:
        """See `blobstore.kernels.Kernel`."""
        _native.dequantize_fp(words, scales, quant_type.value, global_scale, out)
