"""DType: the element types of safetensors, by the names that its headers use.

Source: safetensors README, "Format", and safetensors/src/tensor.rs `Dtype` at version 0.8.0. No
numpy here: the numpy, torch and MLX types are in arrays.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from blobstore.errors import UsageError


class DType(enum.Enum):
    """An element type; the value is its name in a header."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    F4 = "F4"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    I64 = "I64"
    U64 = "U64"
    F64 = "F64"
    C64 = "C64"

    @classmethod
    def parse_float(cls, text: str) -> DType:
        """Return the float type that a user names: bfloat16, float16 or float32, or its name in a header.

        Raises: UsageError for any other word, and for what is not one.
        """
        try:
            return _FLOAT_NAMES[text.lower()]
        except (AttributeError, KeyError):
            raise UsageError(
                f"unknown dtype {text!r}", hint="Use one of: bfloat16, float16, float32."
            ) from None

    @property
    def bits(self) -> int:
        """Width of one element in bits: 4, 6, 8, 16, 32 or 64."""
        return _BITS[self]

    @property
    def is_float(self) -> bool:
        """True for the types that models are trained in and that can be quantized: BF16, F16, F32."""
        return self in _FLOATS

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of an array of this type: exact for whole bytes, rounded up for a sub-byte type."""
        return -(-math.prod(shape) * self.bits // 8)

    def __str__(self) -> str:
        return self.value


_BITS = {
    **dict.fromkeys((DType.F4,), 4),
    **dict.fromkeys((DType.F6_E2M3, DType.F6_E3M2), 6),
    **dict.fromkeys((DType.BOOL, DType.U8, DType.I8), 8),
    **dict.fromkeys(
        (DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ), 8
    ),
    **dict.fromkeys((DType.I16, DType.U16, DType.F16, DType.BF16), 16),
    **dict.fromkeys((DType.I32, DType.U32, DType.F32), 32),
    **dict.fromkeys((DType.I64, DType.U64, DType.F64, DType.C64), 64),
}
_FLOATS = frozenset({DType.BF16, DType.F16, DType.F32})

_FLOAT_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16"), DType.BF16),
    **dict.fromkeys(("f16", "float16"), DType.F16),
    **dict.fromkeys(("f32", "float32"), DType.F32),
}


# mlx 0.32.4, mlx/io/safetensors.cpp `dtype_from_safetensor_str`; F8_E4M3 and F8_E8M0 become uint8
# there.
_NOT_IN_MLX = frozenset(
    {
        DType.F64,
        DType.F4,
        DType.F6_E2M3,
        DType.F6_E3M2,
        DType.F8_E5M2,
        DType.F8_E4M3FNUZ,
        DType.F8_E5M2FNUZ,
    }
)
_MLX_MAX_DIM = 2**31 - 1


def fits_mlx(dtype: DType, shape: Sequence[int]) -> bool:
    """Return True when MLX has arrays of that dtype and shape: `mx.load` takes all of a file or nothing."""
    return dtype not in _NOT_IN_MLX and all(dim <= _MLX_MAX_DIM for dim in shape)


def parameters_of(shape: Sequence[int]) -> int:
    """Return the number of weights in a tensor of that shape.

    A rank-0 tensor has none: it is a setting beside the weights (a mask's value, a scale), and the
    Hub's counts leave it out too. Source: huggingface/huggingface.js@028fe00b
    packages/hub/src/lib/parse-safetensors-metadata.ts.
    """
    return math.prod(shape) if shape else 0


DTYPE_BY_NAME = {dtype.value: dtype for dtype in DType}
"""Header name → DType; a plain dict because the header parser looks up one name a tensor."""
