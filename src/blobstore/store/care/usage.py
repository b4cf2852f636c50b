"""Usage: the bytes of a store's blobs by model: unique to one, shared by several, or unneeded.

Of blobs that models need only the names are read: a stat of 600,000 files takes longer than all the
rest. Odd files (those that are not part of a store, and those that any user may change) are only
reported.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, StorageError
from blobstore.io.durable import os_errors
from blobstore.names import ModelName
from blobstore.store.local.blobs import BlobListing
from blobstore.store.local.manifests import DEPTH, ManifestFolder
from blobstore.store.local.references import Needs, References
from blobstore.store.local.store import Store

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


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file or folder, and why it is odd."""

    path: Path
    reason: str


def oddities(store: Store, listing: BlobListing) -> Iterator[OddFile]:
    """Yield the odd files of a store, blobs first; ``listing`` is that of ``blobs/``.

    Raises: StorageError.
    """
    # A file may have been removed after its folder was listed.
    for entry in listing.others:
        with suppress(NotFoundError), os_errors("access", entry.path):
            yield OddFile(Path(entry.path), _odd_blob(entry))
    for path in store.manifests.everything():
        with suppress(NotFoundError), os_errors("access", path):
            if (reason := _odd_manifest(store.manifests, path)) is not None:
                yield OddFile(path, reason)
    for path, found in store.newer.needs():
        if isinstance(found, BlobStoreError):
            yield OddFile(path, f"no blob is removed: {found.message}")
    yield from _ambiguous_names(store.manifests)
    yield from _lost_models(store, listing)
    for folder in (store.root, store.blobs.path, store.manifests.path, store.root / ".blobstore"):
        with os_errors("access", folder):
            mode = folder.stat().st_mode if folder.is_dir() else 0
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                yield OddFile(folder, "every user may put files into it")


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


def _lost_models(store: Store, listing: BlobListing) -> Iterator[OddFile]:
    """Yield the copies of lost models (store/local/backups.py), if they can be listed."""
    with suppress(StorageError):
        copied = store.copied(set(store.manifests.names()))
        unneeded = listing.named.keys() - store.references().needed() if copied.missing else set()
        for model in copied.lost(unneeded):
            parts = model.name.path_parts
            if not os.path.lexists(store.manifests.path.joinpath(*parts)):
                yield OddFile(store.root.joinpath(".blobstore", "copies", *parts), _LOST)


def odd_mode(status: os.stat_result) -> str | None:
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
    return odd_mode(status)


def _kind(mode: int) -> str | None:
    return next((text for is_kind, text in _KINDS if is_kind(mode)), None)


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """The bytes of a model's blobs, each counted once; ``unique``: those that no other needs.

    ``error``: why its manifest can't be read; the bytes are 0 then. ``is_packed``: the bytes are
    those of the packed files that it needs, also for the blobs of its base.
    """

    name: ModelName
    nbytes: int
    unique: int
    error: BlobStoreError | None = None
    is_packed: bool = False

    @property
    def shared(self) -> int:
        """Bytes of blobs that other models also need."""
        return self.nbytes - self.unique


@dataclass(frozen=True, slots=True)
class Usage:
    """The number and bytes of a store's blobs, and its models, sorted by name.

    ``reclaimable``: bytes of blobs that no manifest names, which `prune` removes when they are old
    enough; 0 while a manifest can't be read, because it removes none then. ``trash``: bytes of the
    blobs in the trash. ``packed``: bytes of the packed files, which are not among ``nbytes``.
    """

    blobs: int
    nbytes: int
    models: tuple[ModelUsage, ...]
    reclaimable: int
    trash: int
    packed: int = 0


def measure_usage(store: Store, names: Sequence[str | ModelName] = ()) -> Usage:
    """Return the bytes of a store's blobs, and of the models ``names`` (all without ``names``).

    A blob counts with the size that manifests give it, as in `list_models`; one that no manifest
    names counts with the size of its file. `verify` finds files of another size. Raises:
    NotFoundError for a missing model; InvalidNameError; AmbiguousNameError; StorageError.
    """
    wanted = [store.find(name) for name in names if not store.is_packed(name)]
    packed = [store.packed.find(name) for name in names if store.is_packed(name)]
    references = store.references()
    there = store.blobs.digests()
    needed, _ = _needed_and_shared(references)
    others = there - needed.keys()
    unneeded = store.blobs.sizes(others)
    chosen = wanted if names else [*references.models, *references.broken]
    plain = usage_of_models(references, there, chosen)
    files = list(_packed_usage(store, {name.folded for name in references.names}))
    cold = [one for one in files if not names or one.name in packed]
    return Usage(
        len(there) - len(others) + len(unneeded),
        sum(_sizes(needed, there)) + sum(unneeded.values()),
        tuple(sorted([*plain, *cold], key=lambda one: one.name)),
        sum(unneeded.values()) if references.obstacle is None else 0,
        store.trash.nbytes(),
        store.packed.nbytes(),
    )


def _packed_usage(store: Store, whole: set[tuple[str, ...]]) -> Iterator[ModelUsage]:
    """Yield the usage of each packed model whose name no model of ``whole`` has."""
    needs: dict[ModelName, set[str]] = {}
    broken: dict[ModelName, BlobStoreError] = {}
    for name in store.packed.names():
        try:
            needs[name] = store.packed.files_of(name)
        except BlobStoreError as error:
            broken[name] = error.kept()
    users = Counter(file for files in needs.values() for file in files)
    sizes = {file: store.packed.blobs.size(file) for file in users}
    for name, files in needs.items():
        if name.folded not in whole:
            own = sum(sizes[file] for file in files if users[file] == 1)
            nbytes = sum(sizes[file] for file in files)
            yield ModelUsage(name, nbytes, own, is_packed=True)
    for name, reason in broken.items():
        yield ModelUsage(name, 0, 0, reason, is_packed=True)


def _needed_and_shared(references: References) -> tuple[dict[str, int], set[str]]:
    """Return the sizes of the blobs that models need, and the blobs that several need."""
    needed: dict[str, int] = {}
    shared: set[str] = set()
    for needs in references.each():
        shared.update(needs.keys() & needed.keys())
        needed.update(needs)
    return needed, shared


def usage_of_models(
    references: References, there: set[str], names: Iterable[ModelName]
) -> list[ModelUsage]:
    """Return the usage of each model, sorted by name; ``there``: the blobs that exist."""
    _, shared = _needed_and_shared(references)
    return [_of_model(name, references, there, shared) for name in sorted(set(names))]


def _of_model(
    name: ModelName, references: References, there: set[str], shared: set[str]
) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, 0, 0, references.broken.get(name))
    nbytes = sum(_sizes(needs, there))
    both = needs.keys() & shared
    return ModelUsage(name, nbytes, nbytes - sum(needs[digest] for digest in both & there))


def _sizes(needs: Needs, there: set[str]) -> Iterable[int]:
    if there.issuperset(needs):  # faster for 600,000 blobs
        return needs.values()
    return [size for digest, size in needs.items() if digest in there]
