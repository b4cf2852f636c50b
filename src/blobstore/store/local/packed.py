"""The packed models of a store: manifests and packed files under ``.blobstore/packed/``.

Ollama sees only ``blobs/`` and ``manifests/``, and deletes from ``blobs/`` what none of its
manifests names. So a packed model needs nothing there: every blob of it has a packed file, and so
has every blob of a base model that decoding needs. A packed file is visible only when it is
complete, durable, and was decoded once. It is removed when no packed model needs it.

A name is whole or packed. If a crash leaves both, the whole model counts, and the next command that
packs, unpacks or removes the name completes the work.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from blobstore.errors import BlobStoreError, StorageError
from blobstore.formats.documents import Descriptor
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.local.kept import remove_leftover
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.packed_blobs import PackedBlobs, file_size
from blobstore.store.ports import Care, Leftover, Readable, Removal, Summaries
from blobstore.store.references import Needs, References, needs_of

_T = TypeVar("_T")
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR})


class _Manifests(ManifestFolder):
    """The manifests of packed models."""

    def names(self) -> list[ModelName]:
        """See `Manifests`: none while we may not read our folder; whole models need it not."""
        return _unless_closed(super().names, otherwise=[])


class PackedModels(Readable):
    """The packed models of a store. See `Readable`."""

    blobs: PackedBlobs
    manifests: ManifestFolder

    def __init__(
        self,
        path: Path,
        lease: Callable[[], AbstractContextManager[bool]],
        summaries: Summaries,
    ) -> None:
        self.address = str(path)
        self.summaries = summaries
        self.blobs = PackedBlobs(path / "blobs")
        self.manifests = _Manifests(path / "manifests")
        self._lease = lease

    def find(self, name: str | ModelName) -> ModelName:
        """See `Home`. Raises: as `Home.find`."""
        found = self.manifests.spelled(ModelName.of(name))
        self.manifests.require(found)
        return found

    def lease(self) -> AbstractContextManager[bool]:
        """See `Readable`: that of the store."""
        return self._lease()

    def care(self) -> Care:
        return PackedCare(self)

    def has(self, name: str | ModelName) -> bool:
        """Return True if a packed model has the name, in any case.

        False while we may not read our folder. Raises: as `find`, except for a missing model.
        """
        parsed = ModelName.of(name)
        return _unless_closed(
            lambda: self.manifests.has(self.manifests.spelled(parsed)), otherwise=False
        )

    def names(self) -> list[ModelName]:
        """Return the names of the packed models, sorted. Raises: StorageError."""
        return self.manifests.names()

    def nbytes(self) -> int:
        """Return the bytes of all packed files; 0 while we may not read our folder.

        Raises: StorageError.
        """
        return _unless_closed(self.blobs.nbytes, otherwise=0)

    def remove_name(self, name: ModelName) -> bool:
        """Remove the manifest of a name, durably; return False if it is missing.

        Raises: StorageError.
        """
        if not self.manifests.has(name):
            return False
        self.manifests.remove(name)
        return True

    def replaced(self, name: ModelName) -> None:
        """Remove the manifest of a name that a whole model has now; failures are ignored.

        It is not durable: the whole model hides a manifest that comes back after a power cut, and
        the next clean-up removes it.
        """
        with suppress(OSError):
            self.manifests.path.joinpath(*name.path_parts).unlink()

    def ids(self) -> set[str]:
        """Return the sha256 of each packed model's manifest. Raises: as `ManifestFolder.text`."""
        return {Digest.of(self.manifests.text(name)).hex for name in self.manifests.names()}

    def needs(self) -> dict[ModelName, Mapping[str, int]]:
        """Return the blobs that each packed model needs, by hex digits, without their bases.

        Raises: the error of a manifest that can't be read, or of a file that may be one: then no
        packed file is removed.
        """
        needs: dict[ModelName, Mapping[str, int]] = {}
        for path in self.manifests.strays():
            message = f"{path} may be the manifest of a packed model"
            raise StorageError(message, path=str(path))
        for name in self.manifests.names():
            raw = self.manifests.text(name)
            needs[name] = needs_of(raw, f"the manifest of the packed model {name}")
        return needs

    def files_of(self, name: ModelName) -> set[str]:
        """Return the names of the packed files that a model needs, also for its base.

        Raises: as `ManifestFolder.read`; StorageError if a packed file's index can't be read.
        """
        wanted = {blob.digest.hex for blob in self.manifests.read(name).descriptors}
        files = self.blobs.files()
        found = {file for file, digests in files.items() if not wanted.isdisjoint(digests)}
        bases = set().union(*(self.blobs.bases_of(file) for file in found))
        return found | {file for file, digests in files.items() if not bases.isdisjoint(digests)}

    def unneeded(self) -> list[Leftover]:
        """Return the packed files that no packed model needs. Raises: as `needs`; StorageError."""
        needed = set().union(*self.needs().values())
        files = self.blobs.files()
        for name, digests in files.items():
            if not needed.isdisjoint(digests):
                needed |= self.blobs.bases_of(name)
        reason = "no packed model needs it"
        # A damaged file may have any blob.
        paths = [
            self.blobs.path / name
            for name, digests in sorted(files.items())
            if needed.isdisjoint(digests) and (digests or not needed)
        ]
        return [Leftover(path, file_size(path), reason) for path in paths]

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
        reason = "a whole model has its name"
        return [*(Leftover(path, file_size(path), reason) for path in hidden), *self.unneeded()]

    def remove_unneeded(self) -> Removal:
        """Remove the packed files that no packed model needs; sizes are those of the files.

        Nothing is removed if a manifest of a packed model, or a file, can't be read. Only for a
        holder of the lock of packing or of the store's alone. Raises: StorageError.
        """
        try:
            found = self.unneeded()
        except BlobStoreError as error:
            return Removal((), (), error.message)
        digests = {file.path: self.blobs.digest_of(file.path.name) for file in found}
        for file in found:
            remove_leftover(file)
        return Removal(tuple(Descriptor("", digests[file.path], file.nbytes) for file in found))


class PackedCare(Care):
    """The care of the packed models of a store: their blobs are decoded. See `Care`."""

    def __init__(self, models: PackedModels) -> None:
        super().__init__(models)
        self._models = models

    def digests(self) -> AbstractSet[str]:
        return self._models.blobs.digests() if self._models.names() else set()

    def open(self, digest: str, size: int | None) -> OpenReader:
        return self._models.blobs.open_of(Digest(digest), size)

    def files(self) -> References:
        sizes: dict[str, int] = {}
        needs: dict[ModelName, Needs] = {}
        broken: dict[ModelName, BlobStoreError] = {}
        for name in self._models.names():
            try:
                files = self._models.files_of(name)
                sizes |= {file: self._models.blobs.size(file) for file in files - sizes.keys()}
                needs[name] = {file: sizes[file] for file in files}
            except BlobStoreError as error:
                broken[name] = error.kept()
        return References(needs, broken, (), {}, (), {})

    def files_nbytes(self) -> int:
        return self._models.nbytes()

    def damaged(self) -> Iterator[tuple[str, str]]:
        """See `Care`: files of several blobs with a damaged index."""
        for name, reason in self._models.blobs.damaged_files() if self._models.names() else ():
            yield self._models.blobs.digest_of(name).hex, reason


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
