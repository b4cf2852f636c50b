"""Prune: blobs that no manifest needs go to the trash, what killed imports left goes for good. Decide, then do.

The decision is made twice: at leisure, which is what a dry run shows, and again by the holder of the store's exclusive lock,
who carries it out. Nothing is removed while anything that may be a manifest can't be read. Blobs younger than the grace time
are spared: an Ollama that is making a model does not take our lock, and links its manifest after its blobs.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from blobstore.digest import Digest
from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.store import BlobListing, Leftover, References, Store
from blobstore.store.files import os_errors

DAY_S = 24 * 3600.0
LEAST_GRACE_S = 3600.0
"""Ollama spares the blobs that no manifest names for so long when it starts (server/images.go `PruneLayers`)."""


@dataclass(frozen=True, slots=True)
class UnneededBlob:
    """A blob that no manifest names: its size in bytes, its age in seconds (by the time of its last write), its file."""

    digest: Digest
    size: int
    age_s: float
    path: Path

    @property
    def reason(self) -> str:
        """Why it is not needed."""
        return "no manifest names it"


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What a clean-up took, or would take: ``removed`` blobs to the trash, ``leftovers`` for good; ``spared`` are too young.

    ``freed``: bytes of the trash of the clean-up before, which is gone.
    """

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What came back from the trash, in bytes each; ``kept`` had to stay: the store has the blob again, or it is damaged."""

    restored: tuple[tuple[Digest, int], ...]
    kept: tuple[tuple[Digest, int], ...]


def prune(
    store: Store, *, grace_s: float = DAY_S, sole_owner: bool = False, dry_run: bool = False, wait_s: float = 1
) -> PruneResult:
    """Move the blobs that no manifest needs to the trash, and remove what killed imports left; what was in the trash goes.

    ``grace_s``: blobs are spared that were written to in so many seconds; at least an hour, unless ``sole_owner`` says that
    no Ollama and no other machine uses the store. ``dry_run``: nothing is changed. ``wait_s``: for how long others who use
    the store are waited for, unless the store says; 0: not at all.

    Raises: UsageError for a shorter grace time; BusyError; StorageError or CorruptDataError when something that may be a
    manifest can't be read: nothing is removed then.
    """
    _check_grace(grace_s, sole_owner=sole_owner)
    decided, references = _decide(store, grace_s, None)
    if dry_run or not store.root.exists():
        return PruneResult(*decided, store.trash.nbytes())
    with store.alone(wait_s):
        if not sole_owner and store.is_remote:
            message = f"{store.root} is on a network file system, where another machine's locks may not be seen"
            hint = "If no other machine and no Ollama uses it now, say so: --sole-owner."
            raise StorageError(message, path=str(store.root), hint=hint)
        decided, references = _decide(store, grace_s, references)
        removed, spared, leftovers = decided
        try:
            store.trash.replace(blob.path for blob in removed)
            for leftover in leftovers:
                leftover.remove()
            store.manifests.remove_all_empty_folders()
            store.summaries.keep({key.hex() for key in references.parsed})
        finally:
            freed = store.trash.empty()
    return PruneResult(removed, spared, leftovers, freed)


def undo(store: Store, *, wait_s: float = 1) -> UndoResult:
    """Give back what the last `prune` took. What the store has again by now stays as it is.

    Raises: NotFoundError when the trash is empty; BusyError; StorageError.
    """
    if not store.root.exists():  # the lock would make it
        raise _nothing(store)
    with store.alone(wait_s):
        contents = store.trash.contents()
        if not contents:
            raise _nothing(store)
        came_back = [store.trash.restore(blob) for blob in contents]
        store.trash.settle()
    pairs = list(zip(contents, came_back, strict=True))
    return UndoResult(
        tuple((blob.digest, blob.size) for blob, is_back in pairs if is_back),
        tuple((blob.digest, blob.size) for blob, is_back in pairs if not is_back),
    )


def _nothing(store: Store) -> NotFoundError:
    return NotFoundError(f"the trash of {store.root} is empty", path=str(store.root))


def _unneeded(listing: BlobListing, references: References) -> list[UnneededBlob]:
    """Return the blobs that no manifest names, sorted by digest: regular files only."""
    now = time.time()
    found = []
    for digest in sorted(listing.named.keys() - references.needed()):
        entry = listing.named[digest]
        status = _status(entry)
        if status is not None and stat.S_ISREG(status.st_mode):
            found.append(UnneededBlob(Digest(digest), status.st_size, now - status.st_mtime, Path(entry.path)))
    return found


_Decision = tuple[tuple[UnneededBlob, ...], tuple[UnneededBlob, ...], tuple[Leftover, ...]]


def _decide(store: Store, grace_s: float, known: References | None) -> tuple[_Decision, References]:
    """Return what goes, what is spared, what is left of ours, and the manifests that this follows from."""
    references = store.references(known)
    if (obstacle := references.obstacle) is not None:
        raise obstacle.at("nothing is removed")
    listing = store.blobs.listing()
    unneeded = _unneeded(listing, references)
    # A clock that was set back makes blobs that are younger than none: they stay.
    removed = tuple(blob for blob in unneeded if blob.age_s >= grace_s)
    spared = tuple(blob for blob in unneeded if blob.age_s < grace_s)
    gone = {blob.digest for blob in removed}
    leftovers = store.leftovers(grace_s, lambda digest: digest.hex in listing.named and digest not in gone)
    return (removed, spared, tuple(leftovers)), references


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        with os_errors("access", entry.path):
            return entry.stat(follow_symlinks=False)
    except NotFoundError:  # it has been removed since the folder was listed
        return None


def _check_grace(grace_s: float, *, sole_owner: bool) -> None:
    if not grace_s >= 0:
        raise UsageError(f"invalid grace time: {grace_s!r}", hint="Give seconds, 0 or more.")
    if grace_s < LEAST_GRACE_S and not sole_owner:
        raise UsageError(
            "a grace time under 1 h may take the blobs of a model that Ollama is creating",
            hint="If no Ollama and no other machine uses the store, say so: --sole-owner.",
        )
