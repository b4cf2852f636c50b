"""Filling memory with ranges of files on web servers, by many threads at once.

Every file has a *route*: the address that its bytes come from. Servers often redirect to a signed
address that expires. The first request of a file finds the route, and others wait for it; when the
address has expired, one request asks for another. A range is asked for with the version of the file
that came first (``If-Match``, else ``If-Unmodified-Since``; RFC 9110 section 13.1), and a reply of
another version is an error. After a 412 the file is asked for without the condition: if its ETag is
the same, the server mistakes conditions.

A body that breaks goes on where it broke. A request fails for good after eight attempts that each
brought less than 64 KiB, or less than 16 KiB a second. What is shared by all ranges of an import,
and limits them together, is in `FetchControl`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blobstore.errors import BlobStoreError, NotFoundError, RemoteError
from blobstore.io.budget import RequestLimits, RetryPolicy
from blobstore.io.http.client import HttpClient
from blobstore.io.http.direct import REPORT, Came
from blobstore.io.http.file_routes import FileRoute
from blobstore.io.http.messages import Message
from blobstore.io.http.pauses import BUSY, Pauses
from blobstore.io.http.redirects import Linked, RequestTarget
from blobstore.io.http.replies import Reply, Version, changed, check_part
from blobstore.io.http.siblings import Siblings
from blobstore.io.http.slots import Slots
from blobstore.io.http.web_addresses import WebAddress
from blobstore.io.rates import RateLimit

POLICY = RetryPolicy(attempts=8, longest_wait_s=330)
"""The Hub's windows have 300 seconds."""
MOST_AT_ONCE = 16
_FIRST_AT_ONCE = 4
_SETTLE_S = 0.3
_RATE_OF_ONE = 2**20
"""Bytes a second that one connection can be expected to bring."""
_OVERHEAD = 64 * 2**10
_PROGRESS = 64 * 2**10
_SLOWEST = 16 * 2**10
_LONGEST_BACKOFF_S = 30.0
_RENEWALS = _DROPS = 3
_WHOLE, _PART, _CHANGED, _NOT_SATISFIABLE = 200, 206, 412, 416
_EXPIRED = frozenset({400, 401, 403, 404, 410})

CheckVersion = Callable[[Version, Linked | None], None]
"""Raises CorruptDataError for a version of the file that is not the wanted one."""


class _ExpiredError(Exception):
    """The address of a route has expired."""


class _UnconditionallyError(Exception):
    """The request is to be made without its condition."""


class _SlowError(Exception):
    """The connection is much slower than its siblings."""


class FetchControl:
    """What the requests of one import share: connections, their number, pauses and rate.

    ``connections``: how many at once; None finds it by measurement. ``limit_rate``: bytes a second
    of all together. Safe to share between threads. Raises: UsageError for a rate below 16 KiB.
    """

    def __init__(
        self,
        client: HttpClient,
        connections: int | None = None,
        limit_rate: int | None = None,
        policy: RetryPolicy = POLICY,
    ) -> None:
        self.slots = slots_for(connections, limit_rate)
        self.policy = policy
        self.client = client.sibling(self.slots, policy)
        self.siblings = Siblings()
        self._pauses = Pauses(policy.longest_wait_s)
        self._cancelled = threading.Event()
        self._rate = RateLimit(limit_rate, wait=self.sleep) if limit_rate is not None else None
        self._running: set[RequestLimits] = set()
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """Wait. Raises: RemoteError when the import is cancelled."""
        if self._cancelled.wait(seconds):
            raise RemoteError("cancelled")

    def wait(self, address: WebAddress) -> None:
        """Wait for as long as the server of an address asks. Raises: RemoteError."""
        self._pauses.wait(address, self.sleep)

    @contextmanager
    def request(self, nbytes: int) -> Iterator[RequestLimits]:
        """Give the limits of one request for ``nbytes``."""
        limits = self.client.limits(nbytes + _OVERHEAD)
        with self._lock:
            self._running.add(limits)
        try:
            self.sleep(0)
            yield limits
        finally:
            limits.finish()
            with self._lock:
                self._running.discard(limits)

    def is_paused(self, address: WebAddress) -> bool:
        """Return True while the server of an address asks not to be asked."""
        return self._pauses.left(address.origin) > 0

    @property
    def is_limited(self) -> bool:
        """True if the rate has a limit."""
        return self._rate is not None

    def came(self, nbytes: int) -> None:
        """Count bytes against the limit of the rate."""
        if self._rate is not None:
            self._rate.take(nbytes)

    def see(self, reply: Reply) -> None:
        """Take note of a reply's head."""
        self._pauses.see(reply)

    def failed(self, address: WebAddress, error: RemoteError, backoff_s: float) -> None:
        """Wait after a failure: this request only, or all, if the server is busy."""
        if error.status not in BUSY:
            self.sleep(backoff_s)
            return
        self._pauses.set(address.origin, backoff_s)
        if self._pauses.is_new(address.origin):
            self.slots.back_off()

    def cancel(self) -> None:
        """End all requests, from any thread, and let no other begin."""
        self._cancelled.set()
        with self._lock:
            running = list(self._running)
        for limits in running:
            limits.cancel()


def slots_for(connections: int | None, limit_rate: int | None) -> Slots:
    """Return the slots of an import; as few as its rate needs, if their number is not given."""
    if connections is not None:
        return Slots(connections)
    needed = MOST_AT_ONCE if limit_rate is None else max(1, limit_rate // _RATE_OF_ONE)
    most = min(MOST_AT_ONCE, needed)
    return Slots(most, fixed=False, first=_FIRST_AT_ONCE, settle_s=_SETTLE_S)


@dataclass(slots=True)
class _Filling:
    """How far one call has come."""

    begin: int
    buffer: memoryview
    came: Came | None = None
    done: int = 0
    attempt: int = 0
    renewals: int = 0
    drops: int = 0

    @property
    def left(self) -> int:
        return len(self.buffer) - self.done

    @property
    def range(self) -> tuple[int, int]:
        return self.begin + self.done, self.begin + len(self.buffer)


class RangeFiller:
    """Fills memory with ranges of one file at ``url``. Safe to share between threads.

    ``version``: the file's, if it is known before the first reply; ``check`` refuses others.
    ``target``: where redirects from ``url`` led before. Raises: UsageError when ``url`` is not a
    web address.
    """

    def __init__(
        self,
        control: FetchControl,
        url: str,
        version: Version | None,
        check: CheckVersion,
        target: RequestTarget | None = None,
    ) -> None:
        self._control = control
        self._start = control.client.start(url)
        self._name = str(self._start.address)
        self._route = FileRoute(self._start, target)
        self._is_checked = False
        self._version = version
        self._is_conditional = True
        self._check = check

    def fill(self, begin: int, buffer: memoryview, came: Came | None = None) -> None:
        """Fill ``buffer`` with the bytes from byte ``begin`` on; ``came`` is told of them.

        Raises: CorruptDataError for another version of the file; NotFoundError; RemoteError.
        """
        filling = _Filling(begin, buffer, came)
        while filling.left:
            address = self._route.address
            self._control.wait(address)
            before, since = filling.done, time.monotonic()
            try:
                self._ask(filling, address)
            except _ExpiredError:
                filling.renewals += 1
            except _UnconditionallyError:
                continue
            except _SlowError:
                filling.drops += 1
            except RemoteError as error:
                if not error.temporary:
                    raise
                self._recover(filling, filling.done - before, since, address, error)

    def _recover(
        self,
        filling: _Filling,
        brought: int,
        since: float,
        address: WebAddress,
        error: RemoteError,
    ) -> None:
        """Wait before the next attempt, unless this one brought something."""
        if brought >= max(_PROGRESS, _SLOWEST * (time.monotonic() - since)):
            filling.attempt = filling.renewals = 0
            return
        policy = self._control.policy
        backoff_s = policy.backoff_s * 2**filling.attempt * random.uniform(0.5, 1)  # noqa: S311
        filling.attempt += 1
        if filling.attempt >= policy.attempts:
            raise error
        if filling.attempt == 1 and error.status is None:
            return  # it may have been a kept connection that the server closed meanwhile
        self._control.failed(address, error, min(backoff_s, _LONGEST_BACKOFF_S))

    def _ask(self, filling: _Filling, address: WebAddress) -> None:
        """Make one request, and take its bytes."""
        control = self._control
        with control.request(filling.left) as limits, control.slots.slot() as moved:
            if not control.is_paused(address):  # since this thread waits for a slot
                self._ask_now(filling, limits, moved)

    def _ask_now(
        self, filling: _Filling, limits: RequestLimits, moved: Callable[[int], None]
    ) -> None:
        control = self._control
        with self._route.take() as (target, number):  # what it found may change the condition
            message, is_conditional = self._message(*filling.range)
            with control.client.once(message, target, limits, control.see) as (reply, at):
                if reply.status == _CHANGED and is_conditional:
                    # Some servers answer so although the ETag is right: without the condition the
                    # reply says which version there is.
                    self._is_conditional = False
                    raise _UnconditionallyError
                count = self._accepted(reply, at, number, filling)
                if number is None:
                    self._route.found(at)
                self._read(reply, filling, count, moved)

    def _message(self, begin: int, end: int) -> tuple[Message, bool]:
        """Return the request for a range, and whether it has a condition."""
        version = self._version if self._is_conditional else None
        condition = version.precondition if version is not None else ()
        fields = (("Range", f"bytes={begin}-{end - 1}"), *condition)
        return Message("GET", fields, direct=True), bool(condition)

    def _read(
        self, reply: Reply, filling: _Filling, count: int, moved: Callable[[int], None]
    ) -> None:
        run = self._control.siblings.start()
        stop = filling.done + count

        def came(nbytes: int) -> None:
            filling.done += nbytes
            moved(nbytes)
            self._control.came(nbytes)
            if filling.came is not None:
                filling.came(nbytes)
            is_slow = run.is_slow(nbytes, stop - filling.done)
            if is_slow and filling.drops < _DROPS:
                raise _SlowError

        buffer = filling.buffer[filling.done : stop]
        # Each report takes the interpreter's lock, so fewer are better where no bytes count.
        counts = filling.came is not None or self._control.is_limited
        report = REPORT if counts else len(buffer)
        try:
            reply.readinto(buffer, self._control.policy.silence_s, came, report)
        finally:
            self._control.siblings.end(run, whole=filling.done == stop)

    def _accepted(
        self,
        reply: Reply,
        at: RequestTarget,
        number: int | None,
        filling: _Filling,
    ) -> int:
        """Return how many bytes of the range a reply brings. Raises: as `fill`."""
        begin, end = filling.range
        if reply.status == _PART:
            stop, size = check_part(reply, begin, end)
        elif reply.status == _WHOLE:
            if begin != 0 or reply.length != end:
                raise reply.refuse("answers a request for a range with a whole file")
            stop = size = end
        else:
            raise self._failure(reply, at, number, filling)
        version = Version.of(reply, size)
        self._check_same(version)
        if number is None or not self._is_checked:
            self._check(version, at.linked or Linked.of(reply))
            self._is_checked = True
        self._version = self._version or version
        return stop - begin

    def _check_same(self, version: Version) -> None:
        if self._version is None:
            return
        self._version.check_same(version, self._name)
        if not self._is_conditional and version.etag != self._version.etag:
            raise changed(self._name)

    def _failure(
        self, reply: Reply, at: RequestTarget, number: int | None, filling: _Filling
    ) -> Exception:
        status = reply.status
        if status in (_CHANGED, _NOT_SATISFIABLE):
            return changed(self._name)
        may_renew = number is not None and filling.renewals < _RENEWALS
        if status in _EXPIRED and may_renew and number is not None and at != self._start:
            self._route.expired(number)
            return _ExpiredError()
        failure: BlobStoreError = reply.failure()
        reply.discard()
        if isinstance(failure, NotFoundError | RemoteError) and failure.path != self._name:
            failure = failure.at(self._name)
        return failure
