"""What a store keeps of `quality`: the result of a manifest, as ``--json`` printed it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from blobstore.errors import NotFoundError
from blobstore.inspection.quality import ModelQuality
from blobstore.names import Digest, ModelName
from blobstore.source.folders import Folder
from blobstore.store.ports import Readable
from blobstore.views.documents import to_json
from blobstore.views.verify_records import read_record


@dataclass(frozen=True, slots=True)
class _Record:
    version: Literal[1]
    measured: datetime
    against: str | None
    result: ModelQuality


@dataclass(frozen=True, slots=True)
class KeptQuality:
    """The last result of `quality` for a model; null if it is missing."""

    model: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    measured: Annotated[datetime | None, "RFC 3339"] = None
    against: Annotated[str | None, "the checkpoint that it was compared with"] = None
    result: Annotated[Mapping[str, Any] | None, ModelQuality | None] = None


def keep_quality(home: Readable, quality: ModelQuality, source: str | Folder) -> None:
    """Keep the result of a model's `quality` in its store, if that keeps results.

    It is kept for the manifest that was measured: the name may be another model's by now. A lower
    store is only read. Of ``source`` the address or the folder's name is kept.
    """
    owner = _owner(home, quality.name)
    if owner.results is not None and owner not in home.lower:
        against = Path(source).resolve().name if isinstance(source, str) else source.name
        record = _Record(1, datetime.now(UTC), against, quality)
        owner.results.keep(_key(quality.manifest), to_json(record).encode())


def kept_quality(home: Readable, name: ModelName, digest: Digest) -> KeptQuality:
    """Return what `quality` kept of a model whose manifest has this digest.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    record = read_record(_owner(home, name).results, _key(digest), _Record)
    if record is None:
        return KeptQuality(name, digest)
    return KeptQuality(
        name,
        digest,
        datetime.fromisoformat(record["measured"]),
        record["against"],
        record["result"],
    )


def _owner(home: Readable, name: ModelName) -> Readable:
    """Return the store that a model is in."""
    with suppress(NotFoundError):  # it is packed
        if home.lower:
            return home.home_of(name)
    return home.upper


def _key(manifest: Digest) -> str:
    return f"quality/{manifest.hex}"
