"""Store: blobs by digest and manifests by name, in Ollama's folders.

``ROOT/blobs/sha256-<hex>`` and ``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` are shared with Ollama. Everything of our own
(temporary files, the lock) lies in ``ROOT/.blobstore/``. The invariants are in docs/design.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from blobstore.digest import Digest
from blobstore.documents import Descriptor, Manifest
from blobstore.errors import BlobStoreError, BusyError, CorruptDataError, NotFoundError
from blobstore.names import ModelName
from blobstore.ranges import FileReader
from blobstore.store.blobs import BlobFolder, BlobWriter, FinishedBlob
from blobstore.store.lock import StoreLock
from blobstore.store.manifests import ManifestFolder

__all__ = ["BlobWriter", "FinishedBlob", "Removal", "Store", "open_store"]

PRIVATE = ".blobstore"


class Removal:
    """What a removal did: ``removed`` blobs are gone, ``kept`` could not be removed now, and ``reason`` says why."""

    def __init__(self, removed: list[Descriptor], kept: list[Descriptor], reason: str | None) -> None:
        self.removed = removed
        self.kept = kept
        self.reason = reason


class Store:
    """A content-addressed store of model blobs. Reading never writes; folders are made by the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Resolved once: the store may be reached through a link, but nothing below it may be one.
        self.root = Path(root).expanduser().resolve()
        private = self.root / PRIVATE
        self.blobs = BlobFolder(self.root / "blobs", private / "tmp")
        self.manifests = ManifestFolder(self.root / "manifests", private / "tmp")
        self._lock = StoreLock(private / "lock")

    def shared(self) -> AbstractContextManager[None]:
        """Hold the store's lock shared: for imports and removals. Raises: BusyError while a clean-up holds it alone."""
        return self._lock.shared()

    def models(self) -> Iterator[tuple[ModelName, Manifest | BlobStoreError]]:
        """Yield every model by name, sorted, with its manifest, or with the error that reading it gave."""
        for name in self.manifests.names():
            try:
                yield name, self.manifests.read(name)
            except BlobStoreError as error:
                yield name, error

    def manifest(self, name: ModelName) -> Manifest:
        """Return a model's manifest. Raises: NotFoundError; DocumentError when it is damaged; StorageError."""
        return self.manifests.read(name)

    def open_blob(self, descriptor: Descriptor) -> FileReader:
        """Return a reader over a blob whose size is the descriptor's.

        Raises: NotFoundError when it is missing, CorruptDataError when its size differs, StorageError when it is no
        regular file or can't be read. Each carries ``blob``.
        """
        reader = self.blobs.open(descriptor.digest)
        if reader.size != descriptor.size:
            reader.close()
            raise CorruptDataError(
                f"blob {descriptor.digest} has {reader.size:,} bytes, the manifest says {descriptor.size:,}",
                blob=str(descriptor.digest),
            )
        return reader

    def read_blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob (a config, a JSON document), checked against its digest.

        Raises: as `open_blob`; CorruptDataError when the bytes are not the digest's.
        """
        with self.open_blob(descriptor) as reader:
            data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            raise CorruptDataError(f"blob {descriptor.digest} is damaged: its bytes have another digest", blob=str(descriptor.digest))
        return data

    def link(self, name: ModelName, manifest: Manifest) -> None:
        """Make ``manifest`` visible under ``name``, durably, after a check that every blob is there with its size.

        An older manifest of that name is replaced. Raises: NotFoundError or CorruptDataError when a blob is not as the
        manifest says; StorageError. On any error the old manifest stays.
        """
        for descriptor in manifest.descriptors:
            self.blobs.check(descriptor)
        self.manifests.write(name, manifest)

    def copy(self, source: ModelName, target: ModelName) -> None:
        """Give a model a second name; no blob is copied. An older model of that name is replaced."""
        with self.shared():
            self.link(target, self.manifest(source))

    def remove(self, name: ModelName) -> Removal:
        """Remove a model: its manifest first, then those of its blobs that no other model needs.

        Blobs stay when another import or removal is at work (it may be about to use them) or when any manifest can't be
        read (it may need them); the model is gone all the same. Raises: NotFoundError when there is no such model.
        """
        with self.shared():
            try:
                orphans = self.manifest(name).descriptors
            except CorruptDataError:
                orphans = ()  # a manifest that can't be read names no blobs; it can still be removed
            self.manifests.remove(name)
        try:
            with self._lock.exclusive():
                return self._remove_unreferenced(orphans)
        except BusyError:
            return Removal([], list(orphans), "another process is writing to the store")

    def _remove_unreferenced(self, candidates: tuple[Descriptor, ...]) -> Removal:
        needed: set[Digest] = set()
        for name, manifest in self.models():
            if isinstance(manifest, BlobStoreError):
                return Removal([], list(candidates), f"the manifest of {name} can't be read")
            needed |= {descriptor.digest for descriptor in manifest.descriptors}
        orphans = {blob.digest: blob for blob in candidates if blob.digest not in needed}
        for digest in orphans:
            self.blobs.remove(digest)
        return Removal(list(orphans.values()), [], None)

    def require(self) -> None:
        """Raise NotFoundError when the store's folder does not exist: for commands that only make sense on one."""
        if not self.root.is_dir():
            raise NotFoundError(f"no store at {self.root}", path=str(self.root))


def open_store(root: str | os.PathLike[str] | None = None) -> Store:
    """Return the store in folder ``root``, or in Ollama's default folder ``~/.ollama/models``. Nothing is created yet."""
    return Store(Path.home() / ".ollama" / "models" if root is None else root)
