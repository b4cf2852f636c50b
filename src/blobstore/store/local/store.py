"""Store: blobs by digest and manifests by name, in Ollama's folders.

``ROOT/blobs/sha256-<hex>`` and ``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` are shared with Ollama.
Our own files (temporary files, locks) are in ``ROOT/.blobstore/``. The invariants are in
docs/design.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    CorruptDataError,
    LimitExceededError,
    MissingFileError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Manifest
from blobstore.io.durable import is_remote, os_errors
from blobstore.names import Digest, ModelName
from blobstore.store.local.backups import CopiedModels, ManifestCopies, Trash
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.journal import Journal, SummaryCache, dead_journals
from blobstore.store.local.leftovers import Leftover, Leftovers
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.references import NewerManifests, References
from blobstore.store.local.session import LocalSession
from blobstore.store.local.shares import ShareNotes
from blobstore.store.local.signature_folder import SignatureFolder
from blobstore.store.ports import Removal, publish_moved

_log = logging.getLogger("blobstore.store.local.store")

PRIVATE = ".blobstore"
_FOLDERS = {"blobs", "manifests", "manifests-v2", PRIVATE}
_NAMES_WAIT_S = 60
"""The lock of names is held only for a sync of one folder, which may take long on a busy disk."""


class Store:
    """A content-addressed store of model blobs. See `Home`.

    Reading writes nothing, except a cache of summaries in a folder of ours (journal.py). Other
    folders are made by the first write.
    """

    def __init__(self, root: str | os.PathLike[str], *, wait_s: float | None = None) -> None:
        # Resolved once: the path of the store may have links, but nothing below it may be one.
        try:
            self.root = Path(root).expanduser().resolve()
            # In this order, because another process may make it just now.
            is_folder = not os.path.lexists(self.root) or self.root.is_dir()
        # A loop of links, an unknown ~user, a NUL.
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"can't open the store {root}: {error}", path=str(root)) from error
        if not is_folder:
            raise StorageError(f"the store {self.root} is not a folder", path=str(self.root))
        self.address = str(self.root)
        self.blobs = BlobFolder(self.root / "blobs")
        self.manifests = ManifestFolder(self.root / "manifests")
        self.newer = NewerManifests(self.root / "manifests-v2", self.blobs)
        self._private = self.root / PRIVATE
        self.copies = ManifestCopies(self._private / "copies")
        self.shares = ShareNotes(self._private / "cache" / "shares")
        self.summaries = SummaryCache(self._private / "cache" / "summaries", self.root)
        self.trash = Trash(self._private / "trash", self.blobs.path, self.copies)
        self._lock = StoreLock(self._private / "lock", wait_s)
        self._names = StoreLock(self._private / "names", _NAMES_WAIT_S)
        self.signatures = SignatureFolder(self._private / "signatures", self._lock)

    @property
    def is_remote(self) -> bool:
        """True if the store's lock is on a network file system. Raises: StorageError."""
        with os_errors("access", self._private):
            return is_remote(self._private)

    def require(self) -> None:
        """Raise NotFoundError if the store's folder does not exist, or is not that of a store.

        Raises: StorageError if it can't be listed.
        """
        message = f"there is no store at {self.root}"
        hint = "Is the path right, and the disk mounted? An import makes a new store."
        with os_errors("list", self.root):
            if not self.root.exists():
                raise MissingFileError(message, path=str(self.root), hint=hint)
            names = {path.name for path in self.root.iterdir()}
        if not names or names & _FOLDERS:
            return
        if os.path.exists(self.root / "models" / "manifests"):  # noqa: PTH110  # False for errors
            hint = f"Did you mean {self.root / 'models'}?"
        message += ": the folder contains neither blobs nor manifests"
        raise NotFoundError(message, path=str(self.root), hint=hint)

    @contextmanager
    def session(
        self,
        source: str = "",
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one folder
    ) -> Iterator[LocalSession]:
        """See `Home`. ``source`` selects the journal; the store's lock is held shared meanwhile.

        After a KeyboardInterrupt finished blobs are kept, for the next import of the source.
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
        """Yield every model by name, sorted, with its manifest or the error of reading it."""
        for name in self.manifests.names():
            try:
                yield name, self.manifests.read(name)
            except BlobStoreError as error:
                yield name, error.kept()

    def find(self, name: str | ModelName) -> ModelName:
        """See `Home`. Case matters only between models whose names differ in nothing else.

        Raises: InvalidNameError; NotFoundError; AmbiguousNameError if the store has several
        spellings, but not this one; StorageError.
        """
        found = self.manifests.spelled(ModelName.of(name))
        if not self.manifests.has(found):
            hint = "A newer Ollama has it, in manifests-v2/, which is not read here."
            raise self.manifests.missing(found, hint if self.newer.has(found) else None)
        return found

    def target(self, name: str | ModelName) -> ModelName:
        """See `Home`: the store's spelling of the name, or of the folders on its path.

        If a newer Ollama has a model of the name, or may have, that is logged as a warning: a write
        loses nothing. Raises: InvalidNameError; AmbiguousNameError; StorageError.
        """
        found = self.manifests.spelled(ModelName.of(name))
        try:
            if self.newer.has(found):
                message = (
                    "a newer Ollama has its own %s, in manifests-v2/, and will not read this one"
                )
                _log.warning(message, found)
        except StorageError as error:
            _log.warning("a newer Ollama may have its own %s: %s", found, error)
        return found

    def manifest(self, name: str | ModelName) -> Manifest:
        """Return a model's manifest.

        Raises: NotFoundError; DocumentError if it is damaged; StorageError.
        """
        return self.manifests.read(ModelName.of(name))

    def copy(self, source: str | ModelName, target: str | ModelName) -> ModelName:
        """Give a model a second name, and return it as the store spells it; no blob is copied.

        An older model of that name is replaced. Raises: NotFoundError if the model or one of its
        blobs is missing; UsageError if both names differ only in case; AmbiguousNameError;
        CorruptDataError; StorageError.
        """
        old, new = self._pair(source, target)
        manifest = self.manifest(old)
        with self.session() as session:
            session.publish(new, manifest)
        return new

    def move(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool = False
    ) -> ModelName:
        """Rename a model, and return its new name as the store spells it.

        The new name is durable before the old one is removed. A crash in between leaves both, and
        the same call completes it; so does an old manifest that can't be read any more. Raises: as
        `copy`; UsageError if another model has the name, unless ``replace``; StorageError.
        """
        old, new = self._pair(source, target)
        manifest = self.manifest(old)
        if old == new:
            return new
        with self.session() as session:
            publish_moved(session, new, manifest, replace=replace)
            # Another process may have removed the old name meanwhile, or given it to another model,
            # which is not ours to remove.
            with self._names.exclusive(), suppress(NotFoundError):
                if self.manifests.read_bytes(old) == manifest.raw:
                    self.manifests.remove(old)
                    self.copies.remove(old)
        with suppress(BusyError), self.alone(wait_s=0):
            self.manifests.remove_empty_folders(old)
        return new

    def _pair(
        self, source: str | ModelName, target: str | ModelName
    ) -> tuple[ModelName, ModelName]:
        """Return an old and a new name as the store spells them.

        Raises: UsageError if they differ only in case.
        """
        source, target = ModelName.of(source), ModelName.of(target)
        old, new = self.find(source), self.target(target)
        if old == new and source.path_parts != target.path_parts:
            message = f"{target} is {old}: names that differ only in case are one model"
            hint = "To change the case, move it to another name first."
            raise UsageError(message, model=str(old), hint=hint)
        return old, new

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model: its manifest first, then those of its blobs that no other model needs.

        The blobs are kept if another process uses the store (an import may be about to use them) or
        if any manifest can't be read (it may need them). The model is removed in any case. Raises:
        NotFoundError; AmbiguousNameError.
        """
        name = self.find(name)
        with self._lock.shared(), self._names.exclusive():
            manifest = None  # one that can't be read can still be removed
            with suppress(CorruptDataError, LimitExceededError, StorageError):
                manifest = self.manifest(name)
            self.manifests.remove(name)
            self.copies.remove(name)
        try:
            with self.alone():
                self.manifests.remove_empty_folders(name)
                return Removal(()) if manifest is None else self._remove_unreferenced(manifest)
        except BusyError as error:
            return Removal((), () if manifest is None else manifest.descriptors, error.message)

    def _remove_unreferenced(self, manifest: Manifest) -> Removal:
        candidates = manifest.descriptors
        references = self.references()
        if (obstacle := references.obstacle) is not None:
            return Removal((), candidates, obstacle.message)
        needed = references.needed()
        orphans = {blob.digest: blob for blob in candidates if blob.digest.hex not in needed}
        try:
            copied = self.copied(references.names)
            if manifest.digest.hex not in self.digests_of(references, copied):
                self.signatures.remove(manifest.digest)
            named = self.blobs.listing().named.keys() if copied.missing else set()
            lost = copied.lost(named - needed - {digest.hex for digest in orphans})
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
        reason = f"{name} may need them: its manifest is gone, but blobs that only it needs exist"
        return Removal(removed, kept, reason)

    def copied(self, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the models with copies of their manifests: those of ``names``, and missing ones.

        Raises: StorageError.
        """
        return CopiedModels.read(self.copies, names)

    def digests_of(self, references: References, copied: CopiedModels) -> set[str]:
        """Return the hex digits of the manifests that models have, and of missing models' copies.

        Manifests that can't be read are left out: they are an obstacle to any removal.
        """
        copies = (raw for model in copied.missing for raw in self.copies.of(model.name))
        return {Digest.of(raw).hex for raw in copies} | {key.hex() for key in references.parsed}

    def alone(self, wait_s: float = 1) -> AbstractContextManager[None]:
        """Hold the store's lock alone: no import, copy or removal runs, and no model is opened.

        Raises: BusyError, which names the holders, after ``wait_s`` seconds; StorageError.
        """
        return self._lock.exclusive(wait_s)

    def lease(self) -> AbstractContextManager[bool]:
        """See `Home`: False if locking would need a write.

        That is so in a store that blobstore has not written to yet, or that is read-only. Then a
        reader that misses a blob checks whether the manifest is still the one that named it.
        """
        return self._lock.reading()

    def references(self, known: References | None = None) -> References:
        """Return which blobs the manifests name; manifests that ``known`` has are not parsed again.

        Raises: StorageError if the folders can't be listed.
        """
        raw, strays = self._manifest_bytes(), self.manifests.strays()
        return References.read(raw, strays, self.newer.needs(), known)

    def _manifest_bytes(self) -> Iterator[tuple[ModelName, bytes | BlobStoreError]]:
        for name in self.manifests.names():
            try:
                yield name, self.manifests.text(name)
            except NotFoundError:
                continue  # it was removed after the names were read
            except BlobStoreError as error:
                yield name, error.kept()

    def leftovers(self, kept_s: float, is_there: Callable[[Digest], bool]) -> list[Leftover]:
        """Return the remains of killed imports, and the journals that are of no use.

        ``kept_s``: how long finished blobs of a killed import are kept for the next one.
        ``is_there``: whether the store has a blob of that digest. Raises: StorageError.
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

    Nothing is created yet. ``wait_s``: how many seconds a change of the store waits for another
    process that uses it (None: 10 for an import or a copy, 1 for the removal of blobs). Raises:
    StorageError unless the path is that of a folder, or of nothing.
    """
    return Store(Path.home() / ".ollama" / "models" if root is None else root, wait_s=wait_s)
