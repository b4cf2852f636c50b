"""The C++ kernels, called with the bit patterns of the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore.arrays import QuantizedArray, dtype_of
from blobstore.kernels import _native
from blobstore.kernels.block_runs import BlockRun
from blobstore.kernels.scales import ScaleChoice

Array = np.ndarray[Any, Any]


def targets() -> list[str]:
    """Return the levels of the processor that this build has code for and that run here, the best first."""
    return list(_native.targets())


class NativeKernel:
    """The kernels of one target through bindings.cpp; they release the interpreter lock while they work."""

    def __init__(self, target: str) -> None:
        self.name = target

    def quantize(self, weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice) -> int:
        """See `blobstore.kernels.choice.Kernel`."""
        candidates = choice.candidates_for(parts.quant_type)
        return int(
            _native.quantize(
                self.name,
                choice.method,
                parts.quant_type.value,
                dtype_of(weights).value,
                _bits(weights),
                parts.group_size,
                parts.weight,
                _bits(parts.scale),
                None if parts.bias is None else _bits(parts.bias),
                choice.global_scale,
                choice.importance,
                choice.first_column,
                list(candidates.factors),
                list(candidates.shifts),
                candidates.neighbours,
            )
        )

    def dequantize(self, parts: QuantizedArray[Array], global_scale: float, out: Array) -> None:
        """See `blobstore.kernels.choice.Kernel`."""
        scale_type = dtype_of(parts.scale).value if parts.bias is not None else "F32"  # not used by the fp types
        _native.dequantize(
            self.name,
            parts.quant_type.value,
            scale_type,
            dtype_of(out).value,
            parts.weight,
            _bits(parts.scale),
            None if parts.bias is None else _bits(parts.bias),
            parts.group_size,
            global_scale,
            _bits(out),
        )

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        """See `blobstore.kernels.choice.Kernel`."""
        scale_type = dtype_of(scales).value
        _native.decode_blocks(self.name, scale_type, codes, _bits(scales), run.first, run.rows, run.cols, _bits(out))


def _bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")
