"""Packed files in a folder, as the plain bytes of the blobs in them.

``sha256-<hex>`` is the file of one large blob, ``many-<hex>`` that of several small ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError, StorageError
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget
from blobstore.io.durable import listed, make_folder, os_errors, sync_folder
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest
from blobstore.store.packed.container import PackedBlob, PackedIndex
from blobstore.store.packed.decoding import IndexCache, PackedFile, PackedReader
from blobstore.store.ports import (
    blob_not_found,
    check_document_size,
    checked_bytes,
    of_size,
    unique,
    wrong_bytes,
)

_MANY = "many-"
_MANY_NAME = re.compile(r"many-[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a packed blob lies: its file, the stored bytes, and the base blobs that it needs."""

    path: Path
    nbytes: int
    bases: tuple[Digest, ...]


class PackedBlobs:
    """The packed files of a store, as the plain bytes of their blobs. See `Blobs`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._indexes = IndexCache()
        self._many: dict[str, tuple[str, ...]] = {}
        """The digests of the blobs in each file of several."""
        self._places: dict[str, str] = {}
        """The file of several that has a blob, by the blob's hex digits."""

    def open(self, descriptor: Descriptor) -> OpenReader:
        """See `Blobs`; the reader decodes, and is for one thread.

        Raises: as `Blobs.open`; CorruptDataError, with ``path``, for a damaged packed file.
        """
        return of_size(descriptor, self._reader(descriptor.digest))

    def read(self, descriptor: Descriptor) -> bytes:
        check_document_size(descriptor, MAX_DOCUMENT)
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> Sequence[Header | None]:
        """See `Blobs`: None for each."""
        del budget
        return [None] * len(descriptors)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`. Raises: StorageError."""
        there = self.digests()
        return [blob for blob in unique(descriptors) if blob.digest.hex not in there]

    def digests(self) -> set[str]:
        """See `Blobs`. Raises: StorageError."""
        return {digest for digests in self.files().values() for digest in digests}

    def sequence(self, descriptors: Sequence[Descriptor]) -> None:
        """See `Blobs`: None."""

    def files(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the packed files, with the hex digits of the blobs in each.

        A damaged file of several blobs is listed without blobs. Raises: StorageError.
        """
        found: dict[str, tuple[str, ...]] = {}
        with os_errors("list", self.path):
            names = [entry.name for entry in listed(self.path)]
        for name in names:
            digest = Digest.from_file_name(name)
            if digest is not None:
                found[name] = (digest.hex,)
            elif _MANY_NAME.fullmatch(name):
                found[name] = self._digests_in(name)
        return found

    def _digests_in(self, name: str) -> tuple[str, ...]:
        if name not in self._many:
            try:
                index = self.index(name)
            except (CorruptDataError, NotFoundError):  # another process may have removed it
                return ()
            self._many[name] = tuple(index.by_digest)
            self._places.update(dict.fromkeys(index.by_digest, name))
        return self._many[name]

    def index(self, name: str) -> PackedIndex:
        """Return the index of a packed file. Raises: as `PackedFile`."""
        with PackedFile(self.path / name, self.open_base, self._indexes) as file:
            return file.index

    def open_base(self, digest: Digest, size: int) -> OpenReader:
        """Return a reader of a blob that others were packed against."""
        return self.open(Descriptor(media_type="", digest=digest, size=size))

    def open_of(self, digest: Digest, size: int | None) -> OpenReader:
        """Return a reader of a blob, of any size if ``size`` is None. Raises: as `open`."""
        if size is None:
            return self._reader(digest)
        return self.open_base(digest, size)

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
        found = []
        for name, digests in self.files().items():
            if not digests:
                try:
                    self.index(name)
                except BlobStoreError as error:
                    found.append((name, error.message))
        return found

    def _reader(self, digest: Digest) -> PackedReader:
        for name in self._names(digest):
            try:
                file = PackedFile(self.path / name, self.open_base, self._indexes)
            except NotFoundError:
                continue
            except BlobStoreError as error:
                raise error.about(blob=str(digest)) from error
            blob = file.index.by_digest.get(digest.hex)
            if blob is not None:
                return PackedReader(file, blob, closes=True)
            file.close()
        raise blob_not_found(digest, str(self.path))

    def _names(self, digest: Digest) -> Iterator[str]:
        """Yield the names of the files that may have a blob; the folder is listed last."""
        if digest.hex not in self._places:
            yield digest.file_name
            self.files()
        if digest.hex in self._places:
            yield self._places[digest.hex]

    def stored(self, digests: Iterable[str]) -> Mapping[str, PackedPlace]:
        """Return the places of those of ``digests`` with a sound index. Raises: StorageError."""
        wanted = set(digests)
        found: dict[str, PackedPlace] = {}
        for name, inside in self.files().items():
            if wanted.intersection(inside):
                found.update(self._stored_in(name, wanted))
        return found

    def _stored_in(self, name: str, wanted: set[str]) -> Iterator[tuple[str, PackedPlace]]:
        try:
            index = self.index(name)
        except BlobStoreError:
            return
        bases = tuple(digest for digest, _ in index.bases)
        for blob in index.blobs:
            if blob.digest.hex in wanted:
                yield blob.digest.hex, PackedPlace(self.path / name, blob.stored, bases)

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
            return {digest.hex for digest, _ in self.index(name).bases}
        except CorruptDataError as error:
            raise StorageError(error.message, path=error.path) from error

    def digest_of(self, name: str) -> Digest:
        """Return the digest that a packed file is named for: of its blob, or of their digests."""
        return Digest(name.rpartition("-")[2])

    def add(self, path: Path, blobs: Sequence[PackedBlob]) -> None:
        """Rename a durable packed file into place; `settle` makes its name durable.

        Raises: StorageError.
        """
        first = blobs[0].digest
        name = first.file_name if len(blobs) == 1 else many_name(blobs)
        with os_errors("write", self.path / name):
            make_folder(self.path)
            path.rename(self.path / name)

    def settle(self) -> None:
        """Make the names of the packed files durable. Raises: StorageError."""
        with os_errors("write", self.path):
            make_folder(self.path)
            sync_folder(self.path)


def many_name(blobs: Sequence[PackedBlob]) -> str:
    """Return the name of a file of several blobs: the sha256 of their digests."""
    together = "".join(blob.digest.hex for blob in blobs)
    return f"{_MANY}{Digest.of(together.encode()).hex}"


def file_size(path: Path) -> int:
    """Return the bytes of a file. Raises: StorageError."""
    with os_errors("access", path):
        return path.lstat().st_size
