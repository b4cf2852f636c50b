"""Profiles: presets of what an import writes, ours and Ollama's (docs/formats.md). Values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from blobstore.quant import QuantType


class Experts(enum.Enum):
    """The form of mixture-of-experts weights: one blob of all tensors of a group, or one tensor a projection."""

    PACKED = "packed"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Profile:
    """A preset of five independent options (docs/design.md, "Glossary"); ``group_sizes`` are int4's and int8's.

    ``aligned_to``: what must divide a row besides its groups. ``unstated_group_sizes``: producers whose weights' group
    size is not in the metadata. ``knows_layouts``: what tensors are, and how they lie, goes by the model's architecture
    too, and not by Ollama's tests of names alone.
    """

    name: str
    group_sizes: dict[QuantType, int]
    aligned_to: dict[QuantType, int]
    experts: Experts
    page_aligned: bool
    own_document: bool
    unstated_group_sizes: frozenset[str]
    knows_layouts: bool


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
            unstated_group_sizes=frozenset(),
            knows_layouts=True,
        ),
        Profile(
            name="ollama",
            group_sizes={QuantType.INT4: 64, QuantType.INT8: 64},
            # Ollama quantizes int4 and int8 only when 64 divides the rows, whatever the group.
            aligned_to={QuantType.INT4: 64, QuantType.INT8: 64},
            experts=Experts.STACKED,
            page_aligned=False,
            own_document=False,
            # x/create/prequant.go `prequantPatterns`: only compressed-tensors' row has a default.
            unstated_group_sizes=frozenset({"ModelOpt NVFP4"}),
            knows_layouts=False,
        ),
    )
}
