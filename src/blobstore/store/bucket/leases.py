"""Leases: objects that name the processes that use a bucket, renewed while they do.

Many sessions write at once, or one clean-up removes blobs (as in restic, internal/restic/lock.go).
A session writes its lease first, and then checks that no clean-up runs: else it takes the lease
back, waits and begins again. A clean-up takes the one object of clean-ups by a conditional write
first, and then checks that no session's lease lives: else it gives up. So one of both sees the
other, whichever is first.

Times are the server's: a lease's object is written, and its time is read back. So the clocks of
clients do not matter, only that they run at the same speed. If a lease could not be renewed in time
(its machine slept), a session takes another one, and checks all its blobs again before its tag
moves; a clean-up stops.

A bucket without conditional writes is refused: two writers could replace each other's models.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from blobstore.errors import BlobStoreError, BusyError, ConflictError, NotFoundError, StorageError
from blobstore.formats.strictjson import encode, parse_object
from blobstore.io.objects import Bucket, ObjectVersion
from blobstore.store.bucket.objects import LEASES, PROBES, SWEEP

_log = logging.getLogger("blobstore.store.bucket")

LEASE_S = 900.0
"""Seconds for which a lease counts after it was renewed."""
LONGEST_LEASE_S = 3600.0
_RENEWALS = 4
_LONGEST_END_S = 10
_MAX_LEASE = 4096
# Bytes of the object of clean-ups: older versions named the blobs in it that they removed.
_MAX_SWEEP = 128 * 2**20
_LOOK_S = 1.0
_IDLE = "idle"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Return the seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def require_conditions(bucket: Bucket) -> datetime:
    """Return the server's time.

    Raises: StorageError for a bucket that ignores conditional writes.
    """
    key = f"{PROBES}{os.urandom(12).hex()}"
    try:
        first = bucket.replace(key, b"1", None)
        is_kept = _is_refused(lambda: bucket.put(key, b"2", if_absent=True))
        bucket.replace(key, b"3", first)
        is_checked = _is_refused(lambda: bucket.put(key, b"4", if_match=first))
        now = bucket.head(key).modified
    finally:
        with suppress(BlobStoreError):
            bucket.delete([key])
    if not (is_kept and is_checked):
        place = bucket.address
        message = f"{place} ignores conditional writes (If-None-Match, If-Match)"
        hint = "Two writers could replace each other's models there. Use one that supports them."
        raise StorageError(message, path=place, hint=hint)
    return now


def _is_refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except ConflictError:
        return True
    return False


class Lease:
    """The lease of a session, which a thread renews until it is closed.

    Raises: as `Bucket.put`.
    """

    def __init__(self, bucket: Bucket, lease_s: float, key: str | None = None) -> None:
        self.key = key or f"{LEASES}{os.urandom(12).hex()}"
        self.lease_s = lease_s
        self._bucket = bucket
        self._mutex = threading.Lock()
        self._has_lapsed = False
        self._ended = threading.Event()
        self._renewed_at = elapsed_s()
        self.renew()
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(self.lease_s / _RENEWALS):
            try:
                self.renew()
            except BlobStoreError as error:
                _log.warning("a lease is not renewed: %s", error)

    def renew(self) -> None:
        with self._mutex:
            renewed_at = elapsed_s()
            self._write()
            self._has_lapsed = self._has_lapsed or self._is_late(renewed_at)
            self._renewed_at = renewed_at

    def _write(self) -> None:
        self._bucket.put(self.key, lease_document(self.lease_s))

    def _is_late(self, now: float) -> bool:
        return now - self._renewed_at > self.lease_s / 2

    @property
    def has_lapsed(self) -> bool:
        """True if it may have expired for a while: this machine slept, or could not renew it."""
        with self._mutex:
            return self._has_lapsed or self._is_late(elapsed_s())

    def now(self) -> datetime:
        """Return the server's time. Raises: as `Bucket.put`."""
        self.renew()
        return self._bucket.head(self.key).modified

    def close(self) -> None:
        """End it. Failures are ignored: it expires."""
        self._ended.set()
        self._thread.join(_LONGEST_END_S)  # else it is written once more, and expires
        with suppress(BlobStoreError):
            self._end()

    def _end(self) -> None:
        self._bucket.delete([self.key])


def lease_document(lease_s: float, **more: Any) -> bytes:
    """Return the object of a lease; it differs each time."""
    holder = f"{socket.gethostname()[:200]}, process {os.getpid()}"
    said = {"holder": holder, "lease_s": lease_s, "renewal": os.urandom(8).hex()}
    return encode(said | more)


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The holder of a lease, and how long it counts after ``modified``, by the server's clock."""

    holder: str
    modified: datetime
    lease_s: float

    @classmethod
    def of(cls, holder: object, seconds: object, modified: datetime) -> LeaseState:
        """Return what an object says; it counts an hour, the longest, if it says no number."""
        if not isinstance(seconds, int | float) or isinstance(seconds, bool):
            seconds = LONGEST_LEASE_S
        # It is bounded before it is a float: JSON's integers may have 4,300 digits.
        bounded = float(min(max(seconds, 0), LONGEST_LEASE_S))
        return cls(str(holder)[:300], modified, bounded)

    def is_live(self, now: datetime) -> bool:
        return now - self.modified < timedelta(seconds=self.lease_s)


def sessions_in(bucket: Bucket) -> Iterator[LeaseState]:
    """Yield all sessions' leases, expired ones too; one that can't be read counts an hour."""
    for state in bucket.objects(LEASES):
        said: dict[str, Any] = {}
        try:
            said = parse_object(bucket.get(state.key, limit=_MAX_LEASE)[0], state.key, rule="L1")
        except NotFoundError:
            continue
        except BlobStoreError as error:
            _log.warning("a lease can't be read: %s", error)
        yield LeaseState.of(said.get("holder", "unknown"), said.get("lease_s"), state.modified)


def read_sweep(bucket: Bucket) -> tuple[ObjectVersion | None, LeaseState | None]:
    """Return the version of the object of clean-ups, and the lease of the running one.

    None: it is missing; none runs. Raises: BusyError if it can't be read.
    """
    try:
        raw, version = bucket.get(SWEEP, limit=_MAX_SWEEP)
        modified = bucket.head(SWEEP).modified
    except NotFoundError:
        return None, None
    place = bucket.place(SWEEP)
    try:
        said = parse_object(raw, place, rule="L1", limit=_MAX_SWEEP)
        if said["phase"] == _IDLE:
            return version, None
        return version, LeaseState.of(said["holder"], said.get("lease_s"), modified)
    except (BlobStoreError, KeyError) as error:
        message = f"{place} is not the state of a prune: {error}"
        hint = "Remove the object when no prune is running."
        raise BusyError(message, path=place, hint=hint) from None


def open_lease(bucket: Bucket, lease_s: float, wait_s: float | None) -> Lease:
    """Return a new lease of a session, while no clean-up runs; wait for that.

    Raises: BusyError after ``wait_s`` seconds (None: as long as a clean-up may take).
    """
    until = elapsed_s() + (2 * LONGEST_LEASE_S if wait_s is None else wait_s)
    while True:
        lease = Lease(bucket, lease_s)
        try:
            _, running = read_sweep(bucket)
            if running is None or not running.is_live(lease.now()):
                return lease
        except BaseException:
            lease.close()
            raise
        lease.close()  # else a clean-up that waits for sessions would wait for this one
        if elapsed_s() >= until:
            raise _prune_error(bucket, running)
        time.sleep(min(_LOOK_S, lease_s / 8))


def _prune_error(bucket: Bucket, running: LeaseState | None) -> BusyError:
    holder = "another process" if running is None else running.holder
    message = f"{bucket.address} is being pruned by {holder}"
    return BusyError(message, path=bucket.address, hint="Try again when it has ended.")


class SweepLease(Lease):
    """The lease of a clean-up: at most one counts at a time, and no session's at the same time.

    Its object stays when it has ended. ``now``: the server's time.

    Raises: BusyError while another clean-up runs.
    """

    def __init__(self, bucket: Bucket, lease_s: float, now: datetime) -> None:
        self._version, running = read_sweep(bucket)
        if running is not None and running.is_live(now):
            raise _prune_error(bucket, running)
        super().__init__(bucket, lease_s, SWEEP)

    def _write(self) -> None:
        document = lease_document(self.lease_s, phase="deleting", blobs=[])
        try:
            self._version = self._bucket.replace(SWEEP, document, self._version)
        except ConflictError:
            raise _prune_error(self._bucket, read_sweep(self._bucket)[1]) from None

    def _end(self) -> None:
        self._bucket.replace(SWEEP, lease_document(0, phase=_IDLE, blobs=[]), self._version)

    def check(self) -> None:
        """Renew it. Raises: BusyError if another process took its place, or it may have expired."""
        self.renew()
        if self.has_lapsed:
            message = f"the prune of {self._bucket.address} could not renew its lease in time"
            raise BusyError(message, path=self._bucket.address, hint="Run prune again.")

    def wait_for_sessions(self, wait_s: float) -> None:
        """Wait until no session's lease lives; new sessions wait. Raises: BusyError."""
        until = elapsed_s() + wait_s
        while True:
            now = self.now()
            live = next((one for one in sessions_in(self._bucket) if one.is_live(now)), None)
            if live is None:
                return
            if elapsed_s() >= until:
                place = self._bucket.address
                message = f"{place} is being written to by {live.holder}"
                hint = f"Try again. A killed session's lease expires {live.lease_s:,.0f} s later."
                raise BusyError(message, path=place, hint=hint)
            time.sleep(min(_LOOK_S, self.lease_s / 8))
