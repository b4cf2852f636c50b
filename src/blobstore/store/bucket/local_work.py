"""Unfinished work of an import into a bucket: on this machine, for the import that goes on here.

A bucket can't hold a part of a blob that is written in any order. So blobs that are being made are
files in a folder beside the cache; they go to the bucket when they are whole, also before they are
trusted: without a note none finds them there but by their digests.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor
from blobstore.hashing.stage import HashStage
from blobstore.io.copying import remove_tree
from blobstore.io.durable import os_errors, remove_if_there
from blobstore.io.ranges import FileReader, OpenReader, close_quietly
from blobstore.names import Digest
from blobstore.store.local.leftovers import Leftovers, make_owned_folder
from blobstore.store.local.new_blobs import NewBlobs
from blobstore.store.local.unfinished import UnfinishedWork
from blobstore.store.local.writer import BlobWriter

_log = logging.getLogger("blobstore.store.bucket")


class _Bucket(Protocol):
    """Where whole blobs go."""

    def write(self, blob: Descriptor, reader: OpenReader) -> Descriptor: ...

    def written(self, digest: Digest, size: int) -> Descriptor | None: ...


class LocalWork:
    """The unfinished work of one session in ``parent``. See `Unfinished`.

    ``address``: of the bucket; the work for another one is another.
    """

    accepts_early = True

    def __init__(self, parent: Path, address: str, bucket: _Bucket) -> None:
        self.take = bucket.written
        self._parent = parent
        self._leftovers = Leftovers(parent)
        self._address = address
        self._bucket = bucket
        self._mutex = threading.Lock()
        self._folder: Path | None = None
        self._fd = -1
        self._files: UnfinishedWork | None = None

    def is_possible(self) -> bool:
        """Return True if there can be a folder for it; else the log says why not."""
        try:
            self._opened()
        except BlobStoreError as error:
            _log.warning("an import that is killed will begin again: %s", error)
            return False
        return True

    def _opened(self) -> UnfinishedWork:
        with self._mutex, os_errors("write", self._parent):
            if self._files is None:
                self._leftovers.clean()
                self._folder, self._fd = make_owned_folder(self._parent)
                new = NewBlobs(self._folder, HashStage(), syncs=False)
                self._files = UnfinishedWork(self._folder, self._leftovers, new, _none, syncs=False)
            return self._files

    def begin(self, key: str) -> Path:
        key = hashlib.sha256(f"{self._address}\n{key}".encode()).hexdigest()
        return self._opened().begin(key)

    def writer(
        self, path: Path, size: int, finished: Callable[[Digest], None], stage: HashStage
    ) -> BlobWriter:
        return self._opened().writer(path, size, finished, stage)

    def accept(self, path: Path, digest: Digest, size: int) -> Descriptor:
        """See `Unfinished`: it goes to the bucket. Raises: as `write_blob`; StorageError."""
        with FileReader(path, follow=False) as reader:
            blob = self._bucket.write(Descriptor(media_type="", digest=digest, size=size), reader)
        with os_errors("remove", path):
            remove_if_there(path)
        return blob

    def close(self, *, keeps: bool) -> None:
        """Remove it, unless it is kept for a day. A second call does nothing."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        close_quietly(self._fd)
        if not keeps:
            with suppress(OSError):  # the next import removes it
                remove_tree(folder)
        self._leftovers.clean()


def _none(_digest: Digest, _size: int) -> None:
    return None
