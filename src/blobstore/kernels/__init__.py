"""Quantize and dequantize arrays: the public functions, and the choice between the two implementations.

`native` is C++ (quantize.h), `reference` its NumPy twin: the same bits, for every input. `use` chooses one for the
process; tests run both.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from blobstore.arrays import QuantizedArray, dtype_of, numpy_dtype
from blobstore.errors import NonFiniteWeightError, UsageError
from blobstore.kernels.native import NativeKernel
from blobstore.kernels.reference import ReferenceKernel
from blobstore.quant import Quantization, QuantType

METHODS = ("minmax",)

Array = np.ndarray[Any, Any]


class Kernel(Protocol):
    """One implementation. All arrays are flat and contiguous; outputs are written in place.

    ``weights`` and, for the affine types, ``scales`` and ``biases`` are BF16, F16 or F32 of one dtype. The quantizers
    return the index of the first non-finite weight, or -1.
    """

    name: str

    def quantize_affine(self, weights: Array, bits: int, group_size: int, words: Array, scales: Array, biases: Array) -> int:
        """``code * scale + bias``; see `Kernel`."""

    def quantize_fp(self, weights: Array, quant_type: QuantType, words: Array, scales: Array) -> int:
        """Small floats times a scale; ``scales`` are U8 bit patterns."""

    def dequantize_affine(self, words: Array, scales: Array, biases: Array, bits: int, group_size: int, out: Array) -> None:
        """Write float32 values to ``out``."""

    def dequantize_fp(self, words: Array, scales: Array, quant_type: QuantType, global_scale: float, out: Array) -> None:
        """Write float32 values to ``out``."""


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (NativeKernel(), ReferenceKernel())}
_active: Kernel = KERNELS["native"]


def use(name: str) -> None:
    """Choose the implementation for this process: ``native`` or ``reference``. Raises: UsageError for another word."""
    global _active  # noqa: PLW0603  # one choice a process, made before work starts
    if name not in KERNELS:
        raise UsageError(f"unknown kernel {name!r}", hint=f"Use one of: {', '.join(KERNELS)}.")
    _active = KERNELS[name]


def active() -> Kernel:
    """Return the implementation in use."""
    return _active


def check_method(method: str) -> str:
    """Return ``method`` when it is a quantization method. Raises: UsageError otherwise."""
    if method not in METHODS:
        raise UsageError(f"unknown quantization method {method!r}", hint=f"Use one of: {', '.join(METHODS)}.")
    return method


def quantization_of(quant_type: str | QuantType, group_size: int | None = None) -> Quantization:
    """Return the quantization for a type's name and a group size; None means int4/32, int8/64 or the type's only size.

    Raises: UsageError for an unknown type or a group size that the type does not have.
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
    kernel: Kernel | None = None,
) -> QuantizedArray[Array]:
    """Return ``array`` quantized along its last dimension.

    ``array``: BF16 (ml_dtypes), F16 or F32 of shape ``[..., rows, cols]``, rank 2 or more, cols a multiple of the group
    size. The result owns new arrays (a non-contiguous or big-endian input is copied first); affine scales and biases have
    the input's dtype. The arithmetic is docs/quantization.md's: the same bits as ``mx.quantize`` for the affine types.

    Raises: UsageError (unknown type or method, rank under 2, a group that does not divide cols, another dtype);
    UnsupportedSourceError (a dtype that safetensors has not); NonFiniteWeightError with the index of the first NaN or
    infinity.
    """
    quantization = quantization_of(quant_type, group_size)
    check_method(method)
    array = np.asarray(array)
    dtype = dtype_of(array)
    if not dtype.is_float:
        raise UsageError(f"only BF16, F16 and F32 arrays can be quantized, not {dtype}")
    if array.ndim < 2:  # noqa: PLR2004
        raise UsageError(f"only arrays of rank 2 or more can be quantized, not shape {array.shape}")
    if not quantization.divides(array.shape):
        raise UsageError(f"groups of {quantization.group_size} do not divide the last dimension of shape {array.shape}")
    parts = [np.empty(part.shape, numpy_dtype(part.dtype)) for part in quantization.parts(array.shape, dtype)]
    bad = quantize_into(np.require(array, numpy_dtype(dtype), ("C", "A")), quantization, parts, kernel=kernel)
    if bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(bad, array.shape))
        raise NonFiniteWeightError(f"the weight at {list(index)} is {array[index]}: it can't be quantized", index=index)
    weight, scale, *rest = parts
    return QuantizedArray(weight, scale, rest[0] if rest else None, None, quantization)


def quantize_into(array: Array, quantization: Quantization, parts: list[Array], *, kernel: Kernel | None = None) -> int:
    """Quantize a contiguous ``array`` into ``parts`` (weight, scale and, for affine types, bias, as `Quantization.parts`).

    Returns the flat index of the first non-finite weight, or -1; with an index, the parts are unspecified.
    """
    kernel = kernel or _active
    flat, words, *scales = (part.reshape(-1) for part in (array, *parts))
    if quantization.quant_type.is_affine:
        return kernel.quantize_affine(flat, quantization.quant_type.bits, quantization.group_size, words, *scales)
    return kernel.quantize_fp(flat, quantization.quant_type, words, scales[0])


def dequantize(quantized: QuantizedArray[Array], *, kernel: Kernel | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the float32 values ``[..., rows, cols]`` of a quantized numpy array, as a new array.

    ``code * scale + bias`` for the affine types, ``code * scale`` (``* global_scale``) for the others, each operation
    rounded to float32.

    Raises: UsageError when the arrays' shapes or dtypes are not those of the type.
    """
    kernel = kernel or _active
    quantization = quantized.quantization
    _check_parts(quantized)
    out = np.empty(quantized.shape, np.float32)
    words, scales = (_flat(part) for part in (quantized.weight, quantized.scale))
    if quantization.quant_type.is_affine:
        biases = _flat(np.asarray(quantized.bias))
        bits, group_size = quantization.quant_type.bits, quantization.group_size
        kernel.dequantize_affine(words, scales, biases, bits, group_size, out.reshape(-1))
    else:
        factor = 1.0 if quantized.global_scale is None else float(np.asarray(quantized.global_scale).reshape(-1)[0])
        kernel.dequantize_fp(words, scales.view(np.uint8), quantization.quant_type, factor, out.reshape(-1))
    return out


def _check_parts(quantized: QuantizedArray[Array]) -> None:
    """Raise UsageError unless weight, scale and bias have the shapes and dtypes that the type says."""
    given = [part for part in (quantized.weight, quantized.scale, quantized.bias) if part is not None]
    wanted = list(quantized.quantization.parts(quantized.shape, dtype_of(quantized.scale)))
    described = [(dtype_of(part), part.shape) for part in given]
    if described != [(part.dtype, part.shape) for part in wanted] or not _scales_fit(quantized):
        shown = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in described)
        raise UsageError(f"no {quantized.quantization} array has the parts {shown}")


def _scales_fit(quantized: QuantizedArray[Array]) -> bool:
    return not quantized.quant_type.is_affine or dtype_of(quantized.scale).is_float


def _flat(part: Array) -> Array:
    """Return the array flat, contiguous and aligned: a copy only where a file has it at an odd address."""
    return np.require(part, requirements=("C", "A")).reshape(-1)
