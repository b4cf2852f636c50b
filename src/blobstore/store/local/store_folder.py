"""The parts of a store in a folder, and what follows from them. `Store` (store.py) is the home."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    MissingFileError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.durable import is_remote, os_errors
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.local.backups import (
    CopiedModels,
    ManifestCopies,
    MissingModel,
    SignatureFolder,
    Trash,
)
from blobstore.store.local.blobs import BlobFolder, BlobListing
from blobstore.store.local.hints import (
    HintFile,
    ResultFolder,
    ShareHints,
    SummaryHints,
)
from blobstore.store.local.kept import KeptBlobs, remove_leftover
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import DEPTH, ManifestFolder, NewerManifests
from blobstore.store.local.packed import PackedModels
from blobstore.store.ports import BlobState, Care, Leftover, OddFile, Readable, Removal
from blobstore.store.references import References

_NAMED = 5
_SEVERAL = 2
_PARTIAL = re.compile(r"sha256-[0-9a-f]{64}(-partial(-[0-9]+)?|\.tmp)", re.ASCII)
"""Parts of pulls: ``.tmp`` as in ollama@0ec682f6 x/transfer/download.go:save."""
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_AMBIGUOUS = (
    "another beside it differs only in case, and Ollama takes one for the other:"
    " move one to another name"
)
_LOST = (
    "the manifest of its model is gone, and blobs that only it needed are there:"
    " repair brings it back, until prune"
)


class FolderCare(Care):
    """The care of a store in a folder: it has a trash, a lock and odd files. See `Care`.

    An unmounted disk, bind mount or volume is an empty folder, and must not be taken for removed
    models. Each model that was committed here left a copy of its manifest, so the lost models
    (backups.py) are known. A clean-up refuses if, in the whole store or below one host's folder,

    - the store has no manifests, and at least one model is lost; or
    - at least two models are lost, and more are lost than models with copies have a manifest;

    and if the whole store has no manifest and blobs would be removed. The copies of the manifests
    of missing models are moved to the trash with the last of their blobs.
    """

    can_prune = True
    has_trash = True
    grace = (
        "a grace time under 1 h may take the blobs of a model that Ollama is creating",
        "If no Ollama and no other machine uses the store, say so: `sole_owner=True`.",
    )

    def __init__(self, store: StoreFolder) -> None:
        super().__init__(store)
        self._store = store
        self._listing = BlobListing({}, ())
        self._copied = CopiedModels((), ())

    def require(self) -> None:
        self._store.require()

    def listed(self) -> AbstractSet[str]:
        """See `Care`: also links and folders in ``blobs/``."""
        self._listing = self._store.blobs.listing()
        return self._listing.named.keys()

    def digests(self) -> AbstractSet[str]:
        self.listed()
        named = self._listing.named.items()
        return {digest for digest, entry in named if entry.is_file(follow_symlinks=False)}

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        return self._store.blobs.reader(Digest(digest))

    def is_missing(self, digest: str) -> bool:
        return self._store.blobs.is_missing(digest)

    def copies(self, name: ModelName) -> Sequence[bytes]:
        return self._store.copies.of(name)

    @property
    def blobs_place(self) -> str:
        return str(self._store.blobs.path)

    def place(self, digest: str) -> Path:
        return self._store.blobs.path / Digest(digest).file_name

    def states(self, digests: Iterable[str]) -> Mapping[str, BlobState]:
        """See `Care`: of the regular files in the last list."""
        states = {}
        for digest in self._listing.named.keys() & digests:
            entry = self._listing.named[digest]
            # A blob may have been removed after the folder was listed.
            with suppress(NotFoundError), os_errors("access", entry.path):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    states[digest] = BlobState(status.st_size, status.st_mtime, Path(entry.path))
        return states

    def oddities(self) -> Iterator[OddFile]:
        """See `Care`: blobs first."""
        store = self._store
        # A file may have been removed after its folder was listed.
        for entry in self._listing.others:
            with suppress(NotFoundError), os_errors("access", entry.path):
                yield OddFile(Path(entry.path), _odd_blob(entry))
        for path in store.manifests.everything():
            with suppress(NotFoundError), os_errors("access", path):
                if (reason := _odd_manifest(store.manifests, path)) is not None:
                    yield OddFile(path, reason)
        for path, needs in store.newer.needs():
            if isinstance(needs, BlobStoreError):
                yield OddFile(path, f"no blob is removed: {needs.message}")
        yield from _ambiguous_names(store.manifests)
        yield from _lost_models(store, self._listing)
        private = store.root / ".blobstore"
        for folder in (store.root, store.blobs.path, store.manifests.path, private):
            with os_errors("access", folder):
                mode = folder.stat().st_mode if folder.is_dir() else 0
                if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                    yield OddFile(folder, "every user may put files into it")
        for _, entry in sorted(self._listing.named.items()):
            with suppress(OSError):  # it was removed
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and (reason := _odd_mode(status)) is not None:
                    yield OddFile(Path(entry.path), reason)

    def references(self, known: References | None = None) -> References:
        return self._store.references(known)

    def trash_nbytes(self) -> int:
        return self._store.trash.nbytes()

    @property
    def exists(self) -> bool:
        """See `Care`: the lock would make a folder."""
        return os.path.exists(self._store.root)  # noqa: PTH110  # False for errors

    @contextmanager
    def alone(self, wait_s: float, *, sole_owner: bool) -> Iterator[None]:
        store = self._store
        with store.alone(wait_s):
            if not sole_owner and store.is_remote:
                message = (
                    "is on a network file system, where locks of other machines may be invisible"
                )
                hint = "If no other machine and no Ollama uses it now, say so: `sole_owner=True`."
                raise StorageError(f"{store.root} {message}", path=str(store.root), hint=hint)
            yield

    def obstacle(
        self, references: References, unneeded: AbstractSet[str], removed: int, *, forget: bool
    ) -> BlobStoreError | None:
        self._copied = self._store.copied(references.names)
        if forget:
            return None
        lost = self._copied.lost(unneeded)
        return _without_manifests(self._store, references, self._copied.there, lost, removed)

    def rest(
        self,
        references: References,
        spared: AbstractSet[str],
        grace_s: float,
    ) -> tuple[Sequence[Leftover], Sequence[ModelName]]:
        store = self._store
        manifests = store.digests_of(references, self._copied)
        leftovers = store.leftovers(grace_s)
        missing = self._copied.missing
        return (
            [*leftovers, *store.signatures.unneeded(manifests, grace_s)],
            [model.name for model in missing if spared.isdisjoint(model.needs)],
        )

    def remove(
        self,
        blobs: Sequence[Path],
        leftovers: Sequence[Leftover],
        forgotten: Sequence[ModelName],
        references: References,
    ) -> int:
        """See `Care`: blobs are moved to the trash, with the copies of forgotten models."""
        store = self._store
        manifests = store.digests_of(references, self._copied)
        freed = store.trash.empty()
        store.trash.take(blobs, forgotten)
        for leftover in leftovers:
            remove_leftover(leftover)
        store.manifests.remove_all_empty_folders()
        store.packed.manifests.remove_all_empty_folders()
        known = {key.hex() for key in references.parsed}
        store.summaries.keep(known | store.packed.ids())
        store.results.keep_only(manifests)
        store.forget_made()
        return freed

    def undo(
        self, wait_s: float
    ) -> tuple[list[tuple[Digest, int]], list[tuple[Digest, int]], list[ModelName]]:
        store = self._store
        empty = NotFoundError(f"the trash of {store.root} is empty", path=str(store.root))
        if not self.exists:
            raise empty
        with store.alone(wait_s):
            contents, models = store.trash.contents(), store.trash.models()
            if not contents and not models:
                raise empty
            is_back = [store.trash.restore(blob) for blob in contents]
            store.trash.restore_copies()
            store.trash.settle()
            without = [name for name in models if _lacks_only_its_manifest(store, name)]
        pairs = [(blob.digest, blob.size) for blob in contents]
        restored = [pair for pair, back in zip(pairs, is_back, strict=True) if back]
        kept = [pair for pair, back in zip(pairs, is_back, strict=True) if not back]
        return restored, kept, without


def _lacks_only_its_manifest(store: StoreFolder, name: ModelName) -> bool:
    """Return True if all blobs exist that a model's copies name, and its manifest does not."""
    needs = store.copies.needs(name)
    is_whole = bool(needs) and store.blobs.sizes(needs).keys() == needs
    return is_whole and not os.path.lexists(store.manifests.path.joinpath(*name.path_parts))


def _without_manifests(
    store: StoreFolder,
    references: References,
    there: Sequence[ModelName],
    lost: Sequence[MissingModel],
    removed: int,
) -> StorageError | None:
    """Return the refusal of a store that has lost too many manifests, else None.

    ``there``: the models with copies and a manifest; ``removed``: how many blobs would be removed.
    """
    # Either the folder of all hosts (None) or that of one may be an unmounted disk.
    for host in (None, *sorted({model.name.host for model in lost})) if lost else ():
        found = [name for name in references.models if host in (None, name.host)]
        is_empty = not found and (host is not None or not references.newer)
        remaining = sum(host in (None, name.host) for name in there)
        gone = [model.name for model in lost if host in (None, model.name.host)]
        if is_empty or (len(gone) >= _SEVERAL and len(gone) > remaining):
            return _refusal(store.manifests.path / (host or ""), _too_many(gone, remaining))
    if removed and not references.models and not references.newer:
        message = f"no model has a manifest, and {removed:,} blobs would be removed"
        return _refusal(store.manifests.path, message)
    return None


def _too_many(lost: Sequence[ModelName], remaining: int) -> str:
    if len(lost) + remaining == 1:
        subject = "the only model that was stored here has"
    else:
        verb = "has" if len(lost) == 1 else "have"
        known = len(lost) + remaining
        subject = f"{len(lost):,} of the {known:,} models that were stored here {verb}"
    more = f" and {len(lost) - _NAMED:,} more" if len(lost) > _NAMED else ""
    return f"{subject} no manifest: {', '.join(map(str, lost[:_NAMED]))}{more}"


def _refusal(place: Path, message: str) -> StorageError:
    hint = (
        f"Is the disk of {place} mounted? blobstore repair NAME restores a deleted manifest. "
        "To give up these models, prune with `forget=True`."
    )
    return StorageError(f"{place}: {message}", path=str(place), hint=hint)


def _ambiguous_names(manifests: ManifestFolder) -> Iterator[OddFile]:
    """Yield manifests, and folders of them, that differ from another beside them only in case."""
    spellings: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for name in manifests.names():
        for depth, part in enumerate(name.path_parts):
            above = name.path_parts[:depth]
            spellings[*above, part.lower()].add((*above, part))
    for _, several in sorted(spellings.items()):
        for parts in sorted(several) if len(several) > 1 else ():
            yield OddFile(manifests.path.joinpath(*parts), _AMBIGUOUS)


def _lost_models(store: StoreFolder, listing: BlobListing) -> Iterator[OddFile]:
    """Yield the copies of lost models (store/local/backups.py), if they can be listed."""
    with suppress(StorageError):
        copied = store.copied(set(store.manifests.names()))
        unneeded = listing.named.keys() - store.references().needed() if copied.missing else set()
        for model in copied.lost(unneeded):
            parts = model.name.path_parts
            if not os.path.lexists(store.manifests.path.joinpath(*parts)):
                yield OddFile(store.root.joinpath(".blobstore", "copies", *parts), _LOST)


def _odd_mode(status: os.stat_result) -> str | None:
    """Return why the mode of a blob or manifest is odd, or None."""
    return "every user may write to it" if status.st_mode & stat.S_IWOTH else None


def _odd_blob(entry: os.DirEntry[str]) -> str:
    if _PARTIAL.fullmatch(entry.name):
        return "Ollama is pulling it, or did not finish"
    kind = _kind(entry.stat(follow_symlinks=False).st_mode)
    return "its name is not a blob's" if kind is None else f"it is {kind}"


def _odd_manifest(manifests: ManifestFolder, path: Path) -> str | None:
    status = path.lstat()
    depth = len(path.relative_to(manifests.path).parts)
    kind = _kind(status.st_mode)
    if kind is not None and depth <= DEPTH:
        return f"it is {kind}"
    if depth != DEPTH:
        return f"it lies {depth} levels deep, and manifests lie {DEPTH}"
    if manifests.name_of(path) is None:
        return "its path is not a model's name, but it may be a manifest"
    return _odd_mode(status)


def _kind(mode: int) -> str | None:
    return next((text for is_kind, text in _KINDS if is_kind(mode)), None)


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
        """Return the hex digits of the manifests of all models: packed and missing ones, too."""
        missing = [model.name for model in copied.missing]
        known = {Digest.of(raw).hex for name in missing for raw in self.copies.of(name)}
        return known | self.packed.ids() | {key.hex() for key in references.parsed}

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
        """Return our own files that are of no use: of killed imports, and packed files.

        ``grace_s``: as in `KeptBlobs.stale`. Raises: StorageError; CorruptDataError for the
        manifest of a packed model.
        """
        packed = self.models() if self.packed.names() else ()
        whole = [name for name, manifest in packed if isinstance(manifest, Manifest)]
        return [*self.kept.stale(grace_s), *self.packed.leftovers(whole)]


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
