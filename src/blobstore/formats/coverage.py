"""Coverage: how much of a source is stored or derived, and what was left out, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from blobstore.formats.strictdocument import Between, Document

MTP_HEADS = "multi-token prediction heads"
DRAFT_MODEL = "draft model"


@dataclass(frozen=True, slots=True)
class LeftOut(Document):
    """A file, a folder (its path ends with ``/``) or tensors that are not stored, and the reason.

    A pattern such as ``*.input_scale`` names ``count`` tensors together.
    """

    name: str
    reason: str
    count: Annotated[int, Between(1)] = 1


@dataclass(frozen=True, slots=True)
class Tally(Document):
    """How many tensors, or files, a source has (None if unknown), and what became of them.

    ``stored``: unchanged or quantized. ``derived``, by the way: tensors whose values went into a
    stored tensor of another name, and files that an export makes again. With those left out they
    add up to ``source``; a folder that is left out counts as one file.
    """

    source: Annotated[int | None, Between(0)]
    stored: Annotated[int, Between(0)]
    derived: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()

    @property
    def covered(self) -> int:
        """The number of those that are stored or derived."""
        return self.stored + sum(self.derived.values())

    def __add__(self, other: Tally) -> Tally:
        """Return the tally of two sources that become one model."""
        derived = dict(self.derived)
        for how, count in other.derived.items():
            derived[how] = derived.get(how, 0) + count
        is_known = self.source is not None and other.source is not None
        source = (self.source or 0) + (other.source or 0) if is_known else None
        return Tally(source, self.stored + other.stored, derived, self.left_out + other.left_out)


@dataclass(frozen=True, slots=True)
class Coverage(Document):
    """The coverage of a source's tensors and of its files.

    ``heads``: how many of the tensors belong to heads and models beside the main one.
    ``kept_whole``: the files of weights that are kept as files and not quantized.
    """

    tensors: Tally
    files: Tally
    heads: Mapping[str, int] = field(default_factory=dict)
    kept_whole: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Everything that is not stored, tensors first."""
        return self.tensors.left_out + self.files.left_out
