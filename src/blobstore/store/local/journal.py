"""The journal of a store: which blob was made for a key, so that none is made twice.

A line is a hint (hints.py), and never trusted over the bytes: a blob is used without hashing it
only if it was durable when it was noted, and while its file has the inode and time that were noted.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.hashing.stage import HashStage
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp
from blobstore.store.local.hints import HintFile

_log = logging.getLogger("blobstore.store.local.store")

_ENTRY = re.compile(
    r"([0-9a-f]{64}) ([0-9]{1,15}) ([0-9]{1,20}) ([0-9]{1,20}) (durable|waiting)", re.ASCII
)


class MadeBlob(NamedTuple):
    """A blob that was made; a tuple, because an import may have 100,000 of them.

    ``is_durable``: neither a write error nor a power cut can change the blob any more. ``stamp`` is
    None if its name alone says so (kept.py).
    """

    digest: Digest
    size: int
    stamp: Stamp | None
    is_durable: bool = True

    def encode(self) -> str:
        """Return the text of a hint."""
        inode, mtime_ns = (self.stamp.inode, self.stamp.mtime_ns) if self.stamp else (0, 0)
        state = "durable" if self.is_durable else "waiting"
        return f"{self.digest.hex} {self.size} {inode} {mtime_ns} {state}"

    @classmethod
    def parse(cls, text: str) -> MadeBlob | None:
        """Return the blob of a hint's text, None if it is invalid."""
        if (match := _ENTRY.fullmatch(text)) is None:
            return None
        digest, size, inode, mtime_ns, state = match.groups()
        stamp = Stamp(int(inode), int(mtime_ns))
        return cls(Digest(digest), int(size), stamp, state == "durable")

    def at(
        self,
        path: Path,
        stage: HashStage,
        *,
        verify: bool,
        settle: Callable[[int], None] = lambda _fd: None,
    ) -> FinishedBlob | None:
        """Return the blob at ``path`` if it has the bytes of this one, else None.

        It is hashed unless it was durable and its stamp is the same, and always with ``verify``.
        ``stage``: where. ``settle`` is called with its open descriptor before it is hashed.
        """
        if not os.path.lexists(path):  # as most of a hundred thousand
            return None
        try:
            with FileReader(path, follow=False) as reader:
                stamp = Stamp.of(reader.status())
                is_same = self.stamp is None or (stamp == self.stamp and stamp.is_sure)
                if reader.size != self.size:
                    return None
                if verify or not (self.is_durable and is_same):
                    with os_errors("write back", path):
                        settle(reader.fileno())
                    reader.read_ahead()
                    if reader.digest(stage) != self.digest:
                        return None
                return FinishedBlob(self.digest, self.size, path.parent, stamp)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            _log.info("a finished blob is not used: %s", error)
            return None


class Journal:
    """The journal of a store, read at the first call; later lines are for later sessions."""

    def __init__(self, file: HintFile) -> None:
        self._file = file
        self._texts: dict[str, str] | None = None
        self._mutex = threading.Lock()

    def find(self, key: str) -> MadeBlob | None:
        """Return the blob that was made for a key, or None. Any thread may call this."""
        with self._mutex:
            if self._texts is None:
                self._texts = self._file.read()
        return MadeBlob.parse(self._texts.get(key, ""))

    def append(self, blobs: Iterable[tuple[str, MadeBlob]]) -> None:
        """Add blobs by their keys. Raises: StorageError."""
        self._file.add((key, blob.encode()) for key, blob in blobs)
