"""Store: blobs by digest and manifests by name, in Ollama's folders.

``ROOT/blobs/sha256-<hex>`` and ``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` are shared with Ollama.
Everything of our own (temporary files, the lock) lies in ``ROOT/.blobstore/``. The invariants are
in docs/design.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    ConflictError,
    CorruptDataError,
    LimitExceededError,
    MissingFileError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.durable import is_remote, os_errors
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.copies import CopiedModels, ManifestCopies, MissingModel
from blobstore.store.local.journal import Journal, SummaryCache, dead_journals
from blobstore.store.local.leftovers import Leftover, Leftovers
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.newer import NewerManifests
from blobstore.store.local.references import References
from blobstore.store.local.session import LocalSession
from blobstore.store.local.trash import Trash
from blobstore.store.ports import Removal

_log = logging.getLogger("blobstore.store.local.store")

PRIVATE = ".blobstore"
_FOLDERS = {"blobs", "manifests", "manifests-v2", PRIVATE}
_NAMES_WAIT_S = 60
"""The lock of names is held no longer than a sync of one folder takes.

But a busy disk may take its time for that.
"""


class Store:
    """A content-addressed store of model blobs.

    Reading never writes, but for a cache of summaries in a folder of ours (journal.py); other
    folders are made by the first write.
    """

    def __init__(self, root: str | os.PathLike[str], *, wait_s: float | None = None) -> None:
        # Resolved once: the store may be reached through a link, but nothing below it may be one.
        try:
            self.root = Path(root).expanduser().resolve()
            # In this order: another process may make it just now.
            is_folder = not os.path.lexists(self.root) or self.root.is_dir()
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # a loop of links, an unknown ~user, a NUL
            raise StorageError(f"can't open the store {root}: {error}", path=str(root)) from error
        if not is_folder:
            raise StorageError(f"the store {self.root} is not a folder", path=str(self.root))
        self.blobs = BlobFolder(self.root / "blobs")
        self.manifests = ManifestFolder(self.root / "manifests")
        self.newer = NewerManifests(self.root / "manifests-v2", self.blobs)
        self._private = self.root / PRIVATE
        self.copies = ManifestCopies(self._private / "copies")
        self.summaries = SummaryCache(self._private / "cache" / "summaries", self.root)
        self.trash = Trash(self._private / "trash", self.blobs.path, self.copies)
        self._lock = StoreLock(self._private / "lock", wait_s)
        self._names = StoreLock(self._private / "names", _NAMES_WAIT_S)

    @property
    def is_remote(self) -> bool:
        """True when the store's lock lies on a network file system. Raises: StorageError."""
        with os_errors("access", self._private):
            return is_remote(self._private)

    @property
    def address(self) -> str:
        """Its folder."""
        return str(self.root)

    def require(self) -> None:
        """Raise NotFoundError when the store's folder does not exist, or contains only files and folders of something else.

        Raises: StorageError when it can't be listed.
        """
        message = f"there is no store at {self.root}"
        hint = "Is the path right, and the disk mounted? An import makes a new store."
        with os_errors("list", self.root):
            if not self.root.exists():
                raise MissingFileError(message, path=str(self.root), hint=hint)
            names = {path.name for path in self.root.iterdir()}
        if not names or names & _FOLDERS:
            return
        if os.path.exists(self.root / "models" / "manifests"):  # noqa: PTH110  # which takes what can't be told for no
            hint = f"Did you mean {self.root / 'models'}?"
        raise NotFoundError(
            f"{message}: the folder contains neither blobs nor manifests",
            path=str(self.root),
            hint=hint,
        )

    @contextmanager
    def session(self, source: str = "") -> Iterator[LocalSession]:
        """Yield a session: what it publishes is in the store, what it does not publish is gone afterwards.

        ``source`` names what is imported, for the journal. The store's lock is held shared
        meanwhile. After a KeyboardInterrupt finished blobs stay, for the next import of the source.
        Raises: BusyError while a clean-up holds the lock alone; StorageError.
        """
        with self._lock.shared():
            self._names.make()
            journal = Journal(self._private / "journal", source)
            session = LocalSession(
                self.blobs, self.manifests, self.copies, self._private / "tmp", journal, self._names
            )
            interrupted = False
            try:
                yield session
            except KeyboardInterrupt:
                interrupted = True
                raise
            finally:
                session.close(keep_finished=interrupted)

    def models(self) -> Iterator[tuple[ModelName, Manifest | BlobStoreError]]:
        """Yield every model by name, sorted, with its manifest, or with the error that reading it gave."""
        for name in self.manifests.names():
            try:
                yield name, self.manifests.read(name)
            except BlobStoreError as error:
                yield name, error.kept()

    def find(self, name: str | ModelName) -> ModelName:
        """Return the name of a model as the store spells it.

        Case counts only between models that differ in nothing else.

        Raises: InvalidNameError; NotFoundError; AmbiguousNameError when several spellings are
        there, but not this one; StorageError.
        """
        found = self.manifests.spelled(ModelName.of(name))
        try:
            self.manifests.require(found)
        except NotFoundError as error:
            if self.newer.has(found):
                error.hint = "A newer Ollama has it, in manifests-v2/, which is not read here."
            raise
        return found

    def target(self, name: str | ModelName) -> ModelName:
        """Return the name that a model is written under: as the store spells it, where it has it or folders on its way.

        A name that hides it from newer Ollamas is logged as a warning, and so are names that can't
        be listed there: nothing is lost by a write. Raises: InvalidNameError; AmbiguousNameError;
        StorageError.
        """
        found = self.manifests.spelled(ModelName.of(name))
        try:
            if self.newer.has(found):
                _log.warning(
                    "a newer Ollama has its own %s, in manifests-v2/: it will not read this one",
                    found,
                )
        except StorageError as error:
            _log.warning("a newer Ollama may have its own %s: %s", found, error)
        return found

    def manifest(self, name: str | ModelName) -> Manifest:
        """Return a model's manifest.

        Raises: NotFoundError; DocumentError when it is damaged; StorageError.
        """
        return self.manifests.read(ModelName.of(name))

    def copy(self, source: str | ModelName, target: str | ModelName) -> ModelName:
        """Give a model a second name, and return it as the store spells it; no blob is copied.

        An older model of that name is replaced. Raises: NotFoundError when there is no such model,
        or a blob of it is missing; UsageError when both names are one but for case;
        AmbiguousNameError; CorruptDataError; StorageError.
        """
        old, new = self._pair(source, target)
        manifest = self.manifest(old)
        with self.session() as session:
            session.publish(new, manifest)
        return new

    def move(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool = False
    ) -> ModelName:
        """Rename a model, and return its new name as the store spells it: that first, durably, then the old one goes.

        Killed in between, the model has both names, and the same again ends it. Raises: as `copy`;
        UsageError when there is another model of that name and not ``replace``.
        """
        old, new = self._pair(source, target)
        manifest = self.manifest(old)
        if old == new:
            return new
        with self.session() as session:
            try:
                session.publish(new, manifest, expected=None if replace else (None, manifest.raw))
            except ConflictError as error:
                message = f"model {new} already exists"
                raise UsageError(
                    message, model=str(new), hint="Remove it first, or replace it: replace=True."
                ) from error
            with self._names.exclusive():
                # Another may have removed the old name meanwhile, or given it to another model,
                # which is not ours to remove.
                if self.manifests.raw(old) == manifest.raw:
                    self.manifests.remove(old)
                    self.copies.remove(old)
        with suppress(BusyError), self.alone(wait_s=0):
            self.manifests.remove_empty_folders(old)
        return new

    def _pair(
        self, source: str | ModelName, target: str | ModelName
    ) -> tuple[ModelName, ModelName]:
        """Return an old and a new name as the store spells them.

        Raises: UsageError when they differ only in case.
        """
        source, target = ModelName.of(source), ModelName.of(target)
        old, new = self.find(source), self.target(target)
        if old == new and source.path_parts != target.path_parts:
            message = f"{target} is {old}: names that differ only in case are one model"
            raise UsageError(
                message, model=str(old), hint="To change the case, move it to another name first."
            )
        return old, new

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model: its manifest first, then those of its blobs that no other model needs.

        Blobs stay when another process uses the store (an import may be about to use them) or when
        any manifest can't be read (it may need them); the model is gone all the same. Raises:
        NotFoundError when there is no such model; AmbiguousNameError.
        """
        name = self.find(name)
        with self._lock.shared(), self._names.exclusive():
            try:
                orphans = self.manifest(name).descriptors
            except (CorruptDataError, LimitExceededError, StorageError):
                orphans = ()  # a manifest that can't be read names no blobs; it can still be removed
            self.manifests.remove(name)
            self.copies.remove(name)
        try:
            with self.alone():
                self.manifests.remove_empty_folders(name)
                return self._remove_unreferenced(orphans)
        except BusyError as error:
            return Removal((), orphans, error.message)

    def _remove_unreferenced(self, candidates: tuple[Descriptor, ...]) -> Removal:
        references = self.references()
        if (obstacle := references.obstacle) is not None:
            return Removal((), candidates, obstacle.message)
        needed = references.needed()
        orphans = {blob.digest: blob for blob in candidates if blob.digest.hex not in needed}
        try:
            lost = self._lost_beside(references, {digest.hex for digest in orphans})
        except StorageError as error:
            return Removal((), candidates, error.message)
        saved = {digest: model for model in lost for digest in model.needs}
        removed = tuple(
            blob
            for digest, blob in orphans.items()
            if digest.hex not in saved and self.blobs.remove(digest)
        )
        kept = tuple(blob for digest, blob in orphans.items() if digest.hex in saved)
        if not kept:
            return Removal(removed)
        name = saved[kept[0].digest.hex].name
        return Removal(
            removed,
            kept,
            f"{name} may need them: its manifest is gone, but blobs that only it needs are there",
        )

    def _lost_beside(self, references: References, removed: set[str]) -> list[MissingModel]:
        """Return the lost models of a store out of which a model with the blobs ``removed`` is taken."""
        copied = self.copied(references.names)
        if not copied.missing:
            return []
        return copied.lost(self.blobs.listing().named.keys() - references.needed() - removed)

    def copied(self, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the models whose manifests have copies: those of ``names``, and those that are missing.

        Raises: StorageError.
        """
        return CopiedModels.read(self.copies, names)

    @contextmanager
    def alone(self, wait_s: float = 1) -> Iterator[None]:
        """Hold the store's lock alone: no import, copy or removal of ours is at work, and no model is being opened.

        Raises: BusyError, which names the holders, after ``wait_s`` seconds; StorageError.
        """
        with self._lock.exclusive(wait_s):
            yield

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Keep blobs from being removed while a model is opened; yield whether that is so.

        It is not where that would need writing: in a store into which nothing of ours has written
        yet, or that may not be written to. A reader that misses a blob then checks whether the
        manifest is still the one that named it.
        """
        with self._lock.reading() as is_held:
            yield is_held

    def references(self, known: References | None = None) -> References:
        """Return which blobs the manifests name.

        Manifests of the same bytes as ``known`` has are not parsed again.

        Raises: StorageError when the folders can't be listed.
        """
        return References.read(
            self._manifest_bytes(), self.manifests.strays(), self.newer.needs(), known
        )

    def _manifest_bytes(self) -> Iterator[tuple[ModelName, bytes | BlobStoreError]]:
        for name in self.manifests.names():
            try:
                yield name, self.manifests.text(name)
            except NotFoundError:
                continue  # it has been removed since the names were read
            except BlobStoreError as error:
                yield name, error.kept()

    def leftovers(self, kept_s: float, is_there: Callable[[Digest], bool]) -> list[Leftover]:
        """Return what is of no use any more of our own: remains of killed imports, and journals that name no blob.

        ``kept_s``: for how long the finished blobs of a killed import are kept for the next one.
        ``is_there``: whether a blob of that digest is in the store. Raises: StorageError.
        """
        left = Leftovers(self._private / "tmp")
        stale = list(left.stale(kept_s))
        waiting = set(left.finished())
        journals = dead_journals(
            self._private / "journal", lambda digest: digest in waiting or is_there(digest)
        )
        return [*stale, *journals]


def open_store(root: str | os.PathLike[str] | None = None, *, wait_s: float | None = None) -> Store:
    """Return the store in folder ``root``, or in Ollama's default folder ``~/.ollama/models``.

    Nothing is created yet.

    ``wait_s``: for how many seconds a change of the store waits while another process is in its way
    (None: 10 for an import or a copy, 1 for the removal of blobs). Raises: StorageError when the
    path is something else than a folder.
    """
    return Store(Path.home() / ".ollama" / "models" if root is None else root, wait_s=wait_s)
