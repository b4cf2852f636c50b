"""Options: what a user asks of an import, checked once; and the two profiles that preset them."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blobstore.dtypes import DType
from blobstore.errors import UsageError
from blobstore.importer.importance import Importance
from blobstore.kernels import check_method
from blobstore.quant import Quantization, QuantType

PAGE = 16_384
"""Apple's page size, and a multiple of everybody else's."""
_PAGE_ALIGNED_FROM = 2**20
_DEFAULT_ALIGNMENT = 8
_MAX_ALIGNMENT = 2**20


class Experts(enum.Enum):
    """The form of mixture-of-experts weights: one blob of all tensors of a group, or one tensor a projection."""

    PACKED = "packed"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Profile:
    """A preset of four independent options (docs/design.md, "Glossary"); ``group_sizes`` are int4's and int8's."""

    name: str
    group_sizes: dict[QuantType, int]
    aligned_to: dict[QuantType, int]
    experts: Experts
    page_aligned: bool
    own_document: bool


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="default",
            group_sizes={QuantType.INT4: 32, QuantType.INT8: 64},
            aligned_to={},
            experts=Experts.PACKED,
            page_aligned=True,
            own_document=True,
        ),
        Profile(
            name="ollama",
            group_sizes={QuantType.INT4: 64, QuantType.INT8: 64},
            # Ollama quantizes int4 and int8 only when 64 divides the rows, whatever the group.
            aligned_to={QuantType.INT4: 64, QuantType.INT8: 64},
            experts=Experts.STACKED,
            page_aligned=False,
            own_document=False,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The options of an import, all valid. ``group_size`` is the asked type's; ``alignment`` None is the profile's."""

    quant_type: QuantType | None = None
    group_size: int | None = None
    method: str = "minmax"
    dtype: DType | None = None
    profile: Profile = PROFILES["default"]
    experts: Experts = Experts.PACKED
    alignment: int | None = None
    importance: Importance | None = None
    global_scale: bool = False

    @classmethod
    def parse(
        cls,
        *,
        quant: str | None = None,
        group_size: int | None = None,
        method: str = "minmax",
        dtype: str | None = None,
        profile: str = "default",
        experts: str | None = None,
        alignment: int | None = None,
        importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        global_scale: bool = False,
    ) -> ImportOptions:
        """Return options from a user's words. ``quant`` None or "none" keeps the weights as they are.

        Raises: UsageError for an unknown word, a group size that the type does not have, an option that says nothing
        without another; as `Importance.parse`.
        """
        if profile not in PROFILES:
            raise UsageError(f"unknown profile {profile!r}", hint=f"Use one of: {', '.join(PROFILES)}.")
        preset = PROFILES[profile]
        quant_type = None if quant in (None, "none") else QuantType.parse(str(quant))
        if quant_type is None and group_size is not None:
            raise UsageError("a group size needs a quantization type", hint="Add --quant int4, for example.")
        if importance is not None and (quant_type is None or check_method(method) != "search"):
            raise UsageError("importance weighs the errors of a search", hint="Add --quant TYPE --method search.")
        if quant_type is None and check_method(method) != "minmax":
            raise UsageError(f"the method {method} needs a quantization type", hint="Add --quant int4, for example.")
        if global_scale and quant_type is not QuantType.NVFP4:
            raise UsageError("only nvfp4 has a global scale", hint="Add --quant nvfp4.")
        options = cls(
            quant_type=quant_type,
            group_size=group_size,
            method=check_method(method),
            dtype=None if dtype is None else DType.parse_float(dtype),
            profile=preset,
            experts=_experts(experts) if experts is not None else preset.experts,
            alignment=_alignment(alignment),
            importance=None if importance is None else Importance.parse(importance),
            global_scale=global_scale,
        )
        if quant_type is not None:
            options.quantization(quant_type)
        return options

    def quantization(self, quant_type: QuantType) -> Quantization:
        """Return the type with the group size in use for it. Raises: UsageError when the type has no such groups."""
        if quant_type is self.quant_type and self.group_size is not None:
            return Quantization(quant_type, self.group_size)
        return Quantization(quant_type, self.profile.group_sizes.get(quant_type, quant_type.group_sizes[0]))

    def row_divisor(self, quant_type: QuantType) -> int:
        """Return what divides the length of a row that can be quantized: a group (in the ollama profile at least 64)."""
        return math.lcm(self.quantization(quant_type).group_size, self.profile.aligned_to.get(quant_type, 1))

    def fits(self, quant_type: QuantType, shape: tuple[int, ...]) -> bool:
        """Return True when the rows of ``shape`` can be quantized to the type."""
        return shape[-1] % self.row_divisor(quant_type) == 0

    def header_alignment(self, data_size: int) -> int:
        """Return what a blob's data region is aligned to, in bytes, for ``data_size`` bytes of data."""
        if self.alignment is not None:
            return self.alignment
        return PAGE if self.profile.page_aligned and data_size >= _PAGE_ALIGNED_FROM else _DEFAULT_ALIGNMENT


def _experts(text: str) -> Experts:
    try:
        return Experts(text)
    except ValueError:
        raise UsageError(f"unknown form of experts {text!r}", hint="Use one of: packed, stacked.") from None


def _alignment(value: int | None) -> int | None:
    if value is not None and (not _DEFAULT_ALIGNMENT <= value <= _MAX_ALIGNMENT or value & (value - 1)):
        raise UsageError(f"an alignment of {value} is no power of two from {_DEFAULT_ALIGNMENT} to {_MAX_ALIGNMENT:,}")
    return value
