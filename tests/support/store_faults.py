"""The corpus's store cases that need a tool or a mount: tests/faults runs these."""

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
