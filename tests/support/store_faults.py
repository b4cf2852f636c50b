"""The cases of the corpus about stores that need a tool or a mount: they are in tests/faults, all others in tests/unit."""

from __future__ import annotations

FAULTS = frozenset(
    {
        "store-eio-at-every-read",
        "store-eio-at-fsync",
        "store-eintr-everywhere",
        "store-emfile",
        "store-erofs",
        "store-edquot",
        "store-sigint-mid-gc",
    }
)
