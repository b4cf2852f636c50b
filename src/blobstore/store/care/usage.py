"""Usage: what the blobs of a store take, by model: what only one model needs, what several share, what none needs.

Files of blobs that models need are not read or stat-ed, only their names are: 600,000 sizes take
longer than all the rest. What is odd (files in a store that are not part of it, and those that any
user may change) is only shown.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, StorageError
from blobstore.io.durable import os_errors
from blobstore.names import ModelName
from blobstore.store.local.blobs import BlobListing
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.references import Needs, References
from blobstore.store.local.store import Store

_PARTIAL = re.compile(r"sha256-[0-9a-f]{64}-partial(-[0-9]+)?", re.ASCII)
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MANIFEST_DEPTH = 4
_AMBIGUOUS = "another beside it differs only in case, and Ollama takes one for the other: move one to another name"
_LOST = "the manifest of its model is gone, and blobs that only it needed are there: repair brings it back, until prune"


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file or folder, and what is odd about it."""

    path: Path
    reason: str


def oddities(store: Store, listing: BlobListing) -> Iterator[OddFile]:
    """Yield what is odd in a store, blobs first; ``listing`` is what lies in ``blobs/``.

    Raises: StorageError.
    """
    for entry in listing.others:
        with (
            suppress(NotFoundError),
            os_errors("access", entry.path),
        ):  # it has been removed since the folder was listed
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
            if folder.is_dir() and _is_open_to_all(folder.stat()):
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
    """Yield the copies of models that are lost (store/local/copies.py).

    None where the copies may not be listed: reading needs nothing of ours.
    """
    with suppress(StorageError):
        copied = store.copied(set(store.manifests.names()))
        unneeded = listing.named.keys() - store.references().needed() if copied.missing else set()
        for model in copied.lost(unneeded):
            parts = model.name.path_parts
            if not os.path.lexists(store.manifests.path.joinpath(*parts)):
                yield OddFile(store.root.joinpath(".blobstore", "copies", *parts), _LOST)


def odd_mode(status: os.stat_result) -> str | None:
    """Return what is odd about the mode of a blob or manifest, or None."""
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
    if kind is not None and depth <= _MANIFEST_DEPTH:
        return f"it is {kind}"
    if depth != _MANIFEST_DEPTH:
        return f"it lies {depth} levels deep, and manifests lie {_MANIFEST_DEPTH}"
    return (
        odd_mode(status)
        if manifests.name_of(path)
        else "its path is not a model's name, but it may be a manifest"
    )


def _kind(mode: int) -> str | None:
    return next((text for is_kind, text in _KINDS if is_kind(mode)), None)


def _is_open_to_all(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What a model takes, in bytes, each blob counted once: ``unique`` is what its removal would free.

    ``error``: why its manifest can't be read; the bytes are 0 then.
    """

    name: ModelName
    nbytes: int
    unique: int
    error: BlobStoreError | None = None

    @property
    def shared(self) -> int:
        """Bytes of blobs that other models need too."""
        return self.nbytes - self.unique


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in a store: the number and bytes of its blobs, its models by name, sorted.

    ``reclaimable``: bytes of blobs that no manifest names, which `prune` takes when they are old
    enough; 0 while a manifest can't be read, because it takes none then. ``trash``: bytes of what
    the last one took.
    """

    blobs: int
    nbytes: int
    models: tuple[ModelUsage, ...]
    reclaimable: int
    trash: int


def measure_usage(store: Store, names: Sequence[str | ModelName] = ()) -> Usage:
    """Return what the blobs of a store take.

    Of ``models`` those called ``names``, all without ``names``.

    A blob that is there counts as manifests say, as in `list_models`; one that none names counts as
    long as its file is. What was cut or grew is for `verify` to find. Raises: NotFoundError for a
    name that there is not; InvalidNameError; AmbiguousNameError; StorageError.
    """
    wanted = [store.find(name) for name in names]
    references = store.references()
    there = store.blobs.digests()
    needed, shared = _needed_and_shared(references)
    others = there - needed.keys()
    unneeded = store.blobs.sizes(others)
    chosen = wanted or [*references.models, *references.broken]
    return Usage(
        len(there) - len(others) + len(unneeded),
        sum(_sizes(needed, there)) + sum(unneeded.values()),
        tuple(_of_model(name, references, there, shared) for name in sorted(set(chosen))),
        sum(unneeded.values()) if references.obstacle is None else 0,
        store.trash.nbytes(),
    )


def _needed_and_shared(references: References) -> tuple[dict[str, int], set[str]]:
    """Return the sizes of the blobs that some model needs, and the blobs that more than one does."""
    needed: dict[str, int] = {}
    shared: set[str] = set()
    for needs in references.each():
        shared.update(needs.keys() & needed.keys())
        needed.update(needs)
    return needed, shared


def _of_model(
    name: ModelName, references: References, there: set[str], shared: set[str]
) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, 0, 0, references.broken.get(name))
    nbytes = sum(_sizes(needs, there))
    both = needs.keys() & shared
    return ModelUsage(
        name, nbytes, nbytes - sum(needs[digest] for digest in both if digest in there)
    )


def _sizes(needs: Needs, there: set[str]) -> Iterable[int]:
    """Return the sizes of the blobs that are there."""
    if there.issuperset(needs):  # of 600,000 blobs that is faster than to look for each
        return needs.values()
    return [size for digest, size in needs.items() if digest in there]
