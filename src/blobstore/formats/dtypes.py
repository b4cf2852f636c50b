"""DType: the element types of safetensors, by the names that its headers use.

Source: safetensors README, "Format", and safetensors/src/tensor.rs `Dtype` at version 0.8.0. No
numpy here: kernels/arrays.py makes numpy's types of their names.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from blobstore.errors import UsageError


class DType(enum.Enum):
    """An element type; the value is its name in a header.

    One row a type, in the library's order, which is that of their alignment: the name, ``bits`` of
    an element, ``array_name`` in numpy, ml_dtypes and torch (None if they have no packed type), and
    ``mlx_name``, as which MLX loads it (None if it does not; mlx 0.32.4, mlx/io/safetensors.cpp
    `dtype_from_safetensor_str`).
    """

    _value_: str
    bits: int
    array_name: str | None
    mlx_name: str | None

    BOOL = "BOOL", 8, "bool", "bool_"
    F4 = "F4", 4
    F6_E2M3 = "F6_E2M3", 6
    F6_E3M2 = "F6_E3M2", 6
    U8 = "U8", 8, "uint8", "uint8"
    I8 = "I8", 8, "int8", "int8"
    F8_E5M2 = "F8_E5M2", 8, "float8_e5m2"
    F8_E4M3 = "F8_E4M3", 8, "float8_e4m3fn", "uint8"
    F8_E8M0 = "F8_E8M0", 8, "float8_e8m0fnu", "uint8"
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8, "float8_e4m3fnuz"
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8, "float8_e5m2fnuz"
    I16 = "I16", 16, "int16", "int16"
    U16 = "U16", 16, "uint16", "uint16"
    F16 = "F16", 16, "float16", "float16"
    BF16 = "BF16", 16, "bfloat16", "bfloat16"
    I32 = "I32", 32, "int32", "int32"
    U32 = "U32", 32, "uint32", "uint32"
    F32 = "F32", 32, "float32", "float32"
    C64 = "C64", 64, "complex64", "complex64"
    F64 = "F64", 64, "float64"
    I64 = "I64", 64, "int64", "int64"
    U64 = "U64", 64, "uint64", "uint64"

    def __new__(
        cls, name: str, bits: int = 0, array_name: str | None = None, mlx_name: str | None = None
    ) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.bits = bits
        member.array_name = array_name
        member.mlx_name = mlx_name
        return member

    # By identity: Enum's own hashes the name, in Python, 30 times a tensor of an import.
    __hash__ = object.__hash__

    @classmethod
    def parse_float(cls, text: str) -> DType:
        """Return the float type of a user's word: bfloat16, float16, float32 or a header's name.

        Raises: UsageError for any other word, and for a value that is not a string.
        """
        try:
            return FLOAT_NAMES[text.lower()]
        except (AttributeError, KeyError):
            raise UsageError(
                f"unknown dtype {text!r}", hint="Use one of: bfloat16, float16, float32."
            ) from None

    @property
    def is_float(self) -> bool:
        """True for the types that models are trained in and can be quantized: BF16, F16, F32."""
        return self in FLOATS

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of an array of this type: exact for whole bytes, rounded up for a sub-byte type."""
        return -(-math.prod(shape) * self.bits // 8)

    def __str__(self) -> str:
        return str(self.value)


FLOATS = (DType.BF16, DType.F16, DType.F32)
FP8 = (DType.F8_E4M3, DType.F8_E5M2)
"""The types of 8-bit floats that are decoded."""
FLOAT_NAMES = {
    name: dtype for dtype in FLOATS for name in (dtype.value.lower(), str(dtype.array_name))
}
"""What users call the types of `FLOATS`: bf16, bfloat16 and so on."""
DTYPE_BY_NAME = {dtype.value: dtype for dtype in DType}
"""Header name → DType; a plain dict because the header parser looks up one name a tensor."""
_MLX_MAX_DIM = 2**31 - 1


def fits_mlx(dtype: DType, shape: Sequence[int]) -> bool:
    """Return True if MLX has arrays of that dtype and shape."""
    return dtype.mlx_name is not None and max(shape, default=0) <= _MLX_MAX_DIM


def parameters_of(shape: Sequence[int]) -> int:
    """Return the number of weights in a tensor of that shape.

    A rank-0 tensor counts 0: it is a setting, not a weight (a mask's value, a scale), and the
    Hub's counts exclude it too. Source: huggingface/huggingface.js@028fe00b
    packages/hub/src/lib/parse-safetensors-metadata.ts.
    """
    return math.prod(shape) if shape else 0


def float_dtype(config: Mapping[str, Any]) -> DType:
    """Return the dtype that config.json names for weights; BF16 where it names none of ours."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            with suppress(UsageError):
                return DType.parse_float(str(section.get(key)))
    return DType.BF16
