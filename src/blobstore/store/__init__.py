"""Store: blobs by digest and manifests by name, in Ollama's folders.

``ROOT/blobs/sha256-<hex>`` and ``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` are shared with Ollama. Everything of our own
(temporary files, the lock) lies in ``ROOT/.blobstore/``. The invariants are in docs/design.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blobstore.digest import Digest
from blobstore.documents import Descriptor, Manifest
from blobstore.errors import BlobStoreError, BusyError, CorruptDataError, LimitExceededError, StorageError
from blobstore.names import ModelName
from blobstore.store.blobs import BlobFolder
from blobstore.store.files import os_errors
from blobstore.store.ingest import Ingest
from blobstore.store.journal import Journal
from blobstore.store.lock import StoreLock
from blobstore.store.manifests import ManifestFolder
from blobstore.store.writer import BlobWriter, FinishedBlob

__all__ = ["BlobWriter", "FinishedBlob", "Ingest", "Removal", "Store", "open_store"]

PRIVATE = ".blobstore"


@dataclass(frozen=True, slots=True)
class Removal:
    """What a removal did: the blobs that are gone, those that had to stay, and why they had to."""

    removed: tuple[Descriptor, ...]
    kept: tuple[Descriptor, ...] = ()
    reason: str | None = None


class Store:
    """A content-addressed store of model blobs. Reading never writes; folders are made by the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Resolved once: the store may be reached through a link, but nothing below it may be one.
        try:
            self.root = Path(root).expanduser().resolve()
            is_folder = self.root.is_dir() or not os.path.lexists(self.root)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown ~user, a NUL
            raise StorageError(f"can't open the store {root}: {error}", path=str(root)) from error
        if not is_folder:
            raise StorageError(f"the store {self.root} is no folder", path=str(self.root))
        self.blobs = BlobFolder(self.root / "blobs")
        self.manifests = ManifestFolder(self.root / "manifests")
        self._private = self.root / PRIVATE
        self._lock = StoreLock(self._private / "lock")

    @contextmanager
    def ingest(self, source: str = "") -> Iterator[Ingest]:
        """Yield an ingest: what it commits is in the store, what it does not commit is gone afterwards.

        ``source`` names what is imported, for the journal. The store's lock is held shared meanwhile. After a
        KeyboardInterrupt finished blobs stay, for the next import of the source. Raises: BusyError while a clean-up holds
        the lock alone; StorageError.
        """
        with self._lock.shared():
            ingest = Ingest(self.blobs, self.manifests, self._private / "tmp", Journal(self._private / "journal", source))
            interrupted = False
            try:
                yield ingest
            except KeyboardInterrupt:
                interrupted = True
                raise
            finally:
                ingest.close(keep_finished=interrupted)

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

    def copy(self, source: ModelName, target: ModelName) -> None:
        """Give a model a second name; no blob is copied. An older model of that name is replaced."""
        manifest = self.manifest(source)
        with self.ingest() as ingest:
            ingest.commit([], target, manifest)

    def remove(self, name: ModelName) -> Removal:
        """Remove a model: its manifest first, then those of its blobs that no other model needs.

        Blobs stay when another import or removal is at work (it may be about to use them) or when any manifest can't be
        read (it may need them); the model is gone all the same. Raises: NotFoundError when there is no such model.
        """
        self.manifests.require(name)
        with self._lock.shared():
            try:
                orphans = self.manifest(name).descriptors
            except (CorruptDataError, LimitExceededError):
                orphans = ()  # a manifest that can't be read names no blobs; it can still be removed
            self.manifests.remove(name)
        try:
            with self._lock.exclusive():
                self.manifests.remove_empty_folders(name)
                return self._remove_unreferenced(orphans)
        except BusyError:
            return Removal((), orphans, "another process is writing to the store")

    def _remove_unreferenced(self, candidates: tuple[Descriptor, ...]) -> Removal:
        if strays := [*self.manifests.strays(), *self._newer_manifests()]:
            return Removal((), candidates, f"{strays[0]} may be a manifest that needs them")
        needed: set[Digest] = set()
        for name, manifest in self.models():
            if isinstance(manifest, BlobStoreError):
                return Removal((), candidates, f"the manifest of {name} can't be read")
            needed |= {descriptor.digest for descriptor in manifest.descriptors}
        orphans = {blob.digest: blob for blob in candidates if blob.digest not in needed}
        for digest in orphans:
            self.blobs.remove(digest)
        return Removal(tuple(orphans.values()))

    def _newer_manifests(self) -> list[Path]:
        # Ollama's later versions keep manifests in a second tree, which is not read here: its models need their blobs.
        folder = self.root / "manifests-v2"
        with os_errors("list", folder):
            return sorted(folder.iterdir()) if folder.is_dir() else []


def open_store(root: str | os.PathLike[str] | None = None) -> Store:
    """Return the store in folder ``root``, or in Ollama's default folder ``~/.ollama/models``. Nothing is created yet.

    Raises: StorageError when the path is something else than a folder.
    """
    return Store(Path.home() / ".ollama" / "models" if root is None else root)
