"""Packed files in a folder, as the plain bytes of the blobs in them.

``sha256-<hex>`` is the file of one blob. Earlier versions also wrote ``many-<hex>``, of several
small ones, and packed blobs against those of a base model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError, StorageError
from blobstore.formats.documents import Descriptor
from blobstore.io.durable import listed, make_folder, os_errors, sync_folder
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.names import Digest
from blobstore.store.packed.before import PackedIndex, blob_frames, read_index
from blobstore.store.packed.files import Frames, PackedReader, packed_frames
from blobstore.store.ports import (
    Blobs,
    blob_not_found,
    of_size,
    unique,
    wrong_bytes,
)

_MANY_NAME = re.compile(r"many-[0-9a-f]{64}", re.ASCII)


class PackedBlobs(Blobs):
    """The packed files of a store, as the plain bytes of their blobs. See `Blobs`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._many: dict[str, PackedIndex] = {}
        """The indexes of files of several blobs."""

    def open(self, descriptor: Descriptor) -> OpenReader:
        """See `Blobs`; the reader decodes, and is for one thread.

        Raises: as `Blobs.open`; CorruptDataError, with ``path``, for a damaged packed file.
        """
        return of_size(descriptor, self._reader(descriptor.digest))

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`. Raises: StorageError."""
        there = self.digests()
        return [blob for blob in unique(descriptors) if blob.digest.hex not in there]

    def digests(self) -> set[str]:
        """See `Blobs`. Raises: StorageError."""
        return {digest for digests in self.files().values() for digest in digests}

    def files(self) -> dict[str, Collection[str]]:
        """Return the names of the packed files, with the hex digits of the blobs in each.

        A damaged file of several blobs is listed without blobs. Raises: StorageError.
        """
        files: dict[str, Collection[str]] = {}
        with os_errors("list", self.path):
            names = [entry.name for entry in listed(self.path)]
        for name in names:
            digest = Digest.from_file_name(name)
            if digest is not None:
                files[name] = (digest.hex,)
            elif _MANY_NAME.fullmatch(name):
                files[name] = self._digests_in(name)
        return files

    def _digests_in(self, name: str) -> Collection[str]:
        try:
            index = self._index(name)
        except (CorruptDataError, NotFoundError):  # another process may have removed it
            return ()
        return index.frames.keys() if index is not None else ()

    def _index(self, name: str) -> PackedIndex | None:
        """Return the index of a packed file of earlier versions, None for one of today's.

        Raises: CorruptDataError, with ``path``; NotFoundError; StorageError.
        """
        if name in self._many:
            return self._many[name]
        path = self.path / name
        with FileReader(path, follow=False) as file:
            try:
                index = read_index(file)
            except BlobStoreError as error:
                raise error.at(str(path), path=str(path)) from error
        if index is not None and _MANY_NAME.fullmatch(name):
            self._many[name] = index
        return index

    def open_of(self, digest: Digest, size: int | None) -> OpenReader:
        """Return a reader of a blob, of any size if ``size`` is None. Raises: as `open`."""
        if size is None:
            return self._reader(digest)
        return self.open(Descriptor(media_type="", digest=digest, size=size))

    def check(self, descriptor: Descriptor) -> None:
        """Decode and hash a packed blob.

        Raises: CorruptDataError, with ``blob`` and ``path``, if its packed file is damaged;
        NotFoundError; StorageError, also for anything else in its place.
        """
        try:
            with self.open(descriptor) as reader:
                if reader.digest() != descriptor.digest:
                    raise wrong_bytes(descriptor, reader)
        except CorruptDataError as error:
            hint = "Remove the file, and pack again. `blobstore verify` names the models it is in."
            raise error.about(hint=hint) from error

    def damaged_files(self) -> list[tuple[str, str]]:
        """Return the files of several blobs whose index is damaged, and why."""
        damaged = []
        for name, digests in self.files().items():
            if not digests:
                try:
                    self._index(name)
                except BlobStoreError as error:
                    damaged.append((name, error.message))
        return damaged

    def _reader(self, digest: Digest) -> PackedReader:
        for name in self._names(digest):
            try:
                return self._opened(self.path / name, digest)
            except NotFoundError:
                continue
            except BlobStoreError as error:
                raise error.about(blob=str(digest)) from error
        raise blob_not_found(digest, str(self.path))

    def _names(self, digest: Digest) -> Iterator[str]:
        """Yield the names of the files that may have a blob; the folder is listed last."""
        yield digest.file_name
        if not any(digest.hex in index.frames for index in self._many.values()):
            self.files()
        for name, index in list(self._many.items()):
            if digest.hex in index.frames:
                yield name

    def _opened(self, path: Path, digest: Digest) -> PackedReader:
        file = FileReader(path, follow=False)
        try:
            return PackedReader(self._frames(file, path.name, digest), digest, path)
        except BlobStoreError as error:
            file.close()
            raise error.at(str(path), path=str(path)) from error

    def _frames(self, file: FileReader, name: str, digest: Digest) -> Frames:
        index = self._many.get(name) or read_index(file)
        if index is None:
            return packed_frames(file)
        if digest.hex not in index.frames:
            raise blob_not_found(digest, file.name)
        return blob_frames(file, index, digest.hex, self.open_of)

    def stored(self, digests: Collection[str]) -> int:
        """Return the stored bytes of those of ``digests`` that are packed. Raises: StorageError."""
        nbytes = 0
        for name, inside in self.files().items():
            shared = [digest for digest in inside if digest in digests]
            if name in self._many:
                nbytes += sum(map(self._many[name].stored, shared))
            elif shared:
                nbytes += self.size(name)
        return nbytes

    def size(self, name: str) -> int:
        """Return the bytes of a packed file. Raises: StorageError."""
        return file_size(self.path / name)

    def nbytes(self) -> int:
        """Return the bytes of all packed files. Raises: StorageError."""
        return sum(map(self.size, self.files()))

    def bases_of(self, name: str) -> set[str]:
        """Return the base blobs, in hex digits, that a packed file needs.

        Raises: StorageError if that is unknown: then no packed file is removed.
        """
        try:
            index = self._index(name)
        except CorruptDataError as error:
            raise StorageError(error.message, path=error.path) from error
        return set() if index is None else {digest.hex for digest, _ in index.bases}

    def digest_of(self, name: str) -> Digest:
        """Return the digest that a packed file is named for: of its blob, or of their digests."""
        return Digest(name.rpartition("-")[2])

    def add(self, path: Path, digest: Digest) -> None:
        """Rename a durable packed file into place; `settle` makes its name durable.

        Raises: StorageError.
        """
        with os_errors("write", self.path / digest.file_name):
            make_folder(self.path)
            path.rename(self.path / digest.file_name)

    def settle(self) -> None:
        """Make the names of the packed files durable. Raises: StorageError."""
        with os_errors("write", self.path):
            make_folder(self.path)
            sync_folder(self.path)


def file_size(path: Path) -> int:
    """Return the bytes of a file. Raises: StorageError."""
    with os_errors("access", path):
        return path.lstat().st_size
