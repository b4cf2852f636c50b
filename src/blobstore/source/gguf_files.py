"""The files of a GGUF model: one, or parts called ``…-00001-of-0000N.gguf``. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from blobstore.errors import LimitExceededError
from blobstore.source.files import MAX_SHARDS, SHARD_FILE
from blobstore.source.folders import GGUF


def gguf_sets(names: Iterable[str]) -> list[list[str]]:
    """Return the sets of GGUF files among names: each is one file, or all parts of one."""
    sets: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(GGUF):
            parts = parts_of(name)
            sets.setdefault(parts[0], parts)
    return list(sets.values())


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of a GGUF file, of which ``name`` is one, or its only one.

    Raises: LimitExceededError for more than 10,000.
    """
    match = SHARD_FILE.fullmatch(name)
    if match is None or not name.endswith(GGUF):
        return [name]
    if (total := int(match["total"])) > MAX_SHARDS:
        message = f"limit exceeded: {name} has {total:,} parts, at most {MAX_SHARDS:,}"
        raise LimitExceededError(message)
    (before, after), width = match.group("before", "after"), len(match["number"])
    parts = [f"{before}{one:0{width}}-of-{match['total']}{after}" for one in range(1, total + 1)]
    return parts if name in parts else [name]
