"""QuantizedArray, and the numpy types of safetensors' dtypes.

Types that numpy does not have (BF16, FP8) come from ml_dtypes, which numpy treats as its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np

from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError
from blobstore.quant import Quantization, QuantType

T = TypeVar("T")

_NUMPY_TYPES: dict[DType, Any] = {
    DType.BOOL: np.bool_,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.F8_E5M2: ml_dtypes.float8_e5m2,
    DType.F8_E4M3: ml_dtypes.float8_e4m3fn,
    DType.F8_E8M0: ml_dtypes.float8_e8m0fnu,
    DType.F8_E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    DType.F8_E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    DType.I16: np.int16,
    DType.U16: np.uint16,
    DType.F16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.I32: np.int32,
    DType.U32: np.uint32,
    DType.F32: np.float32,
    DType.I64: np.int64,
    DType.U64: np.uint64,
    DType.F64: np.float64,
    DType.C64: np.complex64,
}
_NUMPY: dict[DType, np.dtype[Any]] = {dtype: np.dtype(kind) for dtype, kind in _NUMPY_TYPES.items()}
_DTYPE = {kind: dtype for dtype, kind in _NUMPY.items()}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the little-endian numpy type for one element.

    Raises: UnsupportedSourceError for the sub-byte types F4, F6_E2M3 and F6_E3M2, which no numpy array can hold packed.
    """
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise UnsupportedSourceError(f"numpy has no packed {dtype} arrays", hint="Read the tensor's raw bytes.") from None


def dtype_of(array: np.ndarray[Any, Any]) -> DType:
    """Return the safetensors dtype of a numpy array. Raises: UnsupportedSourceError when it has none."""
    try:
        return _DTYPE[array.dtype.newbyteorder("=")]
    except (KeyError, TypeError):  # the last for dtypes without a byte order: StringDType
        raise UnsupportedSourceError(f"safetensors has no dtype for numpy's {array.dtype}") from None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray(Generic[T]):
    """A quantized tensor's stored arrays: numpy, torch or mlx, all of one library.

    ``weight`` U32 ``[..., rows, cols * bits / 32]``; ``scale`` ``[..., rows, cols / group_size]`` in the source's float
    dtype (affine) or U8 bit patterns (E4M3 for nvfp4, E8M0 for mxfp4 and mxfp8); ``bias`` as ``scale``, affine only;
    ``global_scale`` one F32, only for double-scaled nvfp4.
    """

    weight: T
    scale: T
    bias: T | None
    global_scale: T | None
    quantization: Quantization

    @property
    def quant_type(self) -> QuantType:
        """The type: `QuantType.INT4` and so on."""
        return self.quantization.quant_type

    @property
    def group_size(self) -> int:
        """Consecutive values of the last dimension that share a scale."""
        return self.quantization.group_size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before packing: ``[..., rows, cols]``."""
        return self.quantization.logical_shape(tuple(self.weight.shape))  # type: ignore[attr-defined]  # T is an array

    @property
    def size(self) -> int:
        """Number of values before packing."""
        return math.prod(self.shape)
