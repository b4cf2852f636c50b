"""Prune: blobs that no manifest needs go to the trash, what killed imports left goes for good. Decide, then do.

The decision is made twice: without the store's exclusive lock, which is what a dry run shows, and again with it, just before
it is carried out. Nothing is removed while anything that may be a manifest can't be read, or while the store looks as if a
disk of it were not mounted (precautions.py). Blobs younger than the grace time are spared: an Ollama that is making a model
does not take our lock, and links its manifest after its blobs. The copies of the manifests of models that are gone go to the
trash with the last of their blobs.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from blobstore.care.precautions import without_blobs, without_manifests
from blobstore.digest import Digest
from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.names import ModelName
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

    ``forgotten``: models whose manifests are gone; the copies of their manifests went to the trash.
    ``freed``: bytes of the trash of the clean-up before, which is gone.
    """

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    forgotten: tuple[ModelName, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What came back from the trash, in bytes each; ``kept`` had to stay: the store has the blob again, or it is damaged.

    ``without_manifest``: models whose blobs are all there again, and the copies of their manifests, but not the manifests:
    an undo gives the store that there was before the prune. `repair_model` restores a manifest from its copy.
    """

    restored: tuple[tuple[Digest, int], ...]
    kept: tuple[tuple[Digest, int], ...]
    without_manifest: tuple[ModelName, ...]


def prune(
    store: Store,
    *,
    grace_s: float = DAY_S,
    sole_owner: bool = False,
    forget: bool = False,
    dry_run: bool = False,
    wait_s: float = 1,
) -> PruneResult:
    """Move the blobs that no manifest needs to the trash, and remove what killed imports left; what was in the trash goes.

    ``grace_s``: blobs are spared that were written to in so many seconds; at least an hour, unless ``sole_owner`` says that
    no Ollama and no other machine uses the store. ``forget``: models whose manifests are gone are to go, however many.
    ``dry_run``: nothing is changed. ``wait_s``: how long to wait for other processes that use the
    store, unless the store says; 0: not at all.

    Raises: UsageError for a shorter grace time; BusyError; StorageError or CorruptDataError when something that may be a
    manifest can't be read, StorageError when too many manifests, or all blobs, are gone (precautions.py): nothing is removed
    then.
    """
    _check_grace(grace_s, sole_owner=sole_owner)
    decision = _decide(store, grace_s, None, forget=forget)
    if dry_run or not os.path.exists(store.root):  # noqa: PTH110  # what can't be told is said by the lock
        return decision.result(store.trash.nbytes())
    with store.alone(wait_s):
        if not sole_owner and store.is_remote:
            message = f"{store.root} is on a network file system, where another machine's locks may not be seen"
            hint = "If no other machine and no Ollama uses it now, say so: --sole-owner."
            raise StorageError(message, path=str(store.root), hint=hint)
        decision = _decide(store, grace_s, decision.references, forget=forget)
        freed = store.trash.empty()
        store.trash.take((blob.path for blob in decision.removed), decision.forgotten)
        for leftover in decision.leftovers:
            leftover.remove()
        store.manifests.remove_all_empty_folders()
        store.summaries.keep({key.hex() for key in decision.references.parsed})
    return decision.result(freed)


def undo(store: Store, *, wait_s: float = 1) -> UndoResult:
    """Give back what the last `prune` took. What the store has again by now stays as it is.

    Raises: NotFoundError when the trash is empty; BusyError; StorageError.
    """
    if not os.path.exists(store.root):  # noqa: PTH110  # the lock would make it
        raise _nothing(store)
    with store.alone(wait_s):
        contents, models = store.trash.contents(), store.trash.models()
        if not contents and not models:
            raise _nothing(store)
        came_back = [store.trash.restore(blob) for blob in contents]
        store.trash.restore_copies()
        store.trash.settle()
        without_manifest = tuple(name for name in models if _lacks_only_its_manifest(store, name))
    pairs = list(zip(contents, came_back, strict=True))
    return UndoResult(
        tuple((blob.digest, blob.size) for blob, is_back in pairs if is_back),
        tuple((blob.digest, blob.size) for blob, is_back in pairs if not is_back),
        without_manifest,
    )


def _lacks_only_its_manifest(store: Store, name: ModelName) -> bool:
    """Return True when all blobs of a model are there, by the copies of its manifest, and the manifest is not."""
    needs = store.copies.needs(name)
    is_whole = bool(needs) and store.blobs.sizes(needs).keys() == needs
    return is_whole and not os.path.lexists(store.manifests.path.joinpath(*name.path_parts))


def _nothing(store: Store) -> NotFoundError:
    return NotFoundError(f"the trash of {store.root} is empty", path=str(store.root))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What goes, what is spared, what is left of ours, which models are forgotten, and the manifests this follows from."""

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    forgotten: tuple[ModelName, ...]
    references: References

    def result(self, freed: int) -> PruneResult:
        """Return what this makes of the store."""
        return PruneResult(self.removed, self.spared, self.leftovers, self.forgotten, freed)


def _decide(store: Store, grace_s: float, known: References | None, *, forget: bool) -> _Decision:
    """Decide what goes. Raises: what keeps everything from going; StorageError."""
    references = store.references(known)
    needed = references.needed()
    listing = store.blobs.listing()
    blobs = _unneeded(listing, needed)
    # A clock that was set back makes blobs that are younger than none: they stay.
    removed = tuple(blob for blob in blobs if blob.age_s >= grace_s)
    spared = tuple(blob for blob in blobs if blob.age_s < grace_s)
    copied = store.copied(references.names)
    obstacle = references.obstacle or without_blobs(store, needed, listing.named.keys())
    if obstacle is None and not forget:
        lost = copied.lost({blob.digest.hex for blob in blobs})
        obstacle = without_manifests(store, references, copied.there, lost, len(removed))
    if obstacle is not None:
        raise obstacle.at("nothing is removed")
    gone = {blob.digest for blob in removed}
    waiting = {blob.digest.hex for blob in spared}
    return _Decision(
        removed=removed,
        spared=spared,
        leftovers=tuple(store.leftovers(grace_s, lambda digest: digest.hex in listing.named and digest not in gone)),
        forgotten=tuple(model.name for model in copied.missing if waiting.isdisjoint(model.needs)),
        references=references,
    )


def _unneeded(listing: BlobListing, needed: AbstractSet[str]) -> list[UnneededBlob]:
    """Return the blobs whose hex digits are not among those ``needed``, sorted by digest: regular files only."""
    now = time.time()
    found = []
    for digest in sorted(listing.named.keys() - needed):
        entry = listing.named[digest]
        status = _status(entry)
        if status is not None and stat.S_ISREG(status.st_mode):
            found.append(UnneededBlob(Digest(digest), status.st_size, now - status.st_mtime, Path(entry.path)))
    return found


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
