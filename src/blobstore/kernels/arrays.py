"""QuantizedArray, the numpy types of safetensors' dtypes, and checks of callers' arrays.

Types that numpy lacks (BF16, FP8) come from ml_dtypes; numpy treats them as its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np

from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.formats.dtypes import DType, Quantization, QuantType

T = TypeVar("T")

_NUMPY: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(getattr(ml_dtypes, dtype.array_name, dtype.array_name))
    for dtype in DType
    if dtype.array_name is not None
}
_DTYPE = {kind: dtype for dtype, kind in _NUMPY.items()}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the little-endian numpy type for one element.

    Raises: UnsupportedSourceError for the sub-byte types F4, F6_E2M3 and F6_E3M2, which no numpy
    array can hold packed.
    """
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise UnsupportedSourceError(
            f"numpy has no packed {dtype} arrays", hint="Read the tensor's raw bytes."
        ) from None


def dtype_of(array: np.ndarray[Any, Any]) -> DType:
    """Return the safetensors dtype of a numpy array.

    Raises: UnsupportedSourceError when it has none.
    """
    try:
        return _DTYPE[array.dtype.newbyteorder("=")]
    except (KeyError, TypeError):  # the last for dtypes without a byte order: StringDType
        raise UnsupportedSourceError(
            f"safetensors has no dtype for numpy's {array.dtype}"
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray(Generic[T]):
    """A quantized tensor's stored arrays: numpy, torch or mlx, all of one library.

    ``weight`` U32 ``[..., rows, cols * bits / 32]``; ``scale`` ``[..., rows, cols / group_size]``
    in the source's float dtype (affine) or U8 bit patterns (E4M3 for nvfp4, E8M0 for mxfp4 and
    mxfp8); ``bias`` as ``scale``, affine only; ``global_scale`` one F32, only for double-scaled
    nvfp4.
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


Array = np.ndarray[Any, Any]


def array_of(given: Any, what: str) -> Array:
    """Return ``given`` as a plain numpy array, without a copy if numpy needs none.

    Raises: UsageError if numpy can't read it as an array, and for masked values.
    """
    if np.ma.is_masked(given):
        raise UsageError(f"{what} has masked values", hint="Fill them first: array.filled(0).")
    try:
        return np.asarray(given)
    # PyTorch raises a RuntimeError for a tensor with a gradient.
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{what} is a {type(given).__name__} that numpy can't read as an array: {error}"
        ) from error


Change = Callable[[Array], Array]


def map_parts(
    parts: QuantizedArray[Array], change: Change, change_scales: Change | None = None
) -> QuantizedArray[Array]:
    """Return the parts with the weight changed; scale and bias alike, or by their own change."""
    of_scales = change_scales or change
    bias = None if parts.bias is None else of_scales(parts.bias)
    return replace(parts, weight=change(parts.weight), scale=of_scales(parts.scale), bias=bias)


def flat_parts(quantized: QuantizedArray[Array]) -> QuantizedArray[Array]:
    """Return the parts flat, contiguous, aligned and in native byte order, copied only if needed.

    Raises: UsageError unless they are numpy arrays of the shapes and dtypes that the quantization
    says; UnsupportedSourceError for a dtype that safetensors does not have.
    """
    if not isinstance(quantized, QuantizedArray):
        raise UsageError(f"a {type(quantized).__name__} is not a QuantizedArray")
    if not isinstance(quantized.quantization, Quantization):
        raise UsageError(f"the quantization is {quantized.quantization!r}, not a Quantization")
    _check_arrays(quantized)
    _check_shapes(quantized)
    return map_parts(quantized, _flat)


def _check_arrays(quantized: QuantizedArray[Array]) -> None:
    for name in ("weight", "scale", "bias", "global_scale"):
        part = getattr(quantized, name)
        if part is None and name in ("bias", "global_scale"):
            continue
        if not isinstance(part, np.ndarray):
            raise UsageError(f"{name} is a {type(part).__name__}, not a numpy array")
        array_of(part, name)
    if quantized.weight.ndim == 0:
        raise UsageError("weight has no dimensions: it must be [..., rows, words]")


def _check_shapes(quantized: QuantizedArray[Array]) -> None:
    if not quantized.quantization.divides(quantized.shape):
        raise UsageError(
            f"groups of {quantized.group_size} do not divide the last dimension of shape "
            f"{list(quantized.shape)}, which the weight has"
        )
    parts = (quantized.weight, quantized.scale, quantized.bias, quantized.global_scale)
    described = [(dtype_of(part), part.shape) for part in parts if part is not None]
    factor = quantized.global_scale if quantized.quant_type is QuantType.NVFP4 else None
    shape = None if factor is None else (1,) * min(factor.ndim, 1)
    scales = dtype_of(quantized.scale)
    wanted = quantized.quantization.parts(quantized.shape, scales, global_scale=shape)
    scales_fit = scales.is_float or not quantized.quant_type.is_affine
    if described != [(part.dtype, part.shape) for part in wanted] or not scales_fit:
        shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in described)
        raise UsageError(f"the parts {shown} do not fit {quantized.quantization}")


def _flat(part: Array) -> Array:
    plain = np.asarray(part)  # reshape keeps an np.matrix two-dimensional
    return np.require(plain, numpy_dtype(dtype_of(plain)), ("C", "A")).reshape(-1)
