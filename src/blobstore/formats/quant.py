"""QuantType and Quantization: the arrays that each quantized form stores.

Facts: docs/formats.md section 3. Words: a *group* is ``group_size`` consecutive values of the last
dimension; each group has one scale (and, for the affine types, one bias). *Codes* are packed into
U32 words, the first code in the lowest bits.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType

AFFINE_GROUP_SIZES = (32, 64, 128)
_WORD_BITS = 32
_MAX_DIGITS = 9


class QuantType(enum.Enum):
    """A quantized form; the value is Ollama's ``quant_type``.

    One row a type: its name, ``mode``, MLX's word for it, the ``bits`` of a code, and the
    ``group_sizes`` that it can have.
    """

    _value_: str
    mode: str
    bits: int
    group_sizes: tuple[int, ...]

    INT4 = "int4", "affine", 4, AFFINE_GROUP_SIZES
    INT8 = "int8", "affine", 8, AFFINE_GROUP_SIZES
    NVFP4 = "nvfp4", "nvfp4", 4, (16,)
    MXFP4 = "mxfp4", "mxfp4", 4, (32,)
    MXFP8 = "mxfp8", "mxfp8", 8, (32,)

    def __new__(
        cls, name: str, mode: str = "", bits: int = 0, group_sizes: tuple[int, ...] = ()
    ) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.mode, member.bits, member.group_sizes = mode, bits, group_sizes
        return member

    __hash__ = object.__hash__  # by identity, as DType's

    @classmethod
    def parse(cls, text: str) -> QuantType:
        """Return the type of a user's word; as in Ollama, q4 and fp4 mean int4, q8 and fp8 int8.

        Raises: UsageError for any other word, and for a value that is not a string.
        """
        try:
            name = text.lower()
            return cls(_ALIASES.get(name, name))
        except (AttributeError, ValueError):
            known = f"Use one of: {', '.join(member.value for member in cls)}."
            # q4_K_M and int3 are other programs' words.
            if bits := re.search(r"(?<![0-9])[2-8](?![0-9])", str(text)):
                known = f"The nearest is int{4 if int(bits[0]) <= 4 else 8}. {known}"  # noqa: PLR2004
            raise UsageError(f"unknown quantization type {text!r}", hint=known) from None

    @property
    def is_affine(self) -> bool:
        """True if values are ``code * scale + bias``; False if small floats times scales."""
        return self.mode == "affine"

    @property
    def eight_bit(self) -> QuantType:
        """The family's 8-bit type: int8 for the affine types, mxfp8 for the others."""
        return QuantType.INT8 if self.is_affine else QuantType.MXFP8

    def __str__(self) -> str:
        return str(self.value)


_ALIASES = {"q4": "int4", "fp4": "int4", "q8": "int8", "fp8": "int8"}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array of a tensor.

    ``suffix`` is added to the tensor's name: "", ".scale", ".bias", ".global_scale".
    """

    suffix: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one tensor is quantized: a type and a group size that the type can have."""

    quant_type: QuantType
    group_size: int

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in self.quant_type.group_sizes:
            possible = ", ".join(str(size) for size in self.quant_type.group_sizes)
            raise UsageError(
                f"{self.quant_type} has no group size {self.group_size!r}",
                hint=f"Use one of: {possible}.",
            )

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(quant_type: str, group_size: str | None) -> Quantization:
        """Return the quantization in words; without a group size it is the type's first one.

        Raises: UsageError for an unknown type or a group size that the type does not have.
        """
        parsed = QuantType.parse(quant_type)
        size = group_size or str(parsed.group_sizes[0])
        is_number = size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS
        return Quantization(parsed, int(size) if is_number else 0)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], prefix: str) -> Quantization:
        """Return the quantization in metadata, whose keys begin with ``prefix``.

        Raises: KeyError without a ``quant_type``; as `parse`.
        """
        return cls.parse(metadata[f"{prefix}quant_type"], metadata.get(f"{prefix}group_size"))

    def divides(self, shape: Sequence[int]) -> bool:
        return len(shape) > 0 and shape[-1] % self.group_size == 0

    def parts(
        self, shape: Sequence[int], dtype: DType, *, global_scale: Sequence[int] | None = None
    ) -> Iterator[Part]:
        """Yield the stored arrays for a source of ``shape`` and float ``dtype``, in stored order.

        The weight is U32 ``[..., cols * bits / 32]``; scale (and bias) are ``[..., cols /
        group_size]``, in the source's dtype for the affine types and U8 bit patterns for the
        others. ``global_scale`` is the shape of a double-scaled tensor's global scale, ``[1]`` or
        ``[]``; None if the tensor does not have one.
        """
        *lead, cols = shape
        groups = (*lead, cols // self.group_size)
        yield Part("", DType.U32, (*lead, cols * self.quant_type.bits // _WORD_BITS))
        yield Part(".scale", dtype if self.quant_type.is_affine else DType.U8, groups)
        if self.quant_type.is_affine:
            yield Part(".bias", dtype, groups)
        if global_scale is not None:
            yield Part(".global_scale", DType.F32, tuple(global_scale))

    def logical_shape(self, weight_shape: Sequence[int]) -> tuple[int, ...]:
        return (*weight_shape[:-1], weight_shape[-1] * _WORD_BITS // self.quant_type.bits)

    def __str__(self) -> str:
        return f"{self.quant_type}/{self.group_size}"
