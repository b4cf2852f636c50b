"""Unfinished work: a folder of files that a killed session leaves for the session that goes on.

The folder lies in that of its session, and is moved from one session's to the next one's. An
import that streams its source keeps there the blobs that it has begun (importer/streaming/).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from blobstore.hashing.stage import HashStage
from blobstore.io.durable import FOLDER_MODE, os_errors
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp
from blobstore.store.local.leftovers import Leftovers, work_name
from blobstore.store.local.new_blobs import NewBlobs
from blobstore.store.local.writer import BlobWriter


class UnfinishedWork:
    """The work of one session, in its ``folder``. See `Unfinished`.

    ``take_over`` returns a finished blob of a killed session.
    """

    accepts_early = False

    def __init__(
        self,
        folder: Path,
        leftovers: Leftovers,
        new: NewBlobs,
        take_over: Callable[[Digest, int], FinishedBlob | None],
        *,
        syncs: bool,
    ) -> None:
        self.take = take_over
        self._folder = folder
        self._leftovers = leftovers
        self._new = new
        self._syncs = syncs
        self._mutex = threading.Lock()

    def begin(self, key: str) -> Path:
        name = work_name(key)
        place = self._folder / name
        with self._mutex, os_errors("write", place):
            if not place.is_dir() and not self._leftovers.take_folder(name, self._folder):
                place.mkdir(mode=FOLDER_MODE)
        return place

    def writer(
        self, path: Path, size: int, finished: Callable[[Digest], None], stage: HashStage
    ) -> BlobWriter:

        def whole(blob: FinishedBlob) -> None:
            finished(blob.digest)

        return BlobWriter(path.parent, path.name, size, whole, stage, syncs=self._syncs, stays=True)

    def accept(self, path: Path, digest: Digest, size: int) -> FinishedBlob:
        with os_errors("write", path):
            stamp = Stamp.of(os.lstat(path))
            blob = FinishedBlob(digest, size, self._folder, stamp)
            path.rename(blob.path)
        self._new.add(blob)
        return blob
