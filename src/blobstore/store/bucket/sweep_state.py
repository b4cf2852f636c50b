"""The state of a clean-up: one object that lists the blobs being removed.

A clean-up *marks* blobs, by naming them in the object ``.blobstore/sweep``. Sessions that begin
then see it, and wait before they use such a blob. Those that began before have a lease: the
clean-up waits for as long as a lease counts, then lists everything again, *deletes* what is still
not needed, and writes that it is *idle*. Each step is a conditional write, so two clean-ups never
run at once.

A session reads the object before it checks that a model's blobs are there, and again before it
publishes the model. If it is the same, nothing was deleted in between.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from blobstore.errors import BlobStoreError, BusyError, ConflictError, NotFoundError
from blobstore.formats.strictjson import encode, parse_object
from blobstore.io.objects import Bucket, ObjectVersion
from blobstore.names import Digest
from blobstore.store.bucket.leases import LONGEST_LEASE_S, Lease, elapsed_s, lease_seconds
from blobstore.store.bucket.object_keys import SWEEP

_MAX_STATE = 128 * 2**20
"""Bytes of the object. One blob takes 67."""
MOST_MARKED = 1_000_000
"""Blobs that one state names."""
_LOOK_S = 1.0


class Phase(StrEnum):
    """What a clean-up does."""

    IDLE = "idle"
    MARKED = "marked"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class SweepState:
    """The object's contents. ``version`` is None if it is missing; ``blobs`` are hex digits."""

    phase: Phase = Phase.IDLE
    holder: str = ""
    lease_s: float = LONGEST_LEASE_S
    blobs: frozenset[str] = frozenset()
    version: ObjectVersion | None = None

    def takes(self, digests: Collection[Digest]) -> bool:
        """Return True if one of the blobs is being removed."""
        return bool(self.blobs) and any(digest.hex in self.blobs for digest in digests)

    def encode(self) -> bytes:
        """Return the bytes of the object; they differ each time, and so do their versions."""
        said = {
            "phase": self.phase.value,
            "holder": self.holder,
            "lease_s": self.lease_s,
            "at": f"{time.time_ns()}",
            "blobs": sorted(self.blobs),
        }
        return encode(said)


def read_state(bucket: Bucket) -> SweepState:
    """Return the state of clean-ups; one that can't be read is a clean-up of every blob.

    Raises: DocumentError, LimitExceededError; as `Bucket.get`.
    """
    try:
        raw, version = bucket.get(SWEEP, limit=_MAX_STATE)
    except NotFoundError:
        return SweepState()
    place = bucket.place(SWEEP)
    try:
        said = parse_object(raw, place, rule="L1", limit=_MAX_STATE)
        blobs = frozenset(str(Digest(text).hex) for text in said["blobs"])
        holder, lease_s = str(said["holder"])[:300], lease_seconds(said["lease_s"])
        return SweepState(Phase(said["phase"]), holder, lease_s, blobs, version)
    except (BlobStoreError, KeyError, TypeError, ValueError) as error:
        message = f"{place} is not the state of a clean-up: {error}"
        hint = "Remove the object when no prune is running."
        raise BusyError(message, path=place, hint=hint) from None


def write_state(bucket: Bucket, state: SweepState) -> SweepState:
    """Write a state in the place of the one whose version it has; return it with the new version.

    Raises: ConflictError if it is another one now.
    """
    version = bucket.replace(SWEEP, state.encode(), state.version)
    return SweepState(state.phase, state.holder, state.lease_s, state.blobs, version)


def reset_if_dead(bucket: Bucket, state: SweepState, now: datetime) -> bool:
    """Write that a clean-up is idle if it has not renewed its state for as long as a lease counts.

    It checks that before it deletes (`Sweep`), and stops. Return False if it seems to be alive.
    """
    try:
        modified = bucket.head(SWEEP).modified
        if now - modified <= timedelta(seconds=state.lease_s):
            return False
        write_state(bucket, SweepState(version=state.version))
    except (ConflictError, NotFoundError):
        pass  # another process was faster
    return True


class SweepGate:
    """A session's view of clean-ups: which blobs must not be used now."""

    def __init__(self, bucket: Bucket, lease: Lease, wait_s: float | None) -> None:
        self._bucket = bucket
        self._lease = lease
        self._wait_s = wait_s
        self._state = read_state(bucket)
        self._read_at = elapsed_s()

    def passed(self, digests: Collection[Digest]) -> SweepState:
        """Return the present state when it removes none of the blobs; wait for that.

        Raises: BusyError after ``wait_s`` seconds (None: as long as a clean-up may take).
        """
        wait_s = self._wait_s
        until = elapsed_s() + (2 * LONGEST_LEASE_S if wait_s is None else wait_s)
        while (state := self._read()).takes(digests):
            if elapsed_s() >= until:
                message = f"{self._bucket.address} is being pruned by {state.holder}"
                hint = "It removes blobs that are needed now: try again later."
                raise BusyError(message, path=self._bucket.address, hint=hint)
            if not reset_if_dead(self._bucket, state, self._lease.now()):
                time.sleep(min(_LOOK_S, self._lease.lease_s / 8))
        return state

    def recent(self, digests: Collection[Digest]) -> None:
        """As `passed`, with a state that is younger than the wait of a clean-up that marks."""
        if elapsed_s() - self._read_at > self._lease.lease_s / 4 or self._state.takes(digests):
            self.passed(digests)

    def _read(self) -> SweepState:
        read_at = elapsed_s()
        self._state = read_state(self._bucket)
        self._read_at = read_at
        return self._state
