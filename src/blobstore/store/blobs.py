"""Blobs: files named for the sha256 of their bytes, visible only when complete and durable."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.digest import Digest
from blobstore.documents import Descriptor
from blobstore.errors import BlobStoreError, CorruptDataError, DigestMismatchError, NotFoundError
from blobstore.ranges import FileReader
from blobstore.store.files import (
    create_temporary,
    make_folder,
    os_errors,
    remove_if_there,
    sync_all,
    sync_folder,
    write_all,
)


@dataclass(frozen=True, slots=True)
class FinishedBlob:
    """A blob that is written but not yet visible: its digest and size in bytes."""

    digest: Digest
    size: int
    writer: BlobWriter


class BlobWriter:
    """Writes and hashes one blob in one pass, into a temporary file of the store.

    ``size`` is the number of bytes that will be written, checked by `finish`. Leave it with `discard` (or use it as a
    context manager), and the file is gone; only `BlobFolder.commit` makes it visible.
    """

    def __init__(self, temporary_folder: Path, size: int) -> None:
        self.expected_size = size
        self.written = 0
        self._hash = hashlib.sha256()
        with os_errors("create a file in", temporary_folder):
            self.fd, self.path = create_temporary(temporary_folder)

    def write(self, data: Any) -> None:
        """Append the bytes of any contiguous buffer. Raises: StorageError (no space, I/O); discard the writer then."""
        view = memoryview(data).cast("B")
        with os_errors("write", self.path):
            write_all(self.fd, view)
        self._hash.update(view)
        self.written += len(view)

    def finish(self) -> FinishedBlob:
        """Return the finished blob. Raises: CorruptDataError when it has not the size that was promised."""
        if self.written != self.expected_size:
            raise CorruptDataError(f"{self.written:,} bytes were written where {self.expected_size:,} were planned")
        return FinishedBlob(Digest(self._hash.hexdigest()), self.written, self)

    def discard(self) -> None:
        """Close and remove the temporary file; does nothing after a commit or a second time."""
        if self.fd >= 0:
            remove_if_there(self.path)
            self.close()

    def close(self) -> None:
        """Close the temporary file and leave its name alone: for the commit that has just renamed it."""
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()


class BlobFolder:
    """The ``blobs/`` folder of a store."""

    def __init__(self, path: Path, temporary_folder: Path) -> None:
        self.path = path
        self._temporary_folder = temporary_folder

    def writer(self, size: int) -> BlobWriter:
        """Return a writer for one blob of ``size`` bytes."""
        return BlobWriter(self._temporary_folder, size)

    def commit(self, blobs: Sequence[FinishedBlob]) -> None:
        """Make finished blobs visible, all together: bytes durable, then names, then the names durable.

        A blob that lies there already is replaced, so that writing heals a damaged one. Raises: StorageError; every
        temporary file is removed then, and nothing is visible that is not complete and durable.
        """
        if not blobs:
            return
        try:
            with os_errors("write blobs to", self.path):
                make_folder(self.path)
                sync_all([blob.writer.fd for blob in blobs])
                for blob in blobs:
                    blob.writer.path.rename(self.path / blob.digest.file_name)
                sync_folder(self.path)
        except BlobStoreError:
            for blob in blobs:
                blob.writer.discard()
            raise
        for blob in blobs:
            blob.writer.close()

    def put(self, data: bytes, expected: Digest | None = None) -> FinishedBlob:
        """Write bytes in memory as a blob, not yet visible. Raises: DigestMismatchError when they are not ``expected``."""
        with self.writer(len(data)) as writer:
            writer.write(data)
            blob = writer.finish()
            if expected is not None and blob.digest != expected:
                raise DigestMismatchError(f"the bytes have digest {blob.digest}, not {expected}", blob=str(expected))
            return blob

    def has(self, digest: Digest, size: int) -> bool:
        """Return True when a regular file of that digest's name and that size is there; its bytes are not read."""
        try:
            self.check(Descriptor(media_type="", digest=digest, size=size))
        except BlobStoreError:
            return False
        return True

    def check(self, descriptor: Descriptor) -> None:
        """Raise unless the blob is there, a regular file and of the descriptor's size; its bytes are not read."""
        with self.open(descriptor.digest) as reader:
            if reader.size != descriptor.size:
                raise CorruptDataError(
                    f"blob {descriptor.digest} has {reader.size:,} bytes, not {descriptor.size:,}", blob=str(descriptor.digest)
                )

    def open(self, digest: Digest) -> FileReader:
        """Return a reader over a blob. Links are not followed and only regular files are opened.

        Raises: NotFoundError when it is missing, StorageError otherwise; both carry ``blob``.
        """
        try:
            return FileReader(self.path / digest.file_name, follow=False)
        except NotFoundError:
            raise NotFoundError(f"blob {digest} is missing", blob=str(digest), path=str(self.path)) from None
        except BlobStoreError as error:
            error.blob = str(digest)
            raise

    def refresh(self, digests: Iterable[Digest]) -> None:
        """Set the blobs' modification time to now.

        A starting Ollama deletes blobs that no manifest names and that are over an hour old (server/images.go,
        PruneLayers, in ollama/ollama@fb307609): an import keeps its own young until its manifest is there.
        """
        for digest in digests:
            path = self.path / digest.file_name
            with os_errors("refresh", path):
                os.utime(path, follow_symlinks=False)

    def remove(self, digest: Digest) -> bool:
        """Remove a blob; return False when there was none. Only for a holder of the exclusive lock."""
        with os_errors("remove", self.path / digest.file_name):
            return remove_if_there(self.path / digest.file_name)
