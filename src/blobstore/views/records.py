"""What a store keeps of `verify` and `quality`: results, as ``--json`` printed them.

Of `verify` the last one, and what is still true of it later; of `quality` one for each manifest.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from blobstore.errors import DocumentError, NotFoundError
from blobstore.inspection.quality import ModelQuality
from blobstore.names import Digest, ModelName
from blobstore.source.folders import Folder
from blobstore.store.care.verify import VerifyResult
from blobstore.store.hints import ResultFolder
from blobstore.store.ports import Readable
from blobstore.views.documents import to_json

MOST_ROWS = 1000
"""Damaged blobs, broken manifests and odd files that are listed. The record counts all."""


# Records of other versions are left out, as if they were missing.
_VERSION = 2


def keep_record(results: ResultFolder, key: str, record: Mapping[str, Any]) -> None:
    """Keep a record, with the digest of its JSON."""
    body = to_json(record)
    document = f'{{"version":{_VERSION},"digest":"{Digest.of(body.encode())}","record":{body}}}'
    results.keep(key, document.encode())


def read_record(results: ResultFolder | None, key: str) -> dict[str, Any] | None:
    """Return the record that is kept; None without one. Raises: DocumentError; StorageError."""
    file = None if results is None else results.read(key)
    if file is None:
        return None
    path, text = file
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        document = json.loads(text)
        if document["version"] != _VERSION:
            return None
        record: dict[str, Any] = document["record"]
        if document["digest"] == str(Digest.of(to_json(record).encode())):
            return record
    hint = f"Run {key.partition('/')[0]} again: it is replaced."
    raise DocumentError(f"{path} is damaged", path=path, hint=hint)


@dataclass(frozen=True, slots=True)
class KeptVerify:
    """The last result of `verify` for the whole store; null if it is missing.

    Faults that it lists are left out once their blobs or manifests were written anew or removed,
    and odd files once they are gone.
    """

    verified: Annotated[datetime | None, "RFC 3339"] = None
    quick: Annotated[bool, "tensor blobs were not hashed"] = False
    sample: Annotated[str | None, "the part of the blobs that was checked, such as 1/7"] = None
    blobs: Annotated[int, "blobs in the store now"] = 0
    damaged: Annotated[int, "damaged blobs; the result lists at most 1,000"] = 0
    broken: Annotated[int, "broken manifests; the result lists at most 1,000"] = 0
    odd: Annotated[int, "odd files; the result lists at most 1,000"] = 0
    result: Annotated[Mapping[str, Any] | None, VerifyResult | None] = None


def keep_verify(store: Any, result: VerifyResult, *, quick: bool, sample: str | None) -> None:
    """Keep the result of a `verify` of all models; ``sample``: the part that was checked.

    A quick one, or that of a sample, that finds nothing does not replace another.
    """
    results = store.upper.results
    is_whole = not quick and sample is None  # another one does not know what it has not read
    if results is None or not (is_whole or not result.is_sound or results.read("verify") is None):
        return
    faults: dict[str, Any] = {
        "damaged": result.damaged,
        "broken": result.broken,
        "odd": result.odd,
    }
    record = {
        "verified": datetime.now(UTC),
        "quick": quick,
        "sample": sample,
        **{kind: len(rows) for kind, rows in faults.items()},
        "result": replace(result, **{kind: rows[:MOST_ROWS] for kind, rows in faults.items()}),
    }
    keep_record(results, "verify", record)


def kept_verify(home: Readable) -> KeptVerify:
    """Return what is still true of the last `verify` of a store.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    store: Any = home.upper
    record = read_record(store.results, "verify")
    if record is None:
        return KeptVerify()
    said, verified = record["result"], datetime.fromisoformat(record["verified"])
    names = {str(name) for name in store.manifests.names()}

    def stands(name: str, models: Iterable[str]) -> bool:
        changed = _modification_time(store, name)
        if changed is None:
            return not names.isdisjoint(models)
        return changed < verified.timestamp() + 1  # recorded in whole seconds

    left = {
        "damaged": [blob for blob in said["damaged"] if stands(blob["digest"], blob["models"])],
        "broken": [model for model in said["broken"] if stands(model["name"], [model["name"]])],
        "odd": [file for file in said["odd"] if os.path.lexists(file["path"])],
    }
    counts = {key: record[key] - len(said[key]) + len(rows) for key, rows in left.items()}
    return KeptVerify(
        verified=verified,
        quick=record["quick"],
        sample=record["sample"],
        blobs=len(store.blobs.listing().named) + len(store.packed.blobs.digests()),
        result=said | left,
        **counts,
    )


def _modification_time(store: Any, name: str) -> float | None:
    """Return when a blob or manifest was written; None without such a file.

    ``name``: a digest, or a model's name.
    """
    if name.startswith("sha256:"):
        path = store.blobs.path / Digest.parse(name).file_name
    else:
        path = store.manifests.path.joinpath(*ModelName.parse(name).path_parts)
    with suppress(OSError):
        return float(path.lstat().st_mtime)
    return None


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
        record = {"measured": datetime.now(UTC), "against": against, "result": quality}
        keep_record(owner.results, f"quality/{quality.manifest.hex}", record)


def kept_quality(home: Readable, name: ModelName, digest: Digest) -> KeptQuality:
    """Return what `quality` kept of a model whose manifest has this digest.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    record = read_record(_owner(home, name).results, f"quality/{digest.hex}")
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
    with suppress(NotFoundError):  # it is packed
        if home.lower:
            return home.home_of(name)
    return home.upper
