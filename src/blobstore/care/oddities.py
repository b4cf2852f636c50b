"""Oddities: files in a store that are not part of it, and those that any user may change. They are only shown."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, StorageError
from blobstore.store import BlobListing, ManifestFolder, Store
from blobstore.store.files import os_errors

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
    """Yield what is odd in a store, blobs first; ``listing`` is what lies in ``blobs/``. Raises: StorageError."""
    for entry in listing.others:
        with suppress(NotFoundError), os_errors("access", entry.path):  # it has been removed since the folder was listed
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
    """Yield the copies of models that are lost (store/missing.py).

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
    return odd_mode(status) if manifests.is_name(path) else "its path is not a model's name, but it may be a manifest"


def _kind(mode: int) -> str | None:
    return next((text for is_kind, text in _KINDS if is_kind(mode)), None)


def _is_open_to_all(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
