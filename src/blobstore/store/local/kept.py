"""Kept blobs: what sessions made for a later one, complete and durable, in ``.blobstore/kept/``.

Many machines make the blobs of one plan, and one of them publishes the model, perhaps days later.
Until then the blobs lie here, each under its digest, so that a later session finds one by its name,
however many sessions made them. A blob is moved here when it is complete, hashed and durable, as
into ``blobs/``, where a starting Ollama would delete it: no manifest names it yet.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from blobstore.errors import NotFoundError
from blobstore.hashing.stage import HashStage
from blobstore.io.durable import listed, make_folder, os_errors, sync_folder
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp
from blobstore.store.local.journal import JournalEntry
from blobstore.store.ports import Leftover

KEPT_S: Final = 7 * 24 * 3600
"""How long a clean-up spares a kept blob, in seconds."""


class KeptBlobs:
    """The folder of kept blobs. Safe to share between processes and machines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, blobs: Iterable[FinishedBlob]) -> None:
        """Move finished blobs here, whose bytes are durable, and make their names durable.

        Raises: StorageError.
        """
        with os_errors("write to the store", self.path):
            make_folder(self.path)
            for blob in blobs:
                blob.path.rename(self.path / blob.digest.file_name)
            sync_folder(self.path)

    def under(self, key: str, size: int, stage: HashStage, *, verify: bool) -> FinishedBlob | None:
        """Return the blob of ``size`` bytes whose digest has the hex digits ``key``, or None.

        With ``verify`` it is hashed. Raises: StorageError.
        """
        path = self.path / f"sha256-{key}"
        digest = Digest.from_file_name(path.name)
        if digest is None:
            return None
        with suppress(NotFoundError), os_errors("access", path):
            status = path.lstat()
            stamp = Stamp.of(status)
            if not (stat.S_ISREG(status.st_mode) and status.st_size == size):
                return None
            if verify:
                return JournalEntry(key, digest, size, stamp).blob_at(path, stage, verify=True)
            return FinishedBlob(digest, size, self.path, stamp)
        return None

    def digests(self) -> Iterator[Digest]:
        """Yield the digests of all kept blobs. Raises: StorageError."""
        yield from filter(None, (Digest.from_file_name(entry.name) for entry in self._entries()))

    def stale(self, kept_s: float) -> Iterator[Leftover]:
        """Yield the files here that are older than ``kept_s`` seconds. Raises: StorageError."""
        now = time.time()
        for entry in self._entries():
            with suppress(FileNotFoundError):  # it has just been published
                status = entry.stat(follow_symlinks=False)
                if now - status.st_mtime > kept_s:
                    reason = "made for a model that was never published"
                    yield Leftover(Path(entry.path), status.st_size, reason)

    def _entries(self) -> list[os.DirEntry[str]]:
        with os_errors("list", self.path):
            return listed(self.path)
