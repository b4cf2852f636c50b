"""Digests of several files at once: they are read side by side, and hashed together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from blobstore import hashing
from blobstore.errors import BlobStoreError
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import Progress, silent
from blobstore.names import Digest

BUFFER = 2**21
"""Bytes of all files that are read at a time: as much as a core's own cache holds."""
PIECE = 2**17
"""Bytes of one file that are read at a time at least."""


def digests_of(
    readers: Sequence[OpenReader],
    names: Sequence[str] | None = None,
    *,
    progress: Progress = silent,
    stop: threading.Event | None = None,
) -> list[Digest | BlobStoreError]:
    """Return the digest of each reader's bytes, or the error of reading them, in their order.

    Any number of files is read at once, each in pieces of one size. ``names``: what ``progress`` is
    told. If ``stop`` is set, reading ends early, and the digests are meaningless.
    """
    streams = [hashing.stream() for _ in readers]
    piece_nbytes = max(PIECE, BUFFER // max(len(readers), 1))
    buffer = memoryview(bytearray(sum(min(piece_nbytes, reader.size) for reader in readers)))
    views: list[memoryview] = []
    for reader in readers:
        length = min(piece_nbytes, reader.size)
        views.append(buffer[:length])
        buffer = buffer[length:]
    errors: dict[int, BlobStoreError] = {}
    offset = 0
    active = [number for number, reader in enumerate(readers) if reader.size > 0]
    while active and not (stop is not None and stop.is_set()):
        pieces: dict[int, memoryview] = {}
        for number in active:
            piece = views[number][: readers[number].size - offset]
            try:
                readers[number].readinto(offset, piece)
            except BlobStoreError as error:
                errors[number] = error
            else:
                pieces[number] = piece
        hashing.update_all([streams[number] for number in pieces], list(pieces.values()))
        for number, piece in pieces.items():
            progress(len(piece), names[number] if names else "")
        offset += piece_nbytes
        active = [number for number in pieces if readers[number].size > offset]
    return [
        errors.get(number) or Digest(stream.digest().hex()) for number, stream in enumerate(streams)
    ]
