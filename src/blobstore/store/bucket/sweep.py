"""Prune in a bucket: removes blobs that no model needs, while other machines write.

1. *Decide*: the blobs that no manifest names, that are older than the grace time, that no live
   lease names, and that are older than the oldest live lease.
2. *Mark* them (sweep_state.py). Sessions that begin now do not use them.
3. *Wait* until the sessions with a lease have ended, or for as long as a lease counts. A session
   checks its blobs and moves its tag within that time, or checks again. Marked blobs that a session
   needs meanwhile are spared, because it waits for them.
4. *Decide again* from new lists, and *delete* what is marked and still not needed.

Times are the server's. A bucket does not have a trash: with versions it keeps what is deleted, and
its lifecycle rules say for how long. Nothing is removed while anything that may be a manifest can't
be read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from blobstore.errors import BlobStoreError, BusyError, ConflictError, StorageError, UsageError
from blobstore.io.objects import ObjectState
from blobstore.names import Digest
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.leases import (
    LONGEST_LEASE_S,
    Lease,
    LiveLease,
    NewPins,
    elapsed_s,
    expired,
    leases_of,
    pinned_by,
)
from blobstore.store.bucket.object_keys import SIGNATURES, blob_key
from blobstore.store.bucket.sweep_state import (
    MOST_MARKED,
    Phase,
    SweepState,
    read_state,
    reset_if_dead,
    write_state,
)
from blobstore.store.care.prune import DAY_S, PruneResult, UnneededBlob
from blobstore.store.local.leftovers import Leftover
from blobstore.store.local.references import References

_log = logging.getLogger("blobstore.store.bucket")

_AT_ONCE = 1000
"""Objects that one request removes."""
_CLOCKS = timedelta(seconds=5)
"""How much the clocks of a service's own servers may differ."""
_LOOK_S = 2.0
"""How often a clean-up lists the leases that it waits for."""
_NEWER = "manifests-v2/"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is removed and spared; ``found``: the bucket's objects of all blobs."""

    removed: tuple[UnneededBlob, ...]
    spared: tuple[UnneededBlob, ...]
    leftovers: tuple[Leftover, ...]
    waits_for: tuple[LiveLease, ...]

    @property
    def digests(self) -> frozenset[str]:
        """The blobs that are removed, in hex digits."""
        return frozenset(blob.digest.hex for blob in self.removed)

    def only(self, digests: Iterable[str]) -> Decision:
        """Return the decision about these blobs only; the others are spared."""
        allowed = set(digests)
        kept = tuple(blob for blob in self.removed if blob.digest.hex not in allowed)
        removed = tuple(blob for blob in self.removed if blob.digest.hex in allowed)
        return replace(self, removed=removed, spared=(*self.spared, *kept))

    def result(self) -> PruneResult:
        """Return the result of carrying it out."""
        return PruneResult(self.removed, self.spared, self.leftovers, (), 0)


@dataclass(slots=True)
class Sweep:
    """One clean-up of a bucket. ``stop``: set by another thread, it ends the wait."""

    store: BucketStore
    grace_s: float = DAY_S
    forget: bool = False
    stop: threading.Event = field(default_factory=threading.Event)

    def decide(self, now: datetime, own: str = "") -> Decision:
        """Return what is removed now, by the server's clock. ``own``: the key of our own lease.

        Raises: StorageError, or the error of a manifest that can't be read.
        """
        store = self.store
        # Blobs first: one that is written after this list is not removed, and a manifest or lease
        # that names one of these is in a later list.
        blobs = store.blobs.listing()
        leases = [lease for lease in leases_of(store.bucket) if lease.key != own]
        live = tuple(lease for lease in leases if lease.is_live(now))
        pinned = set().union(*(pinned_by(store.bucket, lease.key) for lease in live))
        references = store.manifests.references()
        needed = references.needed()
        self._check(references, blobs)
        grace = timedelta(seconds=self.grace_s)
        begun = min((lease.began for lease in live), default=None)
        removed: list[UnneededBlob] = []
        spared: list[UnneededBlob] = []
        for digest, state in sorted(blobs.items()):
            if digest.hex in needed:
                continue
            is_used = digest.hex in pinned or (begun and state.modified >= begun - _CLOCKS)
            old = now - state.modified >= grace and not is_used
            (removed if old else spared).append(_unneeded(digest, state, now))
        self._check_models(references, removed)
        leftovers = tuple(self._leftovers(references, now))
        return Decision(tuple(removed), tuple(spared), leftovers, live)

    def _check(self, references: References, blobs: dict[Digest, ObjectState]) -> None:
        """Raise the obstacle to any removal."""
        store = self.store
        others = [*store.manifests.strays(), *store.bucket.objects(_NEWER)]
        # Programs that show folders make empty objects for them, with a slash at the end.
        strays = [state for state in others if state.size]
        if strays:
            place = store.bucket.place(strays[0].key)
            message = f"nothing is removed: {place} may be a manifest that needs blobs"
            more = f", and {len(strays) - 1:,} more" if len(strays) > 1 else ""
            hint = f"Check it{more}, and remove it if it is not one."
            raise StorageError(message, path=place, hint=hint)
        obstacle = references.obstacle
        if obstacle is not None:
            raise obstacle.at("nothing is removed")
        needed = references.needed()
        if needed and needed.isdisjoint(digest.hex for digest in blobs):
            message = f"the manifests need {len(needed):,} blobs, and the bucket has none of them"
            raise StorageError(f"nothing is removed: {message}", path=store.address)

    def _check_models(self, references: References, removed: Sequence[UnneededBlob]) -> None:
        if removed and not references.models and not self.forget:
            message = f"no model has a manifest, and {len(removed):,} blobs would be removed"
            hint = "Is the prefix right? To give up all models, prune with `forget=True`."
            place = self.store.address
            raise StorageError(f"nothing is removed: {place}: {message}", path=place, hint=hint)

    def _leftovers(self, references: References, now: datetime) -> Iterable[Leftover]:
        """Yield leases that expired long ago, and old signatures that no model has."""
        bucket = self.store.bucket
        for key in expired(bucket, now):
            yield Leftover(Path(key), 0, "the lease of a session that was killed")
        known = {key.hex() for key in references.parsed}
        for state in bucket.objects(SIGNATURES):
            manifest = state.key.removeprefix(SIGNATURES).partition("/")[0]
            is_old = now - state.modified >= timedelta(seconds=self.grace_s)
            if manifest not in known and is_old:
                why = "a signature of a manifest that no model has"
                yield Leftover(Path(state.key), state.size, why)

    def run(self) -> PruneResult:
        """Mark, wait, decide again, and delete.

        Raises: BusyError while another clean-up runs; as `decide`. Nothing is removed then.
        """
        self.store.require_conditions()
        lease = Lease(self.store.bucket, self.store.lease_s)
        try:
            decision = self.decide(lease.now(), lease.key)
            if decision.removed:
                decision = self._sweep_all(lease, decision)
            self._delete(str(leftover.path) for leftover in decision.leftovers)
        finally:
            lease.close()
        return decision.result()

    def _sweep_all(self, lease: Lease, decision: Decision) -> Decision:
        """Sweep as many blobs at once as one state can name."""
        wanted = sorted(decision.digests)
        removed: list[UnneededBlob] = []
        for start in range(0, len(wanted), MOST_MARKED):
            some = decision.only(wanted[start : start + MOST_MARKED])
            done = self._sweep(lease, some)
            removed += done.removed
        return replace(done, removed=tuple(removed))

    def _sweep(self, lease: Lease, decision: Decision) -> Decision:
        state = _Held(self.store, lease, self._free(lease))
        try:
            state.write(Phase.MARKED, decision.digests)
            self._wait(lease, state)
            decision = self.decide(lease.now(), lease.key).only(state.blobs)
            state.write(Phase.DELETING, decision.digests)
            keys = [blob_key(blob.digest) for blob in decision.removed]
            for start in range(0, len(keys), _AT_ONCE):
                state.renew()
                self._delete(keys[start : start + _AT_ONCE])
        finally:
            state.free()
        return decision

    def _free(self, lease: Lease) -> SweepState:
        """Return the state of no clean-up. Raises: BusyError while another one runs."""
        state = read_state(self.store.bucket)
        if state.phase is not Phase.IDLE:
            reset_if_dead(self.store.bucket, state, lease.now())
            state = read_state(self.store.bucket)
        if state.phase is not Phase.IDLE:
            raise _busy(self.store, state.holder)
        return state

    def _wait(self, lease: Lease, state: _Held) -> None:
        """Wait for the sessions that began before the mark; a lease that ends needs no wait.

        A session that needs a marked blob waits, too. Its lease names the blob, which is freed.
        """
        bucket, now = self.store.bucket, lease.now()
        live, dead = [], {lease.key}
        for one in leases_of(bucket):
            if one.key != lease.key and one.is_live(now):
                live.append(one)
            else:
                dead.add(one.key)
        longest = max((one.lease_s for one in live), default=0.0)
        until = elapsed_s() + longest
        keys, pins = {one.key for one in live}, NewPins(bucket, dead)
        while keys and state.blobs and (left := until - elapsed_s()) > 0:
            self.stop.wait(min(left, _LOOK_S, max(longest / 64, 0.01)))
            there, pinned = pins.look()
            keys &= there
            state.spare(pinned)
            state.renew()

    def _delete(self, keys: Iterable[str]) -> None:
        self.store.bucket.delete(list(keys))


class _Held:
    """The state of our own clean-up, renewed while it goes on."""

    def __init__(self, store: BucketStore, lease: Lease, state: SweepState) -> None:
        self._store = store
        self._lease = lease
        self._state = state
        self._written_at = elapsed_s()

    def write(self, phase: Phase, blobs: frozenset[str]) -> None:
        """Write the state. Raises: BusyError if another process took its place."""
        written_at = elapsed_s()
        state = replace(
            self._state, phase=phase, holder=self._lease.holder, lease_s=self._lease.lease_s
        )
        try:
            self._state = write_state(self._store.bucket, replace(state, blobs=blobs))
        except ConflictError:
            raise _busy(self._store, read_state(self._store.bucket).holder) from None
        self._written_at = written_at

    @property
    def blobs(self) -> frozenset[str]:
        """The blobs of the state, in hex digits."""
        return self._state.blobs

    def spare(self, blobs: AbstractSet[str]) -> None:
        """Take blobs out of the state. Raises: as `write`."""
        if self._state.blobs & blobs:
            self.write(self._state.phase, self._state.blobs - blobs)

    def renew(self) -> None:
        """Write the state again, if that was long ago."""
        if elapsed_s() - self._written_at > self._lease.lease_s / 8:
            self.write(self._state.phase, self._state.blobs)

    def free(self) -> None:
        """Write that nothing is being removed. Failures are ignored: the state expires."""
        if self._state.phase is not Phase.IDLE:
            with suppress(BlobStoreError):
                self.write(Phase.IDLE, frozenset())


def prune_bucket(
    store: BucketStore,
    *,
    grace_s: float = DAY_S,
    sole_owner: bool = False,
    forget: bool = False,
    dry_run: bool = False,
) -> PruneResult:
    """Remove the blobs of a bucket that no manifest needs, for good.

    ``grace_s``: blobs that were written in the last so many seconds are spared; at least an hour,
    unless ``sole_owner`` says that no worker has written blobs that a later commit needs.
    ``forget``: also if no model is left. ``dry_run``: nothing is changed, and ages are by this
    machine's clock.

    Raises: UsageError for a shorter grace time; BusyError while another clean-up runs; as
    `Sweep.decide`.
    """
    if not grace_s >= 0:
        raise UsageError(f"invalid grace time: {grace_s!r}", hint="Give seconds, 0 or more.")
    if grace_s < LONGEST_LEASE_S and not sole_owner:
        message = "a grace time under 1 h may take blobs that wait for a commit"
        hint = "If no worker is between its work and a commit, say so: `sole_owner=True`."
        raise UsageError(message, hint=hint)
    sweep = Sweep(store, grace_s, forget)
    return sweep.decide(datetime.now(UTC)).result() if dry_run else sweep.run()


def _unneeded(digest: Digest, state: ObjectState, now: datetime) -> UnneededBlob:
    age_s = max(0.0, (now - state.modified).total_seconds())
    return UnneededBlob(digest, state.size, age_s, Path(state.key))


def _busy(store: BucketStore, holder: str) -> BusyError:
    message = f"{store.address} is being pruned by {holder or 'another process'}"
    return BusyError(message, path=store.address, hint="Try again when it has ended.")
