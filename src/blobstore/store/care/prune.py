"""Prune: moves unneeded blobs to the trash, and deletes what killed imports left.

The decision is made twice: without the store's exclusive lock, which is what a dry run shows, and
again with it, just before it is carried out. Nothing is removed while anything that may be a
manifest can't be read, or while a disk of the store seems not to be mounted (below). Blobs younger
than the grace time are spared: an Ollama that makes a model does not take our lock, and links its
manifest after its blobs. The copies of the manifests of missing models are moved to the trash with
the last of their blobs.

An unmounted disk, bind mount or volume is an empty folder, and must not be taken for removed
models. Each model that was committed here left a copy of its manifest, so the lost models
(store/local/backups.py) are known. A clean-up refuses if, in the whole store or below one host's
folder,

- there is no manifest, and at least one model is lost; or
- at least two models are lost, and more are lost than models with copies have a manifest;

if the whole store has no manifest and blobs would be removed; and if ``blobs/`` has no blob of any
manifest.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.io.durable import os_errors
from blobstore.names import Digest, ModelName
from blobstore.store.local.backups import MissingModel
from blobstore.store.local.blobs import BlobListing
from blobstore.store.local.leftovers import Leftover
from blobstore.store.local.references import References
from blobstore.store.local.store import Store

_NAMED = 5
_SEVERAL = 2


def without_blobs(
    store: Store, needed: AbstractSet[str], named: AbstractSet[str]
) -> StorageError | None:
    """Return the refusal of a store with none of the blobs that its manifests need, else None.

    ``needed``, ``named``: the hex digits of the blobs that manifests name, and of those in
    ``blobs/``.
    """
    if not needed or not named.isdisjoint(needed):
        return None
    path = store.blobs.path
    message = f"the manifests need {len(needed):,} blobs, and {path} contains none of them"
    hint = "Is its disk mounted? To remove models, use blobstore rm NAME."
    return StorageError(message, path=str(path), hint=hint)


def without_manifests(
    store: Store,
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


DAY_S = 24 * 3600.0
LEAST_GRACE_S = 3600.0
"""A starting Ollama spares unreferenced blobs for so long (server/images.go `PruneLayers`)."""


@dataclass(frozen=True, slots=True)
class UnneededBlob:
    """A blob that no manifest names: size in bytes, seconds since its last write, and file."""

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
    """What a clean-up removed, or would: blobs to the trash, leftovers for good.

    ``spared`` blobs are too young. ``forgotten``: missing models, the copies of whose manifests
    were moved to the trash. ``freed``: bytes of the trash of the previous clean-up, now deleted.
    """

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    forgotten: tuple[ModelName, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class UndoResult:
    """The blobs that were restored from the trash, with their bytes, and those ``kept`` there.

    A blob is kept in the trash if the store has it again, or if it is damaged.
    ``without_manifest``: models whose blobs and copies are all restored, but that have no manifest,
    as before the prune. `repair_model` restores a manifest from its copy.
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
    """Move the blobs that no manifest needs to the trash, and delete what killed imports left.

    Deletes the former contents of the trash.

    ``grace_s``: blobs that were written to in the last so many seconds are spared; at least an
    hour, unless ``sole_owner`` says that no Ollama and no other machine uses the store. ``forget``:
    missing models are given up, however many. ``dry_run``: nothing is changed. ``wait_s``: seconds
    to wait for other processes that use the store, unless the store has its own; 0: none.

    Raises: UsageError for a shorter grace time; BusyError; StorageError or CorruptDataError if
    something that may be a manifest can't be read; StorageError if too many manifests, or all
    blobs, are missing. Nothing is removed then.
    """
    _check_grace(grace_s, sole_owner=sole_owner)
    decision = _decide(store, grace_s, None, forget=forget)
    if dry_run or not os.path.exists(store.root):  # noqa: PTH110  # False for errors
        return decision.result(store.trash.nbytes())
    with store.alone(wait_s):
        if not sole_owner and store.is_remote:
            message = "is on a network file system, where locks of other machines may be invisible"
            hint = "If no other machine and no Ollama uses it now, say so: `sole_owner=True`."
            raise StorageError(f"{store.root} {message}", path=str(store.root), hint=hint)
        decision = _decide(store, grace_s, decision.references, forget=forget)
        freed = store.trash.empty()
        store.trash.take((blob.path for blob in decision.removed), decision.forgotten)
        for leftover in decision.leftovers:
            leftover.remove()
        store.manifests.remove_all_empty_folders()
        store.packed.manifests.remove_all_empty_folders()
        known = {key.hex() for key in decision.references.parsed}
        store.summaries.keep(known | store.packed.ids())
        store.results.keep_only(decision.manifests)
    return decision.result(freed)


def undo_prune(store: Store, *, wait_s: float = 1) -> UndoResult:
    """Restore what the last `prune` took. A file that the store has again is not replaced.

    Raises: NotFoundError if the trash is empty; BusyError; StorageError.
    """
    empty = NotFoundError(f"the trash of {store.root} is empty", path=str(store.root))
    if not os.path.exists(store.root):  # noqa: PTH110  # the lock would make it
        raise empty
    with store.alone(wait_s):
        contents, models = store.trash.contents(), store.trash.models()
        if not contents and not models:
            raise empty
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
    """Return True if all blobs exist that a model's copies name, and its manifest does not."""
    needs = store.copies.needs(name)
    is_whole = bool(needs) and store.blobs.sizes(needs).keys() == needs
    return is_whole and not os.path.lexists(store.manifests.path.joinpath(*name.path_parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What is removed, spared and forgotten, and the references that this follows from.

    ``manifests``: the hex digits of those that models have, or may get back.
    """

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    forgotten: tuple[ModelName, ...]
    references: References
    manifests: AbstractSet[str]

    def result(self, freed: int) -> PruneResult:
        """Return the result of carrying it out."""
        return PruneResult(self.removed, self.spared, self.leftovers, self.forgotten, freed)


def _decide(store: Store, grace_s: float, known: References | None, *, forget: bool) -> _Decision:
    """Decide what is removed. Raises: the obstacle to any removal; StorageError."""
    references = store.references(known)
    needed = references.needed()
    listing = store.blobs.listing()
    blobs = _unneeded(listing, needed)
    # A clock that was set back gives blobs a negative age: they stay.
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
    manifests = store.digests_of(references, copied)
    return _Decision(
        removed=removed,
        spared=spared,
        leftovers=(
            *store.leftovers(
                grace_s, lambda digest: digest.hex in listing.named and digest not in gone
            ),
            *store.signatures.unneeded(manifests, grace_s),
        ),
        forgotten=tuple(model.name for model in copied.missing if waiting.isdisjoint(model.needs)),
        references=references,
        manifests=manifests,
    )


def _unneeded(listing: BlobListing, needed: AbstractSet[str]) -> list[UnneededBlob]:
    """Return the blobs that are regular files and not ``needed``, sorted by digest."""
    now = time.time()
    found = []
    for digest in sorted(listing.named.keys() - needed):
        path = listing.named[digest].path
        # A blob may have been removed after the folder was listed.
        with suppress(NotFoundError), os_errors("access", path):
            status = listing.named[digest].stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                age_s = now - status.st_mtime
                found.append(UnneededBlob(Digest(digest), status.st_size, age_s, Path(path)))
    return found


def _check_grace(grace_s: float, *, sole_owner: bool) -> None:
    if not grace_s >= 0:
        raise UsageError(f"invalid grace time: {grace_s!r}", hint="Give seconds, 0 or more.")
    if grace_s < LEAST_GRACE_S and not sole_owner:
        message = "a grace time under 1 h may take the blobs of a model that Ollama is creating"
        hint = "If no Ollama and no other machine uses the store, say so: `sole_owner=True`."
        raise UsageError(message, hint=hint)
