"""Leases: objects that say which sessions write to a bucket, renewed while they do.

A clean-up spares the blobs that were written since the oldest live lease began, and those that a
live lease names. Times are the server's: a lease's object is written, and its time is read back. So
the clocks of clients do not matter, only that they run at the same speed.

A bucket without conditional writes is refused: two writers could replace each other's models.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from blobstore.errors import BlobStoreError, ConflictError, NotFoundError, StorageError
from blobstore.formats.strictjson import encode, parse_object
from blobstore.io.objects import Bucket, ObjectVersion
from blobstore.names import Digest
from blobstore.store.bucket.object_keys import LEASES, PROBES

_log = logging.getLogger("blobstore.store.bucket")

LEASE_S = 900.0
"""Seconds for which a lease counts after it was renewed."""
LONGEST_LEASE_S = 3600.0
_RENEWALS = 4
_LONGEST_END_S = 10
_MAX_LEASE = 4096
_MAX_NAMES = 256 * 2**20
"""Bytes of the names of four million blobs, 65 each."""
_SUFFIX = ".blobs"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_s() -> float:
    """Return the seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A lease of some session, as its objects say.

    ``began``: by the server's clock. ``modified``: when it was renewed last.
    """

    key: str
    holder: str
    began: datetime
    modified: datetime
    lease_s: float

    def is_live(self, now: datetime) -> bool:
        """Return True if it counts at a time of the server's clock."""
        return now - self.modified < timedelta(seconds=self.lease_s)


def require_conditions(bucket: Bucket) -> None:
    """Raise StorageError for a bucket that ignores conditional writes."""
    key = f"{PROBES}{os.urandom(12).hex()}"
    try:
        first = bucket.replace(key, b"1", None)
        is_kept = _is_refused(lambda: bucket.put(key, b"2", if_absent=True))
        bucket.replace(key, b"3", first)
        is_checked = _is_refused(lambda: bucket.put(key, b"4", if_match=first))
    finally:
        with suppress(BlobStoreError):
            bucket.delete([key])
    if not (is_kept and is_checked):
        place = bucket.address
        message = f"{place} ignores conditional writes (If-None-Match, If-Match)"
        hint = "Two writers could replace each other's models there. Use a service that has them."
        raise StorageError(message, path=place, hint=hint)


def _is_refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except ConflictError:
        return True
    return False


class Lease:
    """A session's lease, which a thread renews until it is closed."""

    def __init__(self, bucket: Bucket, lease_s: float) -> None:
        """Raises: as `Bucket.put`."""
        self.lease_s = lease_s
        self.holder = f"{socket.gethostname()[:200]}, process {os.getpid()}"
        self._bucket = bucket
        self._key = f"{LEASES}{os.urandom(12).hex()}"
        self._mutex = threading.Lock()
        self._pinned: set[str] = set()
        self._unwritten = False
        self._has_lapsed = False
        self._ended = threading.Event()
        self._renewed_at = elapsed_s()
        bucket.replace(self._key, self._text(None), None)
        try:
            self.began = bucket.head(self._key).modified
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)
        self._thread.start()

    def _text(self, began: datetime | None) -> bytes:
        """Return the bytes of its object, which differ each time."""
        said = {
            "holder": self.holder,
            "lease_s": self.lease_s,
            "began": began.timestamp() if began is not None else None,
            "renewal": os.urandom(8).hex(),
        }
        return encode(said)

    def _work(self) -> None:
        while not self._ended.wait(self.lease_s / _RENEWALS):
            try:
                self.renew()
            except BlobStoreError as error:
                _log.warning("the lease of a session is not renewed: %s", error)

    def renew(self) -> None:
        """Renew it, and write which blobs it names. Raises: as `Bucket.put`."""
        began_at = elapsed_s()
        with self._mutex:
            names = sorted(self._pinned) if self._unwritten else None
            self._unwritten = False
        try:
            if names is not None:
                self._bucket.put(self._key + _SUFFIX, "\n".join(names).encode())
            self._bucket.put(self._key, self._text(self.began))
        except BaseException:
            with self._mutex:
                self._unwritten = self._unwritten or names is not None
            raise
        with self._mutex:
            self._has_lapsed = self._has_lapsed or began_at - self._renewed_at > self.lease_s / 2
            self._renewed_at = began_at

    def pin(self, digests: Iterable[Digest]) -> None:
        """Name blobs that the session found, and that must stay. Written at the next renewal."""
        new = {digest.hex for digest in digests}
        with self._mutex:
            self._unwritten = self._unwritten or not new <= self._pinned
            self._pinned |= new

    @property
    def has_lapsed(self) -> bool:
        """True if it may have expired for a while: this machine slept, or could not renew it."""
        with self._mutex:
            late = elapsed_s() - self._renewed_at > self.lease_s / 2
            self._has_lapsed = self._has_lapsed or late
            return self._has_lapsed

    def now(self) -> datetime:
        """Return the server's time. Raises: as `Bucket.put`."""
        self.renew()
        return self._bucket.head(self._key).modified

    def close(self) -> None:
        """End it. Failures are ignored: it expires."""
        self._ended.set()
        self._thread.join(_LONGEST_END_S)  # else it is written once more, and expires
        self._remove()

    def _remove(self) -> None:
        with suppress(BlobStoreError):
            self._bucket.delete([self._key, self._key + _SUFFIX])

    @property
    def key(self) -> str:
        """The key of its object."""
        return self._key


def leases_of(bucket: Bucket) -> Iterator[LiveLease]:
    """Yield all leases, expired ones too; one that can't be read counts as long as any may."""
    for state in bucket.objects(LEASES):
        if state.key.endswith(_SUFFIX):
            continue
        holder, began, lease_s = "unknown", state.modified, LONGEST_LEASE_S
        try:
            said = parse_object(bucket.get(state.key, limit=_MAX_LEASE)[0], state.key, rule="L1")
        except NotFoundError:
            continue
        except BlobStoreError as error:
            _log.warning("a lease can't be read: %s", error)
        else:
            holder = str(said.get("holder"))[:300]
            lease_s = lease_seconds(said.get("lease_s"))
            began = min(began, _moment(said.get("began"), state.modified))
        yield LiveLease(state.key, holder, began, state.modified, lease_s)


def pinned_by(bucket: Bucket, key: str) -> set[str]:
    """Return the blobs that the lease of a key names, in hex digits."""
    try:
        raw, _ = bucket.get(key + _SUFFIX, limit=_MAX_NAMES)
    except NotFoundError:
        return set()
    return set(raw.decode("ascii", "replace").split("\n"))


class NewPins:
    """The blobs that leases name since the last look. ``without``: keys of leases that don't count.

    A look lists all leases, and reads what changed.
    """

    def __init__(self, bucket: Bucket, without: Collection[str]) -> None:
        self._bucket = bucket
        self._without = without
        self._seen: dict[str, ObjectVersion] = {}

    def look(self) -> tuple[set[str], set[str]]:
        """Return the keys of all leases, and blobs that some name, in hex digits."""
        listed = {one.key: one.version for one in self._bucket.objects(LEASES)}
        keys = {key for key in listed if not key.endswith(_SUFFIX)}
        pinned: set[str] = set()
        for key in keys.difference(self._without):
            version = listed.get(key + _SUFFIX)
            if version is not None and version != self._seen.get(key):
                self._seen[key] = version
                pinned |= pinned_by(self._bucket, key)
        return keys, pinned


def expired(bucket: Bucket, now: datetime) -> list[str]:
    """Return the keys of leases that have not counted for an hour, with what belongs to them."""
    old = timedelta(seconds=LONGEST_LEASE_S)
    return [state.key for state in bucket.objects(LEASES) if now - state.modified > old]


def lease_seconds(value: object) -> float:
    """Return the seconds that an object says a lease counts; the longest if it says no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return LONGEST_LEASE_S
    # It is bounded before it is a float: JSON's integers may have 4,300 digits.
    return float(min(max(value, 0), LONGEST_LEASE_S))


def _moment(value: object, otherwise: datetime) -> datetime:
    if not isinstance(value, int | float):
        return otherwise
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(value, UTC)
    return otherwise
