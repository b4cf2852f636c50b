"""Prune: blobs that no manifest needs go to the trash, what killed imports left goes for good.

Decide, then do.

The decision is made twice: without the store's exclusive lock, which is what a dry run shows, and
again with it, just before it is carried out. Nothing is removed while anything that may be a
manifest can't be read, or while the store looks as if a disk of it were not mounted (below). Blobs
younger than the grace time are spared: an Ollama that is making a model does not take our lock, and
links its manifest after its blobs. The copies of the manifests of models that are gone go to the
trash with the last of their blobs.

What keeps a clean-up from taking an unmounted disk for models that are gone: an unmounted disk,
bind mount or volume is an empty folder. What was committed here left copies of its manifests, so
the lost models (store/local/copies.py) are known. A clean-up refuses when, in the whole store or
below one host's folder,

- no manifest is there at all, and at least one model is lost; or
- at least two models are lost, and more are lost than copied models have a manifest;

when the whole store has no manifest and blobs would be removed; and when ``blobs/`` has no blob of
any manifest.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.io.durable import os_errors
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import BlobListing
from blobstore.store.local.copies import MissingModel
from blobstore.store.local.leftovers import Leftover
from blobstore.store.local.references import References
from blobstore.store.local.store import Store

_NAMED = 5
_SEVERAL = 2


def without_blobs(
    store: Store, needed: AbstractSet[str], named: AbstractSet[str]
) -> StorageError | None:
    """Return why a store is left alone that has none of the blobs that its manifests need, else None.

    ``needed``, ``named``: the hex digits of the blobs that manifests name, and of those in
    ``blobs/``.
    """
    if not needed or not named.isdisjoint(needed):
        return None
    message = (
        f"the manifests need {len(needed):,} blobs, and {store.blobs.path} contains none of them"
    )
    hint = "Is its disk mounted? Models that are to go are removed by blobstore rm NAME."
    return StorageError(message, path=str(store.blobs.path), hint=hint)


def without_manifests(
    store: Store,
    references: References,
    there: Sequence[ModelName],
    lost: Sequence[MissingModel],
    removed: int,
) -> StorageError | None:
    """Return why a store is left alone that has lost too many manifests, else None.

    ``there``: the copied models that have a manifest; ``removed``: how many blobs would go.
    """
    for place, host in _places(store.manifests.path, lost):
        manifests = sum(_is_below(name, host) for name in references.models) + (
            0 if host else len(references.newer)
        )
        remaining = sum(_is_below(name, host) for name in there)
        gone = [model.name for model in lost if _is_below(model.name, host)]
        if not manifests or (len(gone) >= _SEVERAL and len(gone) > remaining):
            return _refusal(
                place, f"{_subject(len(gone), len(gone) + remaining)} no manifest: {_listed(gone)}"
            )
    if removed and not references.models and not references.newer:
        return _refusal(
            store.manifests.path, f"no model has a manifest, and {removed:,} blobs would go"
        )
    return None


def _places(manifests: Path, lost: Sequence[MissingModel]) -> Iterator[tuple[Path, str | None]]:
    """Yield the folders of manifests that may be unmounted, and the host of each: None for the folder of all hosts."""
    if lost:
        yield manifests, None
        for host in sorted({model.name.host for model in lost}):
            yield manifests / host, host


def _is_below(name: ModelName, host: str | None) -> bool:
    return host is None or name.host == host


def _subject(lost: int, known: int) -> str:
    """Return the subject of a refusal, and its verb."""
    if known == 1:
        return "the only model that was stored here has"
    return (
        f"{lost:,} of the {known:,} models that were stored here {'has' if lost == 1 else 'have'}"
    )


def _listed(names: Sequence[ModelName]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more


def _refusal(place: Path, message: str) -> StorageError:
    hint = (
        f"Is the disk of {place} mounted? A manifest that was deleted comes back by blobstore repair NAME. "
        "If these models are to go: prune with forget=True."
    )
    return StorageError(f"{place}: {message}", path=str(place), hint=hint)


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

    ``without_manifest``: models whose blobs are all there again, and the copies of their manifests,
    but not the manifests: an undo gives the store that there was before the prune. `repair_model`
    restores a manifest from its copy.
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
    """Move the blobs that no manifest needs to the trash, and remove what killed imports left.

    What was in the trash goes.

    ``grace_s``: blobs are spared that were written to in so many seconds; at least an hour, unless
    ``sole_owner`` says that no Ollama and no other machine uses the store. ``forget``: models whose
    manifests are gone are to go, however many. ``dry_run``: nothing is changed. ``wait_s``: how
    long to wait for other processes that use the store, unless the store says; 0: not at all.

    Raises: UsageError for a shorter grace time; BusyError; StorageError or CorruptDataError when
    something that may be a manifest can't be read, StorageError when too many manifests, or all
    blobs, are gone (prune.py): nothing is removed then.
    """
    _check_grace(grace_s, sole_owner=sole_owner)
    decision = _decide(store, grace_s, None, forget=forget)
    if dry_run or not os.path.exists(store.root):  # noqa: PTH110  # what can't be told is said by the lock
        return decision.result(store.trash.nbytes())
    with store.alone(wait_s):
        if not sole_owner and store.is_remote:
            message = f"{store.root} is on a network file system, where another machine's locks may not be seen"
            hint = "If no other machine and no Ollama uses it now, say so: sole_owner=True."
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
        leftovers=tuple(
            store.leftovers(
                grace_s, lambda digest: digest.hex in listing.named and digest not in gone
            )
        ),
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
            found.append(
                UnneededBlob(
                    Digest(digest), status.st_size, now - status.st_mtime, Path(entry.path)
                )
            )
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
            hint="If no Ollama and no other machine uses the store, say so: sole_owner=True.",
        )
