"""Arguments: what callers of the public functions give, as plain arrays that fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from blobstore.arrays import QuantizedArray, dtype_of, numpy_dtype
from blobstore.errors import UsageError
from blobstore.quant import Quantization, QuantType

Array = np.ndarray[Any, Any]


def array_of(given: Any, what: str) -> Array:
    """Return what numpy reads as an array as one, without a copy where numpy needs none; subclasses become plain arrays.

    Raises: UsageError for anything else, and for masked values: what lies under a mask is not a value.
    """
    if np.ma.is_masked(given):
        raise UsageError(f"{what} has masked values", hint="Fill them first: array.filled(0).")
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch raises the last for a tensor with a gradient
        raise UsageError(f"{what} is a {type(given).__name__} that numpy can't read as an array: {error}") from error


def mapped(parts: QuantizedArray[Array], change: Callable[[Array], Array]) -> QuantizedArray[Array]:
    """Return the parts with weight, scale and bias changed."""
    bias = None if parts.bias is None else change(parts.bias)
    return replace(parts, weight=change(parts.weight), scale=change(parts.scale), bias=bias)


def flat_parts(quantized: QuantizedArray[Array]) -> QuantizedArray[Array]:
    """Return the parts flat, contiguous, aligned and in native byte order; copies only where a part is not.

    Raises: UsageError unless they are numpy arrays of the shapes and dtypes that the quantization says;
    UnsupportedSourceError for a dtype that safetensors does not have.
    """
    if not isinstance(quantized, QuantizedArray):
        raise UsageError(f"a {type(quantized).__name__} is not a QuantizedArray")
    if not isinstance(quantized.quantization, Quantization):
        raise UsageError(f"the quantization is {quantized.quantization!r}, not a Quantization")
    _check_arrays(quantized)
    _check_shapes(quantized)
    return mapped(quantized, _flat)


def _check_arrays(quantized: QuantizedArray[Array]) -> None:
    needed = {"weight": quantized.weight, "scale": quantized.scale}
    optional = {"bias": quantized.bias, "global_scale": quantized.global_scale}
    for name, part in {**needed, **{name: part for name, part in optional.items() if part is not None}}.items():
        if not isinstance(part, np.ndarray):
            raise UsageError(f"{name} is a {type(part).__name__}, not a numpy array")
        array_of(part, name)
    if quantized.weight.ndim == 0:
        raise UsageError("weight has no dimensions: it must be [..., rows, words]")


def _check_shapes(quantized: QuantizedArray[Array]) -> None:
    if not quantized.quantization.divides(quantized.shape):
        group = f"groups of {quantized.group_size}"
        raise UsageError(f"{group} do not divide the last dimension of shape {list(quantized.shape)}, which the weight has")
    parts = (quantized.weight, quantized.scale, quantized.bias, quantized.global_scale)
    described = [(dtype_of(part), part.shape) for part in parts if part is not None]
    factor = quantized.global_scale if quantized.quant_type is QuantType.NVFP4 else None
    shape = None if factor is None else (() if factor.ndim == 0 else (1,))
    scales = dtype_of(quantized.scale)
    wanted = quantized.quantization.parts(quantized.shape, scales, global_scale=shape)
    scales_fit = scales.is_float or not quantized.quant_type.is_affine
    if described != [(part.dtype, part.shape) for part in wanted] or not scales_fit:
        shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in described)
        raise UsageError(f"no {quantized.quantization} array has the parts {shown}")


def _flat(part: Array) -> Array:
    plain = np.asarray(part)  # np.matrix stays a matrix when it is made flat
    return np.require(plain, numpy_dtype(dtype_of(plain)), ("C", "A")).reshape(-1)
