"""Provenance: ``blobstore.json``, what a model keeps of its import, written and read.

Rule B1: a JSON object with ``version`` 1 and ``sources``. It has the options, the source's files
with their metadata, and how much of the source is stored; no times of ours and no paths. Of a
source on a server it has the commit, or each file's version. So an import can be repeated, and an
export gives the source's files back. The options stay words here: `record` and `recorded` of
``ImportOptions`` are their two directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from blobstore.errors import LimitExceededError
from blobstore.formats import strictjson
from blobstore.formats.coverage import Coverage
from blobstore.formats.documents import MAX_DOCUMENT
from blobstore.formats.strictdocument import Document, validated

OWN_DOCUMENT: Final = "blobstore.json"
VERSION: Final = 1
RULE: Final = "B1"


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

    @classmethod
    def parse(cls, raw: bytes) -> Provenance:
        """Return the document in ``raw``.

        Raises: DocumentError (rule B1) for another version too; LimitExceededError.
        """
        value = strictjson.parse_object(raw, OWN_DOCUMENT, rule=RULE, limit=MAX_DOCUMENT)
        return validated(cls, value, OWN_DOCUMENT, RULE)

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of all tensors of the source's files."""
        return frozenset(name for file in self.sources for name in file.tensors)

    @property
    def is_cast(self) -> bool:
        """True when the import converted floats: its files have other sizes than the source's."""
        return (self.options or {}).get("dtype") is not None


def encoded(
    options: Mapping[str, Any],
    sources: Sequence[RecordedFile],
    coverage: Coverage,
    draft: RecordedDraft | None,
    source: str,
    revision: str | None = None,
) -> bytes:
    """Return the document of an import from ``source``: one line of compact JSON and a newline.

    It is put together from pieces, because the metadata of many files may be one large text that is
    repeated. Raises: LimitExceededError when it would be larger than a stored model's documents may
    be.
    """
    at = {"revision": revision} if revision is not None else {}
    head = {"version": VERSION, **at, "options": options}
    pieces = [_open(head), *_sources(sources), b',"coverage":', strictjson.encode(asdict(coverage))]
    if draft is not None:
        pieces += (b',"draft":', _open({"quant": draft.quant}), *_sources(draft.sources), b"}")
    pieces.append(b"}\n")
    if (size := sum(map(len, pieces))) > MAX_DOCUMENT:
        raise LimitExceededError(
            f"limit exceeded: {source} would have a {OWN_DOCUMENT} of {size:,} bytes, "
            f"at most {MAX_DOCUMENT:,}",
            path=source,
            hint='It keeps the metadata of all files. profile="ollama" has no such document.',
        )
    return b"".join(pieces)


def _open(members: Mapping[str, Any]) -> bytes:
    """Return a JSON object without its last brace, for more members."""
    return strictjson.encode(members)[:-1]


def _sources(files: Sequence[RecordedFile]) -> Iterator[bytes]:
    """Yield the member ``sources`` of an object in pieces. Equal metadata are encoded once."""
    metadata: dict[int, bytes] = {}
    start = b',"sources":['
    for file in files:
        key = id(file.metadata)
        if key not in metadata:
            metadata[key] = strictjson.encode(dict(sorted(file.metadata.items())))
        version = {"version": file.version} if file.version is not None else {}
        yield start + _open({"name": file.name, "size": file.size, **version})
        yield b',"metadata":'
        yield metadata[key]
        yield b',"tensors":%b}' % strictjson.encode(file.tensors)
        start = b","
    yield b"]"
