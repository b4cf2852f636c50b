"""Provenance: ``blobstore.json``, what a model keeps of its import, written and read.

Rule B1: a JSON object with ``version`` 1 and ``sources``. It has the options, the source's files
with their metadata, and how much of the source is stored; no times of ours and no paths. Of a
source on a server it has the commit, or each file's version. So an import can be repeated, and an
export gives the source's files back. The options stay words here: `record` and `recorded` of
``ImportOptions`` are their two directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from blobstore.errors import LimitExceededError
from blobstore.formats.documents import MAX_DOCUMENT
from blobstore.formats.strictjson import (
    Between,
    Document,
    encode,
    parse_document,
    parse_object,
    without_none,
)
from blobstore.names import Digest

OWN_DOCUMENT = "blobstore.json"
RULE = "B1"

MTP_HEADS = "multi-token prediction heads"
DRAFT_MODEL = "draft model"


@dataclass(frozen=True, slots=True)
class Omission(Document):
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

    source: Annotated[int | None, Between(0), "null when it was not recorded"]
    stored: Annotated[int, Between(0)]
    derived: Annotated[Mapping[str, int], "counts, by how they were made"] = field(
        default_factory=dict
    )
    left_out: tuple[Omission, ...] = ()

    @property
    def covered(self) -> int:
        return self.stored + sum(self.derived.values())

    def __add__(self, other: Tally) -> Tally:
        derived = Counter(self.derived)
        derived.update(other.derived)
        is_known = self.source is not None and other.source is not None
        source = (self.source or 0) + (other.source or 0) if is_known else None
        return Tally(
            source, self.stored + other.stored, dict(derived), self.left_out + other.left_out
        )


@dataclass(frozen=True, slots=True)
class Coverage(Document):
    """The coverage of a source's tensors and of its files."""

    tensors: Tally
    files: Tally
    heads: Annotated[Mapping[str, int], "tensors of other heads and models"] = field(
        default_factory=dict
    )
    kept_whole: Annotated[tuple[str, ...], "files of weights that are kept as files"] = ()

    @property
    def left_out(self) -> tuple[Omission, ...]:
        return self.tensors.left_out + self.files.left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile(Document):
    """A .safetensors file of a source: name, bytes, metadata, names of its tensors in order.

    ``version``: which version of the file a server had: its ETag, its time of change, or on the Hub
    the hash of its content. None for files on a disk.
    """

    name: str
    size: int = 0
    version: str | None = None
    metadata: Mapping[str, str]
    tensors: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDraft(Document):
    """A draft model: its type, if one was asked for, and the files of its source."""

    quant: str | None = None
    sources: list[RecordedFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAdapter(Document):
    """An adapter that was merged: the digest of its document, and its files."""

    revision: str | None = None
    config: Digest
    sources: list[RecordedFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Document):
    """The document.

    ``options`` are as they were written; ``coverage`` is missing in what early versions wrote.
    ``revision``: the commit of the repository that the sources were read from.
    """

    version: Literal[1]
    revision: str | None = None
    options: Mapping[str, Any] | None = None
    sources: list[RecordedFile]
    coverage: Coverage | None = None
    draft: RecordedDraft | None = None
    adapter: RecordedAdapter | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Provenance:
        """Return the document in ``raw``.

        Raises: DocumentError (rule B1) for another version too; LimitExceededError.
        """
        value = parse_object(raw, OWN_DOCUMENT, rule=RULE, limit=MAX_DOCUMENT)
        return parse_document(cls, value, OWN_DOCUMENT, RULE)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(name for file in self.sources for name in file.tensors)

    @property
    def is_cast(self) -> bool:
        """True when the import converted floats: its files have other sizes than the source's."""
        return (self.options or {}).get("dtype") is not None

    def encode(self, source: str) -> bytes:
        """Return the document of an import from ``source``: a line of compact JSON and a newline.

        Raises: LimitExceededError when it would be larger than a stored model's documents may be.
        """
        draft = self.draft and {"quant": self.draft.quant, "sources": _files(self.draft.sources)}
        merged = self.adapter and {
            "revision": self.adapter.revision,
            "config": str(self.adapter.config),
            "sources": _files(self.adapter.sources),
        }
        document = {
            "version": self.version,
            "revision": self.revision,
            "options": self.options,
            "sources": _files(self.sources),
            "coverage": self.coverage and asdict(self.coverage),
            "draft": draft,
            "adapter": merged and without_none(merged),
        }
        raw = encode(without_none(document)) + b"\n"
        if len(raw) > MAX_DOCUMENT:
            raise LimitExceededError(
                f"limit exceeded: {source} would have a {OWN_DOCUMENT} of {len(raw):,} bytes, "
                f"at most {MAX_DOCUMENT:,}",
                path=source,
                hint='It keeps the metadata of all files. profile="ollama" has no such document.',
            )
        return raw


def _files(files: Sequence[RecordedFile]) -> list[dict[str, Any]]:
    return [
        without_none(asdict(file) | {"metadata": dict(sorted(file.metadata.items()))})
        for file in files
    ]
