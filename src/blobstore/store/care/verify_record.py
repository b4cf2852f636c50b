"""The record of a `verify`: what is kept of its result.

A plain document, which `views.records` reads: `verify` itself does without pydantic.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from blobstore.names import Digest, ModelName
from blobstore.store.care.verify import DamagedBlob, VerifyResult
from blobstore.store.local.store import Store

VERSION = 1
MOST_ROWS = 1000
"""Damaged blobs, broken manifests and odd files that are listed. The record counts all."""
_MOST_NAMES = 100


def file_number(store: Store, name: str) -> int | None:
    """Return the inode number of a blob or manifest, None if there is no such file.

    ``name``: a digest, or a model's name. A file that is written anew gets another number.
    """
    with suppress(OSError):
        return _path(store, name).lstat().st_ino
    return None


def _path(store: Store, name: str) -> Path:
    if name.startswith("sha256:"):
        return store.blobs.path / Digest.parse(name).file_name
    return store.manifests.path.joinpath(*ModelName.parse(name).path_parts)


def verify_record(store: Store, result: VerifyResult, *, quick: bool, sample: str | None) -> bytes:
    """Return the record of a store's result, as JSON; its time is now.

    ``sample``: the part of the blobs that was checked, None for all.
    """
    faulty = [str(blob.digest) for blob in islice(result.damaged, MOST_ROWS)]
    faulty += [str(model.name) for model in islice(result.broken, MOST_ROWS)]
    document = {
        "version": VERSION,
        "verified": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "sample": sample,
        "damaged": len(result.damaged),
        "broken": len(result.broken),
        "odd": len(result.odd),
        "files": {name: file_number(store, name) for name in faulty},
        "result": {
            "checked": result.checked,
            "bytes": result.nbytes,
            "damaged": [_damaged(one) for one in islice(result.damaged, MOST_ROWS)],
            "broken": [
                {"name": str(one.name), "reason": one.reason}
                for one in islice(result.broken, MOST_ROWS)
            ],
            "odd": [
                {"path": str(one.path), "reason": one.reason}
                for one in islice(result.odd, MOST_ROWS)
            ],
        },
    }
    return json.dumps(document).encode("ascii")


def _damaged(blob: DamagedBlob) -> dict[str, object]:
    return {
        "digest": str(blob.digest),
        "reason": blob.reason,
        "models": [str(name) for name in blob.models[:_MOST_NAMES]],
        "model_count": len(blob.models),
        "tensors": list(blob.tensors[:_MOST_NAMES]),
        "tensor_count": len(blob.tensors),
    }
