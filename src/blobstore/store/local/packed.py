"""The packed models of a store: manifests and packed files under ``.blobstore/packed/``.

Ollama sees only ``blobs/`` and ``manifests/``, and deletes from ``blobs/`` what none of its
manifests names. So a packed model needs nothing there: every blob of it has a packed file, and so
has every blob of a base model that decoding needs. A packed file is visible only when it is
complete, durable, and was decoded once. It is removed when no packed model needs it.

A name is whole or packed. If a crash leaves both, the whole model counts, and the next command that
packs, unpacks or removes the name completes the work.
"""

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError, StorageError
from blobstore.formats.documents import Descriptor
from blobstore.io.durable import list_folder, make_folder, os_errors, sync_folder
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.hints import SummaryHints
from blobstore.store.local.locks import remove_leftover
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.packed.files import (
    FramesReader,
    PackedIndex,
    blob_frames,
    packed_frames,
    packed_reader,
    read_index,
)
from blobstore.store.ports import (
    Blobs,
    Care,
    Leftover,
    Readable,
    Removal,
    blob_not_found,
    of_size,
    unique,
    wrong_bytes,
)
from blobstore.store.references import Needs, References, needs_of

_MANY_NAME = re.compile(r"many-[0-9a-f]{64}", re.ASCII)


@dataclass(eq=False)
class PackedBlobs(Blobs):
    """The packed files of a store, as the plain bytes of their blobs. See `Blobs`.

    ``_many``: the indexes of files of several blobs.
    """

    path: Path
    _many: dict[str, PackedIndex] = field(default_factory=dict)

    def open(self, descriptor: Descriptor) -> OpenReader:
        return of_size(descriptor, self.open_of(descriptor.digest))

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        there = self.digests()
        return [blob for blob in unique(descriptors) if blob.digest.hex not in there]

    def digests(self) -> set[str]:
        return set().union(*self.files().values())

    def files(self) -> dict[str, Collection[str]]:
        """Return the names of the packed files, with the hex digits of the blobs in each.

        A damaged file of several blobs is listed without blobs. Raises: StorageError.
        """
        files: dict[str, Collection[str]] = {}
        with os_errors("list", self.path):
            names = [entry.name for entry in list_folder(self.path)]
        for name in names:
            if (digest := Digest.from_file_name(name)) is not None:
                files[name] = (digest.hex,)
            elif _MANY_NAME.fullmatch(name):
                files[name] = ()
                with suppress(CorruptDataError, NotFoundError):  # another process has removed it
                    files[name] = self._index(name).frames.keys()
        return files

    def _index(self, name: str) -> PackedIndex:
        """Return the index of a packed file of earlier versions, an empty one for one of today's.

        Raises: CorruptDataError, with ``path``; NotFoundError; StorageError.
        """
        if name in self._many:
            return self._many[name]
        path = self.path / name
        with FileReader(path, follow=False) as file:
            try:
                index = read_index(file) or PackedIndex({}, ())
            except BlobStoreError as error:
                raise error.at(str(path), path=str(path)) from error
        if _MANY_NAME.fullmatch(name):
            self._many[name] = index
        return index

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

    def open_of(self, digest: Digest) -> FramesReader:
        """Return a reader of a blob, of any size; it decodes, and is for one thread.

        Raises: as `Blobs.open`; CorruptDataError, with ``path``, for a damaged packed file.
        """
        for name in self._names(digest):
            try:
                return self._open_frames(self.path / name, digest)
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
        yield from [name for name, index in self._many.items() if digest.hex in index.frames]

    def _open_frames(self, path: Path, digest: Digest) -> FramesReader:
        file = FileReader(path, follow=False)
        try:
            index = self._many.get(path.name) or read_index(file)
            if index is None:
                frames = packed_frames(file)
            elif digest.hex in index.frames:
                frames = blob_frames(file, index, digest.hex, self.open_of)
            else:
                raise blob_not_found(digest, file.name)
            return packed_reader(frames, digest, path)
        except BlobStoreError as error:
            file.close()
            raise error.at(str(path), path=str(path)) from error

    def stored(self, digests: AbstractSet[str]) -> int:
        files = self.files().items()
        paths = (self.path / name for name, inside in files if not digests.isdisjoint(inside))
        return sum(map(file_size, paths))

    def nbytes(self) -> int:
        return sum(file_size(self.path / name) for name in self.files())

    def bases_of(self, name: str) -> set[str]:
        """Return the base blobs, in hex digits, that a packed file needs.

        Raises: StorageError if that is unknown: then no packed file is removed.
        """
        try:
            return {digest.hex for digest in self._index(name).bases}
        except CorruptDataError as error:
            raise StorageError(error.message, path=error.path) from error

    def add(self, path: Path, digest: Digest) -> None:
        """Rename a durable packed file into place; `settle` makes its name durable.

        Raises: StorageError.
        """
        with os_errors("write", self.path / digest.file_name):
            make_folder(self.path)
            path.rename(self.path / digest.file_name)

    def settle(self) -> None:
        with os_errors("write", self.path):
            make_folder(self.path)
            sync_folder(self.path)


def file_size(path: Path) -> int:
    """Return the bytes of a file. Raises: StorageError."""
    with os_errors("access", path):
        return path.lstat().st_size


_T = TypeVar("_T")
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR})


class _Manifests(ManifestFolder):
    """The manifests of packed models."""

    def names(self) -> list[ModelName]:
        # None while we may not read our folder; whole models need it not.
        return _unless_closed(super().names, otherwise=[])


class PackedModels(Readable):
    """The packed models of a store. See `Readable`."""

    def __init__(
        self,
        path: Path,
        lease: Callable[[], AbstractContextManager[bool]],
        summaries: SummaryHints,
    ) -> None:
        self.address = str(path)
        self.summaries = summaries
        self.blobs: PackedBlobs = PackedBlobs(path / "blobs")
        self.manifests: ManifestFolder = _Manifests(path / "manifests")
        self._lease = lease

    def find(self, name: str | ModelName) -> ModelName:
        stored = self.manifests.stored_name(ModelName.of(name))
        self.manifests.require(stored)
        return stored

    def lease(self) -> AbstractContextManager[bool]:
        return self._lease()

    def care(self) -> Care:
        return PackedCare(self)

    def has(self, name: str | ModelName) -> bool:
        """Return True if a packed model has the name, in any case.

        False while we may not read our folder. Raises: as `find`, except for a missing model.
        """
        parsed = ModelName.of(name)
        return _unless_closed(
            lambda: self.manifests.has(self.manifests.stored_name(parsed)), otherwise=False
        )

    def nbytes(self) -> int:
        """Return the bytes of all packed files; 0 while we may not read our folder.

        Raises: StorageError.
        """
        return _unless_closed(self.blobs.nbytes, otherwise=0)

    def remove_name(self, name: ModelName) -> bool:
        if not self.manifests.has(name):
            return False
        self.manifests.remove(name)
        return True

    def remove_replaced(self, name: ModelName) -> None:
        """Remove the manifest of a name that a whole model has now; failures are ignored.

        It is not durable: the whole model hides a manifest that comes back after a power cut, and
        the next clean-up removes it.
        """
        with suppress(OSError):
            self.manifests.path.joinpath(*name.path_parts).unlink()

    def ids(self) -> set[str]:
        """Return the sha256 of each packed model's manifest. Raises: as `ManifestFolder.text`."""
        return {Digest.of(self.manifests.text(name)).hex for name in self.manifests.names()}

    def files_of(self, name: ModelName) -> set[str]:
        """Return the names of the packed files that a model needs, also for its base.

        Raises: as `ManifestFolder.read`; StorageError if a packed file's index can't be read.
        """
        wanted = {blob.digest.hex for blob in self.manifests.read(name).descriptors}
        return self._files_of(wanted, self.blobs.files())

    def _files_of(self, wanted: AbstractSet[str], files: Mapping[str, Collection[str]]) -> set[str]:
        """Return those of ``files`` that have blobs, or the base blobs that decoding needs."""
        needed: set[str] = set()
        while new := {file for file in files if not wanted.isdisjoint(files[file])} - needed:
            needed |= new
            wanted = set().union(*map(self.blobs.bases_of, new))
        return needed

    def find_unneeded(self) -> list[Leftover]:
        """Return the packed files that no packed model needs.

        Raises: the error of a manifest that can't be read, or of a file that may be one: then no
        packed file is removed; StorageError.
        """
        for path in self.manifests.strays():
            message = f"{path} may be the manifest of a packed model"
            raise StorageError(message, path=str(path))
        needed: set[str] = set()
        for name in ManifestFolder.names(self.manifests):  # an error, where `names` gives none
            raw = self.manifests.text(name)
            needed.update(needs_of(raw, f"the manifest of the packed model {name}"))
        files = self.blobs.files()
        kept = self._files_of(needed, files)
        # A damaged file may have any blob.
        paths = [
            self.blobs.path / file
            for file, digests in sorted(files.items())
            if file not in kept and (digests or not needed)
        ]
        return [Leftover(path, file_size(path), "no packed model needs it") for path in paths]

    def leftovers(self, whole: Iterable[ModelName]) -> list[Leftover]:
        """Return unneeded packed files, and manifests that whole models hide.

        Raises: as `unneeded`.
        """
        folded = {name.folded for name in whole}
        hidden = [
            self.manifests.path.joinpath(*name.path_parts)
            for name in self.manifests.names()
            if name.folded in folded
        ]
        reason = "an unpacked model has its name"
        return [
            *(Leftover(path, file_size(path), reason) for path in hidden),
            *self.find_unneeded(),
        ]

    def remove_unneeded(self) -> Removal:
        """Remove the packed files that no packed model needs; sizes are those of the files.

        Nothing is removed if a manifest of a packed model, or a file, can't be read. Only for a
        holder of the lock of packing or of the store's alone. Raises: StorageError.
        """
        try:
            leftovers = self.find_unneeded()
        except BlobStoreError as error:
            return Removal((), (), error.message)
        removed = []
        for file in leftovers:
            remove_leftover(file)
            digest = Digest(file.path.name.rpartition("-")[2])
            removed.append(Descriptor("", digest, file.nbytes))
        return Removal(tuple(removed))


class PackedCare(Care):
    """The care of the packed models of a store: their blobs are decoded. See `Care`."""

    def __init__(self, models: PackedModels) -> None:
        super().__init__(models)
        self._models = models

    def digests(self) -> AbstractSet[str]:
        return self._models.blobs.digests() if self._models.manifests.names() else set()

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        return self._models.blobs.open_of(Digest(digest))

    def references(self, known: References | None = None) -> References:  # noqa: ARG002
        sizes: dict[str, int] = {}
        needs: dict[ModelName, Needs] = {}
        broken: dict[ModelName, BlobStoreError] = {}
        for name in self._models.manifests.names():
            try:
                files = self._models.files_of(name)
                sizes |= {
                    file: file_size(self._models.blobs.path / file) for file in files - sizes.keys()
                }
                needs[name] = {file: sizes[file] for file in files}
            except BlobStoreError as error:
                broken[name] = error.without_traceback()
        return References(needs, broken, (), {}, (), {})

    def files_nbytes(self) -> int:
        return self._models.nbytes()


def _unless_closed(read: Callable[[], _T], *, otherwise: _T) -> _T:
    """Return the result of ``read``; ``otherwise`` if our folder may not be read, or is a file.

    Raises: StorageError for any other reason.
    """
    try:
        return read()
    except StorageError as error:
        if error.errno not in _CLOSED:
            raise
        return otherwise
