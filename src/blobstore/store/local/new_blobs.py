"""New blobs: what one session writes to its own folder, until it is published."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from blobstore import hashing
from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor
from blobstore.hashing import Bytes
from blobstore.hashing.stage import HashStage
from blobstore.io.copying import clone, link
from blobstore.io.durable import PAGE, os_errors, remove_if_there, sync
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp, old_ns, renewed
from blobstore.store.local.writer import BlobWriter, write_whole
from blobstore.store.ports import Finished, How

_log = logging.getLogger("blobstore.store.local.store")
_CHUNK = 2**20


class NewBlobs:
    """The blobs in a session's folder: ``made`` has the finished ones. Safe to share.

    ``syncs``: each is made durable by itself, because the folder's file system can't be.
    """

    def __init__(self, folder: Path, stage: HashStage, *, syncs: bool) -> None:
        self.made: dict[Digest, FinishedBlob] = {}
        self._folder = folder
        self._stage = stage
        self._syncs = syncs
        self._numbers = itertools.count()

    def add(self, blob: FinishedBlob) -> None:
        """Note a blob that is in the folder."""
        self.made.setdefault(blob.digest, blob)

    def discard(self, blob: FinishedBlob) -> None:
        """Remove a blob, unless another one has its bytes. Raises: StorageError."""
        if self.made.get(blob.digest) is blob:
            del self.made[blob.digest]
            with os_errors("remove", blob.path):
                remove_if_there(blob.path)

    def move(self, blobs: Iterable[Finished | Descriptor], folder: Path) -> dict[Digest, Stamp]:
        """Move those of ``blobs`` that are new to ``folder``; return changed stamps.

        Raises: StorageError if a folder is in the way; OSError.
        """
        stamps: dict[Digest, Stamp] = {}
        ours, theirs = self._folder, os.fspath(folder)
        young_from_ns = old_ns()
        for wanted in blobs:
            blob = self.made.pop(wanted.digest, None)
            if blob is None:
                continue
            name = blob.digest.file_name
            path, place = f"{blob.folder}/{name}", f"{theirs}/{name}"
            try:
                if blob.stamp.mtime_ns <= young_from_ns:
                    stamps[blob.digest] = renewed(path)
                os.rename(path, place)  # noqa: PTH104  # a hundred thousand of them
            except IsADirectoryError:
                message = f"{place} is in the way: it is a folder"
                raise StorageError(message, path=place, blob=str(blob.digest)) from None
            except FileNotFoundError:
                if blob.folder == ours:  # else another session has published a kept one
                    raise
        return stamps

    def writer(
        self, size: int, finished: Callable[[Any], None], stage: HashStage | None = None
    ) -> BlobWriter:
        """Return a writer. See `Session.writer`."""

        def both(blob: FinishedBlob) -> None:
            self.add(blob)
            finished(blob)

        return BlobWriter(self._folder, self._number(), size, both, stage, syncs=self._syncs)

    def put_all(self, blobs: Sequence[Bytes]) -> list[FinishedBlob]:
        """Write small blobs. See `Session.put_all`."""
        return [
            self._put(Digest(digest.hex()), memoryview(data))
            for digest, data in zip(hashing.digests(blobs), blobs, strict=True)
        ]

    def take(self, descriptor: Descriptor, reader: OpenReader) -> tuple[How, FinishedBlob]:
        """Return the blob of a reader's bytes, and how it came; its digest is not compared."""
        place = self._folder / self._number()
        for how, share in ((How.CLONED, clone), (How.LINKED, link)):
            if reader.fileno() is not None and share(reader, place):
                return how, self._shared(place, descriptor)
        return How.COPIED, self.copy(reader)

    def copy(self, reader: OpenReader) -> FinishedBlob:
        """Return the blob of a reader's bytes, copied in pieces of 1 MiB."""
        if reader.size <= _CHUNK:
            return self.put_all([reader.read(0, reader.size)])[0]
        made: list[FinishedBlob] = []
        hashed = threading.Event()
        done = 0
        with closing(self.writer(reader.size, made.append, self._stage)) as writer:
            for piece in reader.pieces(memoryview(mmap.mmap(-1, _CHUNK))):
                hashed.clear()
                writer.put(done, piece, aligned=done % PAGE == 0, hashed=hashed.set)
                self._stage.work_until(hashed)
                done += len(piece)
            writer.check()
        return made[0]

    def _number(self) -> str:
        return str(next(self._numbers))

    def _put(self, digest: Digest, data: memoryview) -> FinishedBlob:
        blob = write_whole(self._folder, digest, data, self._number(), syncs=self._syncs)
        self.add(blob)
        return blob

    def _shared(self, place: Path, descriptor: Descriptor) -> FinishedBlob:
        """Return the blob of a file that shares another's blocks, named for its digest."""
        with FileReader(place, follow=False) as reader:
            reader.read_ahead()
            digest = reader.digest(self._stage)
            with os_errors("write", place):
                if self._syncs:
                    sync(reader.fileno())
                stamp = Stamp.of(reader.status())
                blob = FinishedBlob(digest, descriptor.size, self._folder, stamp)
                place.rename(blob.path)
        self.add(blob)
        return blob
