"""The parts of a store in a folder, and what follows from them. `Store` (store.py) is the home."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    MissingFileError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.durable import is_remote, os_errors
from blobstore.names import Digest, ModelName
from blobstore.store.local.backups import CopiedModels, ManifestCopies, Trash
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.hints import (
    HintFile,
    ResultFolder,
    ShareHints,
    SummaryHints,
    unused_notes,
)
from blobstore.store.local.kept import KeptBlobs
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.newer import NewerManifests
from blobstore.store.local.packed import PackedModels
from blobstore.store.local.signature_folder import SignatureFolder
from blobstore.store.ports import Leftover, Readable, Removal
from blobstore.store.references import References

PRIVATE = ".blobstore"
_FOLDERS = {"blobs", "manifests", "manifests-v2", PRIVATE}
_NAMES_WAIT_S = 60
"""The lock of names is held only for a sync of one folder, which may take long on a busy disk."""


class StoreFolder(Readable):
    """The parts of a store: blobs, manifests, and our own files in ``.blobstore/``."""

    root: Path
    blobs: BlobFolder
    manifests: ManifestFolder
    packed: PackedModels
    signatures: SignatureFolder
    summaries: SummaryHints
    results: ResultFolder
    shares: ShareHints
    newer: NewerManifests

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
        self._wait_s = wait_s
        self.blobs = BlobFolder(self.root / "blobs")
        self.manifests = ManifestFolder(self.root / "manifests")
        self.newer = NewerManifests(self.root / "manifests-v2", self.blobs)
        self._private = self.root / PRIVATE
        self.copies = ManifestCopies(self._private / "copies")
        hints = self._private / "hints"
        self.made = HintFile(hints / "journal")
        self.shares = ShareHints(HintFile(hints / "shares"))
        self.summaries = SummaryHints(HintFile(hints / "summaries", self.root))
        self.trash = Trash(self._private / "trash", self.blobs.path, self.copies)
        self.packed = PackedModels(self._private / "packed", self.lease, self.summaries)
        self.kept = KeptBlobs(self._private)
        self._lock = StoreLock(self._private / "lock", wait_s)
        self._packing = StoreLock(self._private / "packing", wait_s)
        self._names = StoreLock(self._private / "names", _NAMES_WAIT_S)
        self.signatures = SignatureFolder(self._private / "signatures", self._lock)
        self.results = ResultFolder(self._private / "results", self.root)

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
        if names and not names & _FOLDERS:
            if os.path.exists(self.root / "models" / "manifests"):  # noqa: PTH110  # no errors
                hint = f"Did you mean {self.root / 'models'}?"
            message += ": the folder contains neither blobs nor manifests"
            raise NotFoundError(message, path=str(self.root), hint=hint)

    def models(self) -> Iterator[tuple[ModelName, Manifest | BlobStoreError]]:
        """Yield every model by name, sorted, with its manifest or the error of reading it."""
        for name in self.manifests.names():
            try:
                yield name, self.manifests.read(name)
            except BlobStoreError as error:
                yield name, error.kept()

    def lease(self) -> AbstractContextManager[bool]:
        """See `Home`: False if locking would need a write.

        That is so in a store that blobstore has not written to yet, or that is read-only. Then a
        reader that misses a blob checks whether the manifest is still the one that named it.
        """
        return self._lock.reading()

    def copied(self, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the models with copies of their manifests: those of ``names``, and missing ones.

        A packed model is not missing. Raises: StorageError.
        """
        return CopiedModels.read(self.copies, {*names, *self.packed.names()})

    def digests_of(self, references: References, copied: CopiedModels) -> set[str]:
        """Return the hex digits of the manifests of models, packed ones too, and of missing ones.

        Manifests that can't be read are left out: they are an obstacle to removals.
        """
        missing = [model.name for model in copied.missing]
        known = {Digest.of(raw).hex for name in missing for raw in self.copies.of(name)}
        packed = manifest_digests(self.packed.names(), self.packed.manifests)
        return known | packed | {key.hex() for key in references.parsed}

    def alone(self, wait_s: float = 1) -> AbstractContextManager[None]:
        """Hold the store's lock alone: no import, copy or removal runs, and no model is opened.

        Raises: BusyError, which names the holders, after ``wait_s`` seconds; StorageError.
        """
        return self._lock.exclusive(wait_s)

    def references(self, known: References | None = None) -> References:
        """Return which blobs the manifests name; manifests that ``known`` has are not parsed again.

        Raises: StorageError if the folders can't be listed.
        """
        raw, strays = self.manifests.texts(), self.manifests.strays()
        return References.read(raw, strays, self.newer.needs(), known)

    def forget_made(self) -> None:
        """Remove from the journal what is gone. Only for a holder of the exclusive lock.

        Raises: StorageError.
        """
        there = {*self.blobs.digests(), *self.kept.digests()}
        self.made.keep(lambda _key, text: text.partition(" ")[0] in there)

    def leftovers(self, grace_s: float) -> list[Leftover]:
        """Return our own files that are of no use: of killed imports, notes, and packed files.

        ``grace_s``: as in `KeptBlobs.stale`. Raises: StorageError; CorruptDataError for the
        manifest of a packed model.
        """
        packed = self.models() if self.packed.names() else ()
        whole = [name for name, manifest in packed if isinstance(manifest, Manifest)]
        unused = (*self.kept.stale(grace_s), *unused_notes(self._private))
        return [*unused, *self.packed.leftovers(whole)]


def manifest_digests(names: Iterable[ModelName], *folders: ManifestFolder) -> set[str]:
    """Return the hex digits of the manifests that these names have, if they can be read."""
    found = set()
    for name in names:
        for manifests in folders:
            with suppress(StorageError):
                if (raw := manifests.raw(name)) is not None:
                    found.add(Digest.of(raw).hex)
    return found


def remove_unreferenced(
    candidates: tuple[Descriptor, ...],
    references: References,
    blobs: BlobFolder,
    copied: Callable[[AbstractSet[ModelName]], CopiedModels],
) -> Removal:
    """Remove those of ``candidates`` that no manifest names, except those that a lost model needs.

    ``copied`` returns the models with copies of their manifests. Only for a holder of the store's
    exclusive lock. Raises: StorageError.
    """
    if (obstacle := references.obstacle) is not None:
        return Removal((), candidates, obstacle.message)
    needed = references.needed()
    orphans = {blob.digest: blob for blob in candidates if blob.digest.hex not in needed}
    try:
        found = copied(references.names)
        named = blobs.listing().named.keys() if found.missing else set()
        lost = found.lost(named - needed - {digest.hex for digest in orphans})
    except StorageError as error:
        return Removal((), candidates, error.message)
    saved = {digest: model for model in lost for digest in model.needs}
    removed = tuple(
        blob for digest, blob in orphans.items() if digest.hex not in saved and blobs.remove(digest)
    )
    kept = tuple(blob for digest, blob in orphans.items() if digest.hex in saved)
    if not kept:
        return Removal(removed)
    name = saved[kept[0].digest.hex].name
    reason = f"{name} may need them: its manifest is gone, but blobs that only it needs exist"
    return Removal(removed, kept, reason)
