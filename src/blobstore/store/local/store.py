"""Store: blobs by digest and manifests by name, in Ollama's folders.

``ROOT/blobs/sha256-<hex>`` and ``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` are shared with Ollama.
Our own files are in ``ROOT/.blobstore/``. The invariants are in docs/design.md.

`pack` keeps a model's blobs compressed in the same store: it writes packed files, each of which is
decoded once and made durable; then the packed model's manifest takes the place of the whole one's,
and last the blobs that no other model needs are removed. `unpack` goes the other way, through a
session: every blob is checked against its digest, and the model is published before its packed
files are removed. So a model is at any moment whole or packed. A killed run continues with the
packed files, or blobs, that were finished.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    CorruptDataError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.durable import check_one_mount
from blobstore.io.workers import Progress, each, start_progress, threads
from blobstore.names import ModelName
from blobstore.store.local.session import LocalSession
from blobstore.store.local.store_folder import FolderCare, StoreFolder
from blobstore.store.packed.files import write_packed
from blobstore.store.ports import Care, Home, Removal, check_expected, unique
from blobstore.store.sessions import add_missing, keep_for_the_next


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that was packed.

    ``removal``: which of its plain blobs were removed, and why others could not be.
    """

    KEYS = (
        "name",
        "blobs",
        "size=nbytes",
        "stored",
        "freed=removal.removed_bytes",
        "kept=removal.kept_bytes",
        "reason=removal.reason",
    )

    name: ModelName
    blobs: int
    nbytes: Annotated[int, "bytes of its blobs"]
    stored: Annotated[int, "bytes of their packed form"]
    removal: Removal


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """A model that was unpacked."""

    KEYS = ("name", "blobs", "bytes=nbytes")

    name: ModelName
    blobs: Annotated[int, "blobs that were unpacked"]
    nbytes: int


def pack(
    store: Store | str | os.PathLike[str] | None,
    name: str | ModelName,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PackedModel:
    """Keep a model's blobs compressed, and remove the plain ones that no other model needs.

    ``jobs``: threads (None: one per core). ``progress`` is called with the bytes of each blob. A
    packed model stays as it is.

    Raises: NotFoundError for a missing model or blob; DigestMismatchError for a damaged blob;
    ConflictError if the model was changed meanwhile; BusyError; StorageError. The store is
    unchanged then.
    """
    store = open_store(store)
    if store.is_packed(name):
        full = store.packed.find(name)
        manifest = store.packed.manifests.read(full)
        store.copies.remove(full)  # a run that was killed may have left it
    else:
        full = store.find(name)
        with store.packing() as folder:
            manifest = store.manifests.read(full)
            try:
                _write(store, manifest.descriptors, folder, threads(jobs), progress)
                store.become_packed(full, manifest, folder)
            except StorageError:  # the disk may be full; else they are kept for the next run
                store.packed.remove_unneeded()
                raise
            store.packed.remove_unneeded()
    removal = store.remove_orphans(full, manifest.descriptors)
    own = {blob.digest.hex for blob in manifest.descriptors}
    return PackedModel(full, len(own), manifest.size, store.packed.blobs.stored(own), removal)


def _write(
    store: Store, blobs: Sequence[Descriptor], folder: Path, jobs: int, progress: Progress | None
) -> None:
    """Make the packed files of blobs, each by one thread, and durable when it is visible.

    Those that are packed already get decoded and hashed: their plain forms may be the last sound
    ones.
    """
    packed = store.packed.blobs
    missing = packed.missing(blobs)
    there = [blob for blob in unique(blobs) if blob not in missing]
    each(there, packed.check, min(jobs, len(there)), name="pack")
    report = start_progress(progress, sum(blob.size for blob in missing))

    def write(blob: Descriptor) -> None:
        path = folder / f"packed-{blob.digest.hex}"
        with store.blobs.open(blob) as reader:
            write_packed(path, blob, reader)
        packed.add(path, blob.digest)
        report(blob.size, blob.name or str(blob.digest))

    each(missing, write, min(jobs, len(missing)), name="pack")
    packed.settle()


def unpack(
    store: Store | str | os.PathLike[str] | None,
    name: str | ModelName,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> UnpackedModel:
    """Restore a packed model's blobs, each checked against its digest; return their number.

    ``jobs``, ``progress``: as in `transfer`. A model that is not packed stays as it is.

    Raises: NotFoundError; CorruptDataError for a damaged packed file, with ``blob`` and ``path``;
    DigestMismatchError; ConflictError if another process gives the name to another model;
    BusyError; StorageError. The model stays packed then.
    """
    store = open_store(store)
    with store.packing():
        if store.is_packed(name):
            done = _unpack(store, store.packed.find(name), threads(jobs), progress)
        else:
            done = UnpackedModel(store.find(name), 0, 0)
            store.manifests.read(done.name)  # what can't be read is not a whole model
            store.packed.remove_replaced(done.name)  # a run that was killed may have left it
        store.packed.remove_unneeded()
    return done


def _unpack(store: Store, name: ModelName, jobs: int, progress: Progress | None) -> UnpackedModel:
    with store.session() as session:
        manifest = store.packed.manifests.read(name)
        written = store.packed.manifests.modified_at(name)
        with keep_for_the_next(session):
            took = add_missing(session, manifest, store.packed.blobs.open, jobs, progress)
            session.publish(name, manifest, expected=(None,))
        store.manifests.set_modified(name, written)
    sizes = {blob.digest: blob.size for blob in manifest.descriptors}
    return UnpackedModel(name, len(took), sum(map(sizes.__getitem__, took)))


_Name = str | ModelName
_log = logging.getLogger(__name__)


class Store(StoreFolder, Home):
    """A content-addressed store of model blobs. See `Home`. `whole` unpacks a packed model.

    Reading writes nothing, except a cache of summaries in a folder of ours (hints.py). Other
    folders are made by the first write.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(Store, self.root, wait_s=self._wait_s), ())

    @contextmanager
    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one folder
    ) -> Iterator[LocalSession]:
        """See `Home`. The store's lock is shared meanwhile.

        After a KeyboardInterrupt finished blobs are kept, for the next import.
        Raises: BusyError while a clean-up holds the lock alone; StorageError.
        """
        with self._lock.shared():
            self.names_lock.make()
            session = LocalSession(self)
            interrupted = False
            try:
                yield session
            except KeyboardInterrupt:
                interrupted = True
                raise
            finally:
                session.close(keep_finished=interrupted)

    def find(self, name: str | ModelName) -> ModelName:
        """See `Home`. Case matters only between models whose names differ in nothing else.

        Raises: InvalidNameError; NotFoundError, also for a packed model; AmbiguousNameError if the
        store has several spellings, but not this one; StorageError.
        """
        stored = self.manifests.stored_name(ModelName.of(name))
        if not self.manifests.has(stored):
            if self.packed.has(stored):
                hint = f"blobstore unpack {stored} restores it."
                raise ModelNotFoundError(f"model {stored} is packed", model=str(stored), hint=hint)
            hint = "A newer Ollama has it, in manifests-v2/, which is not read here."
            raise self.manifests.missing(stored, hint if self.newer.has(stored) else None)
        return stored

    def whole(self, name: str | ModelName) -> ModelName:
        return unpack(self, name).name if self.is_packed(name) else self.find(name)

    def target(self, name: str | ModelName) -> ModelName:
        """See `Home`: the store's spelling of the name, or of the folders on its path.

        A model of the name that a newer Ollama has is logged as a warning: a write loses nothing.
        Raises: InvalidNameError; AmbiguousNameError; StorageError.
        """
        stored = self.manifests.stored_name(ModelName.of(name))
        if self.is_packed(stored):
            stored = self.packed.find(stored)
        with suppress(StorageError):
            if self.newer.has(stored):
                what = "a newer Ollama has its own %s, in manifests-v2/, and will not read this one"
                _log.warning(what, stored)
        return stored

    def manifest(self, name: str | ModelName) -> Manifest:
        """Return a model's manifest. Raises: NotFoundError; DocumentError; StorageError."""
        return self.manifests.read(ModelName.of(name))

    def models(self) -> Iterator[tuple[ModelName, Manifest | BlobStoreError]]:
        """Yield every model by name, sorted, with its manifest or the error of reading it."""
        for name in self.manifests.names():
            try:
                yield name, self.manifests.read(name)
            except BlobStoreError as error:
                yield name, error.without_traceback()

    def _give_name(self, source: _Name, target: _Name, *, replace: bool, moves: bool) -> ModelName:
        if self.is_packed(source):
            return self._name_packed(source, target, moves=moves)
        return super()._give_name(source, target, replace=replace, moves=moves)

    def _drop_name(self, name: ModelName, manifest: Manifest) -> None:
        # Another process may have removed the name meanwhile.
        with self._lock.shared(), self.names_lock.exclusive(), suppress(NotFoundError):
            if self.manifests.text(name) == manifest.raw:
                self.packed.remove_name(name)  # the whole one does not hide it any more
                self.manifests.remove(name)
                self.copies.remove(name)
        with suppress(BusyError), self.alone(wait_s=0):
            self.manifests.remove_empty_folders(name)

    def is_packed(self, name: str | ModelName) -> bool:
        """Return True if the model of that name is packed. Raises: as `find`, but NotFoundError."""
        existing = self.manifests.stored_name(ModelName.of(name))
        return not self.manifests.has(existing) and self.packed.has(name)

    def _name_packed(self, source: _Name, target: _Name, *, moves: bool) -> ModelName:
        """Give a packed model a name that no model has; with ``moves`` it loses the old one."""
        old, new = self.packed.find(source), self.target(target)
        manifest = self.packed.manifests.read(old)
        with self.packing() as folder:
            self.packed.manifests.prepare(new, manifest, folder / "manifest")
            with self.names_lock.exclusive():
                # A killed move has left both names.
                is_taken = self.packed.manifests.raw(new) not in (None, manifest.raw)
                if self.manifests.has(new) or is_taken:
                    hint = "Remove it first, or unpack the other: blobstore unpack NAME."
                    taken = f"model {new} already exists, and {old} is packed"
                    raise UsageError(taken, model=str(new), hint=hint)
                self.packed.manifests.link(new, folder / "manifest")
                if moves:
                    self.packed.manifests.remove(old)
        return new

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model: its manifest first, then those of its blobs that no other model needs.

        The blobs are kept if another process uses the store (an import may be about to use them) or
        if any manifest can't be read (it may need them). The model is removed in any case, and a
        packed one of the name too. Raises: NotFoundError; AmbiguousNameError.
        """
        name = self.packed.find(name) if self.packed.has(name) else self.find(name)
        with self._lock.shared(), self.names_lock.exclusive():
            orphans: tuple[Descriptor, ...] = ()
            packed = self.packed.remove_name(name)
            if self.manifests.has(name) or not packed:
                # A manifest that can't be read can still be removed.
                with suppress(CorruptDataError, LimitExceededError, StorageError):
                    orphans = self.manifest(name).descriptors
                self.manifests.remove(name)
            self.copies.remove(name)
        return self.remove_orphans(name, orphans)

    def remove_orphans(self, name: ModelName, orphans: tuple[Descriptor, ...]) -> Removal:
        """Remove those of a removed model's blobs that no model needs, and unneeded packed files.

        All are kept if another process uses the store, or if a manifest can't be read.
        """
        try:
            with self.alone():
                self.manifests.remove_empty_folders(name)
                packed = self.packed.remove_unneeded()
                plain = self.remove_unreferenced(orphans)
        except BusyError as error:
            return Removal((), orphans, error.message)
        removed = (*plain.removed, *packed.removed)
        return Removal(removed, plain.kept, plain.reason or packed.reason)

    @contextmanager
    def packing(self) -> Iterator[Path]:
        """Hold the lock of packing; yield a folder for files that are not finished.

        Raises: BusyError while another process packs, unpacks or cleans up; StorageError.
        """
        with self._lock.shared(), self._packing.exclusive(wait_s=10):
            self.names_lock.make()
            with self.kept.owned_folder() as folder:
                check_one_mount(folder, Path(self.packed.address))
                yield folder

    def become_packed(self, name: ModelName, manifest: Manifest, folder: Path) -> None:
        """Replace a model's manifest by that of a packed model, whose packed files are durable.

        ``folder``: of `packing`. Raises: ConflictError if the manifest has changed; StorageError.
        """
        prepared = folder / "manifest"
        self.packed.manifests.prepare(name, manifest, prepared)
        with self.names_lock.exclusive():
            check_expected(name, self.manifests.raw(name), (manifest.raw,))
            written = self.manifests.modified_at(name)
            self.packed.manifests.link(name, prepared)
            self.packed.manifests.set_modified(name, written)
            self.manifests.remove(name)
            self.copies.remove(name)

    def care(self) -> Care:
        return FolderCare(self)


def default_place() -> str:
    """Return ``$BLOBSTORE_STORE``, else ``$OLLAMA_MODELS``, else ``~/.ollama/models``.

    Only here the library reads the environment: a model that Ollama and the command line see is
    found.
    """
    named = os.environ.get("BLOBSTORE_STORE") or os.environ.get("OLLAMA_MODELS")
    return named or str(Path.home() / ".ollama" / "models")


def open_store(
    root: str | os.PathLike[str] | Store | None = None, *, wait_s: float | None = None
) -> Store:
    """Return the store in folder ``root``; an open store as it is.

    None stands for ``$BLOBSTORE_STORE``, else ``$OLLAMA_MODELS``, else ``~/.ollama/models``, as on
    the command line.

    Nothing is created yet. ``wait_s``: how many seconds a change of the store waits for another
    process that uses it (None: 10 for an import or a copy, 1 for the removal of blobs). Raises:
    StorageError if the path exists and is not a folder; UsageError for the address of a bucket.
    """
    if isinstance(root, Store):
        return root
    place = default_place() if root is None else os.fspath(root)
    if "://" in place:
        hint = "blobstore.open_bucket_store opens it."
        raise UsageError(f"{place} is an address, not a folder", path=place, hint=hint)
    return Store(place, wait_s=wait_s)
