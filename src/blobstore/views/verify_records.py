"""What a store keeps of the last `verify`, and what is still true of it later."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from blobstore.errors import DocumentError
from blobstore.names import Digest, ModelName
from blobstore.store.care.verify import VerifyResult
from blobstore.store.hints import ResultFolder
from blobstore.store.ports import Readable
from blobstore.views.documents import check, schema_of, to_json

MOST_ROWS = 1000
"""Damaged blobs, broken manifests and odd files that are listed. The record counts all."""


def read_record(results: ResultFolder | None, key: str, kind: type) -> dict[str, Any] | None:
    """Return the record of a class that is kept; None without one. Raises: DocumentError."""
    file = None if results is None else results.read(key)
    if file is None:
        return None
    path, text = file
    definitions: dict[str, Any] = {}
    schema = schema_of(kind, definitions)
    try:
        record: dict[str, Any] = json.loads(text)
        check(record, schema, definitions)
    except (ValueError, RecursionError) as error:
        raise DocumentError(
            f"{path} is damaged: {error}",
            path=path,
            hint=f"Run {key.partition('/')[0]} again: it is replaced.",
        ) from error
    return record


@dataclass(frozen=True, slots=True)
class _Record:
    version: Literal[1]
    verified: datetime
    quick: bool
    sample: str | None
    damaged: int
    broken: int
    odd: int
    result: VerifyResult


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
    record = _Record(
        version=1,
        verified=datetime.now(UTC),
        quick=quick,
        sample=sample,
        **{kind: len(rows) for kind, rows in faults.items()},
        result=replace(result, **{kind: rows[:MOST_ROWS] for kind, rows in faults.items()}),
    )
    results.keep("verify", to_json(record).encode())


def kept_verify(home: Readable) -> KeptVerify:
    """Return what is still true of the last `verify` of a store.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    store: Any = home.upper
    record = read_record(store.results, "verify", _Record)
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
