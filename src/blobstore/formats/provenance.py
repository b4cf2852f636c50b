"""Provenance: ``blobstore.json``, what a model keeps of its import: the options, the source's files, what was covered.

Rule B1: a JSON object with ``version`` 1 and ``sources``. The importer writes it
(importer/planning/provenance.py); this is its only reader. The options are checked where they are
used (importer/planning/provenance.py).
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from blobstore.formats.coverage import Coverage, LeftOut, Tally
from blobstore.formats.documents import MAX_DOCUMENT, Document, validated
from blobstore.formats.strictjson import parse_object

OWN_DOCUMENT: Final = "blobstore.json"
VERSION: Final = 1
RULE: Final = "B1"


class RecordedFile(Document):
    """One .safetensors file of a source: its name, its metadata, the names of its tensors in order."""

    name: str
    metadata: dict[str, str]
    tensors: list[str]


class _Draft(Document):
    quant: str | None = None
    sources: list[RecordedFile]


class _LeftOut(Document):
    name: str
    reason: str
    count: int = Field(default=1, ge=1)


class _Tally(Document):
    source: int = Field(ge=0)
    stored: int = Field(ge=0)
    derived: dict[str, int] = Field(default_factory=dict)
    left_out: list[_LeftOut] = Field(default_factory=list)

    @property
    def value(self) -> Tally:
        left_out = tuple(LeftOut(one.name, one.reason, one.count) for one in self.left_out)
        return Tally(self.source, self.stored, self.derived, left_out)


class _Coverage(Document):
    tensors: _Tally
    files: _Tally
    heads: dict[str, int] = Field(default_factory=dict)
    kept_whole: list[str] = Field(default_factory=list)


class Provenance(Document):
    """The document.

    ``options`` are as they were written; ``coverage`` is missing in what early versions wrote.
    """

    version: Literal[1]
    options: dict[str, Any] | None = None
    sources: list[RecordedFile]
    recorded_coverage: _Coverage | None = Field(default=None, alias="coverage")
    draft: _Draft | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Provenance:
        """Return the document in ``raw``.

        Raises: DocumentError (rule B1) for another version too; LimitExceededError.
        """
        return validated(
            cls, parse_object(raw, OWN_DOCUMENT, rule=RULE, limit=MAX_DOCUMENT), OWN_DOCUMENT, RULE
        )

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of all tensors of the source's files."""
        return frozenset(name for file in self.sources for name in file.tensors)

    @property
    def is_cast(self) -> bool:
        """True when floats were converted by the import: its files have other sizes than the source's."""
        return (self.options or {}).get("dtype") is not None

    @property
    def coverage(self) -> Coverage | None:
        """How much of the source was stored; None when the document does not say."""
        if (recorded := self.recorded_coverage) is None:
            return None
        return Coverage(
            recorded.tensors.value, recorded.files.value, recorded.heads, tuple(recorded.kept_whole)
        )
