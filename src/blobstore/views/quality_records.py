"""What a store keeps of `quality`: the result of a manifest, as ``--json`` printed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from blobstore.errors import NotFoundError
from blobstore.inspection.quality import ModelQuality
from blobstore.names import Digest, ModelName
from blobstore.source.folders import Folder
from blobstore.store.hints import ResultFolder
from blobstore.store.ports import Readable
from blobstore.views.documents import read_record, to_json


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


def keep_quality(home: Readable, found: ModelQuality, source: str | Folder) -> None:
    """Keep the result of a model's `quality` in its store, if that keeps results.

    It is kept for the manifest that was measured: the name may be another model's by now. A lower
    store is only read. Of ``source`` the address or the folder's name is kept.
    """
    results, is_lower = _results_of(home, found.name)
    if results is None or is_lower:
        return
    against = Path(source).resolve().name if isinstance(source, str) else source.name
    record = _Record(1, datetime.now(UTC), against, found)
    results.keep(f"quality/{found.manifest.hex}", to_json(record).encode())


def kept_quality(home: Readable, name: ModelName, digest: Digest) -> KeptQuality:
    """Return what `quality` kept of a model whose manifest has this digest.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    results, _ = _results_of(home, name)
    found = None if results is None else results.read(f"quality/{digest.hex}")
    if found is None:
        return KeptQuality(name, digest)
    record = read_record(_Record, found, "Run quality again: it is replaced.")
    measured = datetime.fromisoformat(record["measured"])
    return KeptQuality(name, digest, measured, record["against"], record["result"])


def _results_of(home: Readable, name: ModelName) -> tuple[ResultFolder | None, bool]:
    """Return the results of the store that a model is in, and whether that is a lower one."""
    if not home.lower:
        return home.results, False
    try:
        owner = home.home_of(name)
    except NotFoundError:  # it is packed
        owner = home.upper
    return owner.results, owner in home.lower
