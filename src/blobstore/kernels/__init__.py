"""Kernels: quantize, dequantize and search for scales, in C++, with bit-equal twins in NumPy."""

from blobstore.kernels.native import KERNELS, Kernel, active, use
from blobstore.kernels.quantize import (
    block_of,
    compare,
    decode_blocks_into,
    dequantize,
    dequantize_into,
    group_range,
    matrix_of,
    quantization_of,
    quantize,
    quantize_into,
)
from blobstore.kernels.reference import Comparison
from blobstore.kernels.scales import (
    FP8_BLOCK,
    METHODS,
    AffineCandidates,
    BlockRun,
    ScaleChoice,
    checked_importance,
    global_scale_of,
    largest_magnitude,
)

__all__ = [
    "FP8_BLOCK",
    "KERNELS",
    "METHODS",
    "AffineCandidates",
    "BlockRun",
    "Comparison",
    "Kernel",
    "ScaleChoice",
    "active",
    "block_of",
    "checked_importance",
    "compare",
    "decode_blocks_into",
    "dequantize",
    "dequantize_into",
    "global_scale_of",
    "group_range",
    "largest_magnitude",
    "matrix_of",
    "quantization_of",
    "quantize",
    "quantize_into",
    "use",
]
