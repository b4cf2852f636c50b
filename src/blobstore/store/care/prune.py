"""Prune: removes the blobs that no model needs, and what killed imports left.

The decision is made twice: without the home's lock, which is what a dry run shows, and again with
it, just before it is carried out. Nothing is removed while anything that may be a manifest can't be
read, or while the home says that models seem to be lost (`Care.obstacle`). Blobs younger than the
grace time are spared: other programs write blobs before their manifest, without a lock.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from blobstore.errors import StorageError, UsageError
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Care, Leftover, Readable
from blobstore.store.references import References

DAY_S = 24 * 3600.0
LEAST_GRACE_S = 3600.0
"""A starting Ollama spares unreferenced blobs for so long (server/images.go `PruneLayers`)."""


@dataclass(frozen=True, slots=True)
class UnneededBlob:
    """A blob that no manifest names: size in bytes, seconds since its last write, and file."""

    KEYS = ("digest", "size", "age", "reason", "kept")

    digest: Digest
    size: int
    age_s: float
    path: Path
    kept: bool = False

    @property
    def age(self) -> int:
        """Seconds since its last write."""
        return int(self.age_s)

    @property
    def reason(self) -> str:
        return "it is within the grace time" if self.kept else "no manifest names it"


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What a prune removed, or would: blobs to the trash if there is one, leftovers for good.

    ``spared`` blobs are too young.
    """

    KEYS = (
        "dry_run",
        "removed=len(removed)",
        "bytes=removed_bytes",
        "kept=len(spared)",
        "kept_bytes=spared_bytes",
        "freed",
        "blobs",
        "leftovers",
        "forgotten",
    )

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    forgotten: Annotated[
        tuple[ModelName, ...], "models of which only copies of manifests were left"
    ]
    freed: Annotated[int, "bytes of the previous prune's trash, now deleted"]
    dry_run: bool = False

    @property
    def removed_bytes(self) -> int:
        """Bytes of the blobs that were removed."""
        return sum(blob.size for blob in self.removed)

    @property
    def spared_bytes(self) -> int:
        """Bytes of the blobs that are too young."""
        return sum(blob.size for blob in self.spared)

    @property
    def blobs(self) -> tuple[UnneededBlob, ...]:
        """All of them, those that were removed first."""
        return self.removed + self.spared


@dataclass(frozen=True, slots=True)
class UndoResult:
    """The blobs that were restored from the trash, with their bytes, and those ``kept`` there.

    A blob is kept in the trash if the store has it again, or if it is damaged.
    ``without_manifest``: models whose blobs and copies are all restored, but that have no manifest,
    as before the prune. `repair_model` restores a manifest from its copy.
    """

    KEYS = ("restored=len(restored)", "bytes=nbytes", "kept=len(kept)", "blobs", "without_manifest")

    restored: tuple[tuple[Digest, int], ...]
    kept: tuple[tuple[Digest, int], ...]
    without_manifest: tuple[ModelName, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the blobs that were restored."""
        return sum(nbytes for _, nbytes in self.restored)

    @property
    def blobs(self) -> list[Digest]:
        """The digests of the blobs that were restored."""
        return [digest for digest, _ in self.restored]


def prune(
    store: Readable | StorePlace,
    *,
    grace_s: float = DAY_S,
    sole_owner: bool = False,
    forget: bool = False,
    dry_run: bool = False,
    wait_s: float = 1,
) -> PruneResult:
    """Remove the blobs that no model needs, and what killed imports left.

    A store in a folder moves them to its trash, whose former contents are deleted; a bucket
    deletes them.

    ``grace_s``: blobs that were written to in the last ``grace_s`` seconds are spared; at least an
    hour, unless ``sole_owner`` says that neither Ollama nor another machine uses the store, and
    that no worker has written blobs that a later commit needs. ``forget``: missing models are given
    up, however many. ``dry_run``: nothing is changed. ``wait_s``: seconds to wait for others that
    use the store, unless the store has its own; 0: none.

    Raises: UsageError for a shorter grace time, or a home that removes blobs itself; BusyError;
    StorageError or CorruptDataError if something that may be a manifest can't be read; StorageError
    if too many manifests, or all blobs, are missing. Nothing is removed then.
    """
    care = opened_store(store).upper.care()
    if not care.can_prune:
        raise UsageError(f"{care.home.address} removes unneeded blobs by its own rules")
    if not grace_s >= 0:
        raise UsageError(f"invalid grace time: {grace_s!r}", hint="Give seconds, 0 or more.")
    if grace_s < LEAST_GRACE_S and not sole_owner:
        message, hint = care.grace
        raise UsageError(message, hint=hint)
    result, references = _decide(care, grace_s, None, forget=forget)
    if dry_run or not care.exists:
        return replace(result, freed=care.trash_nbytes(), dry_run=dry_run)
    with care.alone(wait_s, sole_owner=sole_owner):
        result, references = _decide(care, grace_s, references, forget=forget)
        paths = [blob.path for blob in result.removed]
        freed = care.remove(paths, result.leftovers, result.forgotten, references)
    return replace(result, freed=freed)


def _decide(
    care: Care, grace_s: float, known: References | None, *, forget: bool
) -> tuple[PruneResult, References]:
    """Return what would be removed, and the references that this follows from.

    Raises: the obstacle to any removal; StorageError.
    """
    # Blobs first: what is written after this list is not removed, and a manifest that names one of
    # these is in the later list.
    digests = care.digests()
    references = care.references(known)
    needed = references.needed()
    states, now = care.states(digests - needed), care.now()
    blobs = [
        UnneededBlob(Digest(digest), state.size, now - state.modified, state.path)
        for digest, state in sorted(states.items())
    ]
    # A clock that was set back gives blobs a negative age: they stay.
    removed = tuple(blob for blob in blobs if blob.age_s >= grace_s)
    spared = tuple(replace(blob, kept=True) for blob in blobs if blob.age_s < grace_s)
    obstacle = references.obstacle or _without_blobs(care, needed, digests)
    if obstacle is None:
        unneeded = {blob.digest.hex for blob in blobs}
        obstacle = care.obstacle(references, unneeded, len(removed), forget=forget)
    if obstacle is not None:
        raise obstacle.at("nothing is removed")
    waiting = {blob.digest.hex for blob in spared}
    leftovers, forgotten = care.rest(references, waiting, grace_s)
    decided = PruneResult(removed, spared, tuple(leftovers), tuple(forgotten), freed=0)
    return decided, references


def _without_blobs(
    care: Care, needed: AbstractSet[str], digests: AbstractSet[str]
) -> StorageError | None:
    """Return the refusal of a home with none of the blobs that its manifests need, else None."""
    if not needed or not digests.isdisjoint(needed):
        return None
    place = care.blobs_place
    message = f"the manifests need {len(needed):,} blobs, and {place} contains none of them"
    hint = "Is its disk mounted? To remove models, use blobstore rm NAME."
    return StorageError(message, path=place, hint=hint)


def undo_prune(store: Readable | StorePlace, *, wait_s: float = 1) -> UndoResult:
    """Restore what the last `prune` took. A file that the store has again is not replaced.

    Raises: NotFoundError if the trash is empty; UsageError for a home without a trash; BusyError;
    StorageError.
    """
    restored, kept, without_manifest = opened_store(store).upper.care().undo(wait_s)
    return UndoResult(tuple(restored), tuple(kept), tuple(without_manifest))
