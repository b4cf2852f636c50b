"""Blobs: files named for the sha256 of their bytes, visible only when complete and durable (see ingest.py)."""

from __future__ import annotations

from pathlib import Path

from blobstore.digest import Digest
from blobstore.documents import MAX_DOCUMENT, Descriptor
from blobstore.errors import BlobStoreError, CorruptDataError, DigestMismatchError, LimitExceededError, NotFoundError
from blobstore.ranges import FileReader
from blobstore.store.files import os_errors, remove_if_there


class BlobFolder:
    """The ``blobs/`` folder of a store. Links in it are not followed, and only regular files are opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, descriptor: Descriptor) -> FileReader:
        """Return a reader over a blob that has the descriptor's size; its bytes are not checked here.

        Raises: NotFoundError when it is missing, CorruptDataError when its size differs, StorageError when it is no
        regular file or can't be opened. Each carries ``blob``.
        """
        digest = descriptor.digest
        try:
            reader = FileReader(self.path / digest.file_name, follow=False)
        except NotFoundError:
            raise NotFoundError(f"blob {digest} is missing", blob=str(digest), path=str(self.path)) from None
        except BlobStoreError as error:
            error.blob = str(digest)
            raise
        if reader.size != descriptor.size:
            reader.close()
            raise CorruptDataError(
                f"blob {digest} has {reader.size:,} bytes, {descriptor.size:,} are right", blob=str(digest), path=reader.name
            )
        return reader

    def read(self, descriptor: Descriptor, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the bytes of a small blob (a config, a JSON document), checked against its digest.

        Raises: as `open`; LimitExceededError for a large one; DigestMismatchError when the bytes are not the digest's.
        """
        if descriptor.size > limit:
            message = (
                f"limit exceeded: blob {descriptor.digest} has {descriptor.size:,} bytes, at most {limit:,} for a document"
            )
            raise LimitExceededError(message, blob=str(descriptor.digest))
        with self.open(descriptor) as reader:
            data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            raise DigestMismatchError(
                f"blob {descriptor.digest} is damaged: its bytes are not its digest's", blob=str(descriptor.digest)
            )
        return data

    def check(self, descriptor: Descriptor) -> None:
        """Raise, as `open`, unless the blob is there, a regular file and of the descriptor's size."""
        self.open(descriptor).close()

    def has(self, digest: Digest, size: int) -> bool:
        """Return True when a regular file of that digest's name and that size is there; its bytes are not read."""
        try:
            self.check(Descriptor(media_type="", digest=digest, size=size))
        except BlobStoreError:
            return False
        return True

    def remove(self, digest: Digest) -> None:
        """Remove a blob if it is there. Only for a holder of the store's exclusive lock."""
        with os_errors("remove", self.path / digest.file_name):
            remove_if_there(self.path / digest.file_name)
