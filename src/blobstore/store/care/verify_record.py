"""The record of a `verify`: what is kept of its result.

A plain document, which `views.records` reads: `verify` itself does without pydantic.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import islice

from blobstore.store.care.verify import DamagedBlob, VerifyResult

VERSION = 1
MOST_ROWS = 1000
"""Damaged blobs, broken manifests and odd files that are listed. The record counts all."""
_MOST_NAMES = 100


def verify_record(result: VerifyResult, *, quick: bool, sample: str | None) -> bytes:
    """Return the record of a result, as JSON; its time is now.

    ``sample``: the part of the blobs that was checked, None for all.
    """
    document = {
        "version": VERSION,
        "verified": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "sample": sample,
        "damaged": len(result.damaged),
        "broken": len(result.broken),
        "odd": len(result.odd),
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
