"""The parts of a store in a folder, and its care. `Store` (store.py) is the home."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    MissingFileError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import Descriptor
from blobstore.io.durable import is_remote, os_errors
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName, shortened
from blobstore.store.hints import HintFile, ResultFolder, ShareHints, SummaryHints
from blobstore.store.local.backups import (
    CopiedModels,
    ManifestCopies,
    SignatureFolder,
    Trash,
)
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.locks import KeptBlobs, StoreLock, remove_leftover
from blobstore.store.local.manifests import DEPTH, ManifestFolder, NewerManifests
from blobstore.store.local.packed import PackedModels
from blobstore.store.ports import (
    BlobState,
    Care,
    Leftover,
    OddFile,
    Readable,
    Removal,
    blob_not_found,
)
from blobstore.store.references import References

PRIVATE = ".blobstore"
_FOLDERS = {"blobs", "manifests", "manifests-v2", PRIVATE}
# The lock of names covers only the sync of one folder, which may take long on a busy disk.
_NAMES_WAIT_S = 60


class StoreFolder(Readable):
    """The parts of a store: blobs, manifests, and our own files in ``.blobstore/``."""

    def __init__(self, root: str | os.PathLike[str], *, wait_s: float | None = None) -> None:
        # Resolved once: the path of the store may have links, but nothing below it may be one.
        try:
            self.root: Path = Path(root).expanduser().resolve()
            # In this order, because another process may make it just now.
            is_folder = not os.path.lexists(self.root) or self.root.is_dir()
        # A loop of links, an unknown ~user, a NUL.
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"can't open the store {root}: {error}", path=str(root)) from error
        if not is_folder:
            raise StorageError(f"the store {self.root} is not a folder", path=str(self.root))
        self.address = str(self.root)
        self._wait_s = wait_s
        self.blobs: BlobFolder = BlobFolder(self.root / "blobs")
        self.manifests: ManifestFolder = ManifestFolder(self.root / "manifests")
        self.newer: NewerManifests = NewerManifests(self.root / "manifests-v2", self.blobs)
        private = self.root / PRIVATE
        self.copies = ManifestCopies(private / "copies")
        hints = private / "hints"
        self.made = HintFile(hints / "journal")
        self.shares: ShareHints = ShareHints(HintFile(hints / "shares"))
        self.summaries: SummaryHints = SummaryHints(HintFile(hints / "summaries", self.root))
        self.trash = Trash(private / "trash", self.blobs.path)
        self.packed: PackedModels = PackedModels(private / "packed", self.lease, self.summaries)
        self.kept = KeptBlobs(private)
        self._lock = StoreLock(private / "lock", wait_s)
        self._packing = StoreLock(private / "packing", wait_s)
        self.names_lock = StoreLock(private / "names", _NAMES_WAIT_S)
        self.signatures: SignatureFolder = SignatureFolder(private / "signatures", self._lock)
        self.results: ResultFolder = ResultFolder(private / "results", self.root)

    def require(self) -> None:
        """Raise NotFoundError if the store's folder does not exist, or is not a store.

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

    def lease(self) -> AbstractContextManager[bool]:
        """See `Home`: False if locking would need a write.

        That is so in a store that blobstore has not written to yet, or that is read-only. Then a
        reader that misses a blob checks whether the manifest is still the one that named it.
        """
        return self._lock.reading()

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

    def copied_models(self, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the models with copies of their manifests: those of ``names``, and missing ones.

        A packed model is not missing. Raises: StorageError.
        """
        return CopiedModels.read(self.copies, {*names, *self.packed.manifests.names()})

    def remove_unreferenced(self, candidates: tuple[Descriptor, ...]) -> Removal:
        """Remove those of ``candidates`` that neither a manifest nor a lost model needs.

        Only for a holder of the store's exclusive lock. Raises: StorageError.
        """
        references = self.references()
        if (obstacle := references.obstacle) is not None:
            return Removal((), candidates, obstacle.message)
        needed = references.needed()
        orphans = {blob.digest: blob for blob in candidates if blob.digest.hex not in needed}
        try:
            copied = self.copied_models(references.names)
            there = self.blobs.digests() if copied.missing else set()
            lost = copied.find_lost(there - needed - {digest.hex for digest in orphans})
        except StorageError as error:
            return Removal((), candidates, error.message)
        saved = {digest: name for name in lost for digest in copied.missing[name]}
        kept = tuple(blob for digest, blob in orphans.items() if digest.hex in saved)
        removed = tuple(
            blob
            for digest, blob in orphans.items()
            if digest.hex not in saved and self.blobs.remove(digest)
        )
        if not kept:
            return Removal(removed)
        name = saved[kept[0].digest.hex]
        reason = f"{name} may need them: its manifest is gone, but blobs that only it needs exist"
        return Removal(removed, kept, reason)


_NAMED = 5
_SEVERAL = 2
# Parts of pulls: ``.tmp`` as in ollama@0ec682f6 x/transfer/download.go:save.
_PARTIAL = re.compile(r"sha256-[0-9a-f]{64}(-partial(-[0-9]+)?|\.tmp)", re.ASCII)
# By the first letter of a mode, as ls shows it; the others are files.
_KINDS = {
    "l": "a symbolic link",
    "d": "a folder",
    "p": "a FIFO",
    "s": "a socket",
    "c": "a device",
    "b": "a device",
}
_LOST = (
    "the manifest of its model is missing, but its blobs exist:"
    " repair restores it until prune removes them"
)


class FolderCare(Care):
    """The care of a store in a folder: it has a trash, a lock and odd files. See `Care`.

    An unmounted disk, bind mount or volume is an empty folder, and must not be taken for removed
    models. Each model that was committed here left a copy of its manifest, so the lost models
    (backups.py) are known. A clean-up refuses if, in the whole store or below one host's folder,

    - the store has no manifests, and at least one model is lost; or
    - at least two models are lost, and more are lost than models with copies have a manifest;

    and if the whole store has no manifest and blobs would be removed.
    """

    can_prune = True
    grace = (
        "a grace time under 1 h may take the blobs of a model that Ollama is creating",
        "If neither Ollama nor another machine uses the store, confirm it: `sole_owner=True`.",
    )
    refusal_hint = (
        "Is the disk of {} mounted? blobstore repair NAME restores a deleted manifest. "
        "To give up these models, prune with `forget=True`."
    )

    def __init__(self, store: StoreFolder) -> None:
        super().__init__(store)
        self.blobs_place, self.manifests_place = str(store.blobs.path), str(store.manifests.path)
        # The lock would make a folder.
        self.exists = os.path.exists(store.root)  # noqa: PTH110  # False for errors
        self._store = store
        self._copied = CopiedModels((), {})

    def require(self) -> None:
        self._store.require()

    def digests_in_folder(self) -> AbstractSet[str]:
        # Also links and folders in ``blobs/``.
        return self._store.blobs.listing().named.keys()

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        if self._store.blobs.is_missing(digest):  # a hundred thousand may be
            raise blob_not_found(Digest(digest))
        return self._store.blobs.reader(Digest(digest))

    def copies(self, name: ModelName) -> Sequence[bytes]:
        return self._store.copies.of(name)

    def place(self, digest: str) -> Path:
        return self._store.blobs.path / Digest(digest).file_name

    def states(self, digests: Iterable[str]) -> Mapping[str, BlobState]:
        return self._store.blobs.states(digests)

    def oddities(self) -> Iterator[OddFile]:
        store, listing = self._store, self._store.blobs.listing()
        # A file may have been removed after its folder was listed.
        for entry in listing.others:
            with suppress(NotFoundError), os_errors("access", entry.path):
                yield OddFile(Path(entry.path), _odd_blob(entry))
        for path in store.manifests.walk():
            with suppress(NotFoundError), os_errors("access", path):
                if (reason := _odd_manifest(store.manifests, path)) is not None:
                    yield OddFile(path, reason)
        for path, needs in store.newer.needs():
            if isinstance(needs, BlobStoreError):
                yield OddFile(path, f"no blob is removed: {needs.message}")
        yield from _lost_models(store, listing.named.keys())
        folders = (store.root, store.blobs.path, store.manifests.path, store.root / PRIVATE)
        named = sorted(listing.named.items())
        # Of a link, the mode would be that of another file.
        blobs = (Path(entry.path) for _, entry in named if entry.is_file(follow_symlinks=False))
        for path in (*folders, *blobs):
            with suppress(OSError):  # it does not exist
                if (reason := _odd_mode(path)) is not None:
                    yield OddFile(path, reason)

    def references(self, known: References | None = None) -> References:
        return self._store.references(known)

    def trash_nbytes(self) -> int:
        return self._store.trash.nbytes()

    @contextmanager
    def alone(self, wait_s: float, *, sole_owner: bool) -> Iterator[None]:
        root = self._store.root
        with self._store.alone(wait_s):
            with os_errors("access", root):
                is_shared = is_remote(root / PRIVATE)
            if is_shared and not sole_owner:
                message = (
                    "is on a network file system, where locks of other machines may be invisible"
                )
                hint = "If neither Ollama nor another host uses it, confirm it: `sole_owner=True`."
                raise StorageError(f"{root} {message}", path=str(root), hint=hint)
            yield

    def obstacle(
        self, references: References, unneeded: AbstractSet[str], removed: int, *, forget: bool
    ) -> BlobStoreError | None:
        self._copied = self._store.copied_models(references.names)
        lost = [] if forget else self._copied.find_lost(unneeded)
        # Either the folder of all hosts (None) or that of one may be an unmounted disk.
        for host in (None, *sorted({name.host for name in lost})) if lost else ():
            models = [name for name in references.models if host in (None, name.host)]
            is_empty = not models and (host is not None or not references.newer)
            remaining = sum(host in (None, name.host) for name in self._copied.there)
            gone = [str(name) for name in lost if host in (None, name.host)]
            if is_empty or (len(gone) >= _SEVERAL and len(gone) > remaining):
                subject = (
                    f"{len(gone):,} of the {len(gone) + remaining:,} models that were stored here"
                )
                message = f"{subject} have no manifest: {shortened(gone, _NAMED)}"
                place = self._store.manifests.path / (host or "")
                return self.refusal(str(place), message)
        return super().obstacle(references, unneeded, removed, forget=forget)

    def rest(
        self,
        references: References,
        spared: AbstractSet[str],
        grace_s: float,
    ) -> tuple[Sequence[Leftover], Sequence[ModelName]]:
        store = self._store
        leftovers = (
            *store.kept.stale(grace_s),
            *store.packed.leftovers(references.models),
            *store.signatures.find_unneeded(self._manifests(references), grace_s),
        )
        missing = self._copied.missing.items()
        return leftovers, [name for name, needs in missing if spared.isdisjoint(needs)]

    def _manifests(self, references: References) -> set[str]:
        """Return the sha256 of the manifests of all models: packed and missing ones, too."""
        plain = {key.hex() for key in references.parsed}
        return plain | self._store.packed.ids() | self._store.copies.digests()

    def remove(
        self,
        blobs: Sequence[Path],
        leftovers: Sequence[Leftover],
        forgotten: Sequence[ModelName],
        references: References,
    ) -> int:
        store = self._store
        manifests = self._manifests(references)
        freed = store.trash.empty()
        store.trash.take(blobs)
        taken = {Digest.from_file_name(path.name.replace(":", "-")) for path in blobs}
        digests = {digest.hex for digest in taken if digest is not None}
        for name in forgotten:
            if digests.isdisjoint(self._copied.missing[name]):
                store.copies.remove(name)  # else an undo needs them
        for leftover in leftovers:
            remove_leftover(leftover)
        store.manifests.remove_all_empty_folders()
        store.packed.manifests.remove_all_empty_folders()
        store.summaries.keep(manifests)
        store.results.keep_only(manifests)
        there = {*store.blobs.digests(), *store.kept.digests()}
        store.made.keep(lambda _key, text: text.partition(" ")[0] in there)
        return freed

    def undo(
        self, wait_s: float
    ) -> tuple[list[tuple[Digest, int]], list[tuple[Digest, int]], list[ModelName]]:
        store = self._store
        empty = NotFoundError(f"the trash of {store.root} is empty", path=str(store.root))
        if not self.exists:
            raise empty
        with store.alone(wait_s):
            contents = store.trash.contents()
            if not contents:
                raise empty
            restored: list[tuple[Digest, int]] = []
            kept: list[tuple[Digest, int]] = []
            for blob in contents:
                (restored if store.trash.restore(blob) else kept).append((blob.digest, blob.size))
            store.trash.settle()
            missing = store.copied_models(set(store.manifests.names())).missing
        without = [
            name
            for name, needs in missing.items()
            if needs and not any(map(store.blobs.is_missing, needs))
        ]
        return restored, kept, without


def _lost_models(store: StoreFolder, blobs: AbstractSet[str]) -> Iterator[OddFile]:
    """Yield the copies of lost models (backups.py), if they can be listed."""
    with suppress(StorageError):
        copied = store.copied_models(set(store.manifests.names()))
        unneeded = blobs - store.references().needed() if copied.missing else set()
        for name in copied.find_lost(unneeded):
            parts = name.path_parts
            if not os.path.lexists(store.manifests.path.joinpath(*parts)):
                yield OddFile(store.root.joinpath(PRIVATE, "copies", *parts), _LOST)


def _odd_mode(path: Path) -> str | None:
    """Return why the mode of a file or folder is odd, or None. Raises: OSError."""
    mode = path.stat().st_mode
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return None
    is_folder = stat.S_ISDIR(mode)
    return "every user may put files into it" if is_folder else "every user may write to it"


def _odd_blob(entry: os.DirEntry[str]) -> str:
    if _PARTIAL.fullmatch(entry.name):
        return "a pull by Ollama, running or unfinished"
    kind = _kind(entry.stat(follow_symlinks=False).st_mode)
    return "its name is not a blob's" if kind is None else f"it is {kind}"


def _odd_manifest(manifests: ManifestFolder, path: Path) -> str | None:
    depth = len(path.relative_to(manifests.path).parts)
    kind = _kind(path.lstat().st_mode)
    if kind is not None and depth <= DEPTH:
        return f"it is {kind}"
    if depth != DEPTH:
        return f"it is {depth} levels deep, and manifests are {DEPTH}"
    if manifests.name_of(path) is None:
        return "its path is not a model's name, but it may be a manifest"
    return _odd_mode(path)


def _kind(mode: int) -> str | None:
    return _KINDS.get(stat.filemode(mode)[0])
