"""Budgets: what reading a checkpoint, or a stored model, may take in all, and one request of that.

Limits of single files do not add up to a limit: ten thousand hard links to one file take no space
on a disk, and a shard index may name as many files on a server. So what is read of a checkpoint is
counted in one place, before memory is taken for it: the length of a header is in its first 8 bytes,
that of a document in its directory entry. docs/formats.md has the largest published checkpoints
in addition to these limits.

What a request takes (`RequestLimits`) is counted where bytes leave a socket, so that heads of
replies, redirects, retries and the framing of chunks all count. Besides the silence between two
bytes a request's whole time is limited: a server that sends a byte every ten seconds can't keep a
command waiting for a day.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING

from blobstore.errors import LimitExceededError, RemoteError

if TYPE_CHECKING:
    import socket

MAX_TEXT = 200_000_000
"""Bytes of a checkpoint's headers, index and documents, kept in memory.

DeepSeek-V3 has 12 MB of headers and a 17 MB index.
"""
MAX_STORED_TEXT = 100_000_000
"""Bytes of a stored model's headers: of up to 110,000 blobs, hundreds of bytes each."""
MAX_TENSORS = 1_000_000
"""Tensors of a checkpoint."""
MAX_RECEIVED = 200_000_000
"""Bytes that servers send for one checkpoint, heads of replies included."""
_OTHER_FILES = 256
SECONDS = 60
SLOWEST_RATE = 192 * 2**10
"""Bytes a second: servers get `SECONDS` for one checkpoint, and more while they are faster."""


class Budget:
    """Counts what is read of one checkpoint, and refuses what goes beyond its limits.

    Safe to share between threads.

    ``name`` is the checkpoint's path, address or model name, for messages. The clock starts with
    the first request.
    """

    def __init__(
        self,
        name: str,
        *,
        text: int = MAX_TEXT,
        tensors: int = MAX_TENSORS,
        received: int = MAX_RECEIVED,
        seconds: float = SECONDS,
    ) -> None:
        self.name = name
        self._limits = Counter(text=text, tensors=tensors, received=received)
        self._used = Counter[str]()
        self._seconds = seconds
        self._start: float | None = None
        self._lock = Lock()

    @classmethod
    def of_stored(cls, name: str) -> Budget:
        return cls(name, text=MAX_STORED_TEXT)

    def take_text(self, nbytes: int, what: str) -> None:
        """Count bytes of a header or document, called ``what``, before they are read.

        Raises: LimitExceededError.
        """
        self._take(
            "text",
            nbytes,
            f"{what} has {nbytes:,} bytes, which makes",
            f"in headers and documents of {self.name}",
        )

    def give_back_text(self, nbytes: int) -> None:
        """Take back a part of what was counted: the padding of a header, which is not kept."""
        self._take("text", -nbytes)

    def take_tensors(self, count: int, what: str) -> None:
        """Count the tensors of a header, called ``what``, before more is made of them.

        Raises: LimitExceededError.
        """
        self._take(
            "tensors", count, f"{what} has {count:,} tensors, which makes", f"in {self.name}"
        )

    def took_headers(self, nbytes: int, tensors: int) -> bool:
        """Count short headers that were read, if all are within the limits; else return False."""
        with self._lock:
            used = self._used + Counter(text=nbytes, tensors=tensors)
            if fit := used <= self._limits:
                self._used = used
            return fit

    def receive(self, nbytes: int) -> None:
        """Count bytes that servers sent. Raises: LimitExceededError."""
        self._take(
            "received",
            nbytes,
            "servers sent",
            f"bytes for the headers and documents of {self.name}",
        )

    def seconds_left(self) -> float:
        """Return how long servers may be waited for.

        Raises: LimitExceededError when the time is over.
        """
        now = time.monotonic()
        with self._lock:
            self._start = now if self._start is None else self._start
            received = self._used["received"]
        allowed = max(self._seconds, received / SLOWEST_RATE)
        left = self._start + allowed - now
        if left <= 0:
            raise LimitExceededError(
                f"limit exceeded: servers sent {received:,} bytes for {self.name} in"
                f" {now - self._start:,.3g} seconds; at most {allowed:,.3g} seconds are allowed"
                " for that many bytes",
                hint="Try again later, or download the checkpoint first.",
            )
        return left

    def _take(self, kind: str, amount: int, before: str = "", after: str = "") -> None:
        limit = self._limits[kind]
        with self._lock:
            total = self._used[kind] + amount
            if total > limit:
                raise LimitExceededError(
                    f"limit exceeded: {before} {total:,} {after}; at most {limit:,}"
                )
            self._used[kind] = total


def allow_open_files(count: int) -> None:
    """Raise the process's soft limit of open files for ``count`` more, where the system allows it.

    A dense model of 126 layers has 1,137 blobs, and checkpoints have hundreds of shards, where
    Linux's usual soft limit is 1,024 files and macOS's 256.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # opening one file too many is a typed error
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait for servers, and how often to ask again.

    A request, with its redirects, retries and waits, ends after ``deadline_s`` and one second more
    for every ``slowest_rate`` bytes that it may take.
    """

    connect_s: float = 10
    silence_s: float = 20
    deadline_s: float = 60
    slowest_rate: float = 128 * 2**10
    attempts: int = 5
    backoff_s: float = 0.5
    longest_wait_s: float = 30


class Cancellation(Event):
    """Ends the requests of one job, from any thread, when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: set[socket.socket] = set()

    def check(self, address: object) -> None:
        if self.is_set():
            raise RemoteError(f"{address}: cancelled", path=str(address))

    def add(self, connection: socket.socket) -> None:
        self._sockets.add(connection)

    def discard(self, connection: socket.socket) -> None:
        """Forget a connection: it is kept alive, and may serve another job now."""
        self._sockets.discard(connection)

    def set(self) -> None:
        """End all requests: waiting reads end at once, and no other begins."""
        import socket  # which commands on local files do not load

        super().set()
        for connection in list(self._sockets):
            with suppress(OSError):  # the peer was faster
                # Of the plain socket: SSLSocket's own would pull the TLS state from under the
                # thread that reads.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


class RequestLimits:
    """The bytes and the time of one request, retries included. The clock starts with its first use.

    One thread uses it. ``taken`` counts its bytes. ``budget`` is the budget of the checkpoint that
    the request is for; None for a single file. ``sent``: bytes of the request's own body, which are
    given time too.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        total: int,
        budget: Budget | None = None,
        *,
        sent: int = 0,
        cancellation: Cancellation | None = None,
    ) -> None:
        self.policy = policy
        self._sent = sent
        self._total = total
        self._budget = budget
        self.taken = 0
        self._start: float | None = None
        self.cancellation = cancellation or Cancellation()

    @property
    def left(self) -> int:
        return self._total - self.taken

    def extend(self, total: int) -> None:
        """Allow ``total`` bytes in all, where that is more than now."""
        self._total = max(self._total, total)

    def restart(self, total: int) -> None:
        self._total = total
        self.taken = 0
        self._start = None

    def take(self, nbytes: int) -> None:
        """Count bytes that were taken. Raises: LimitExceededError when the budget is spent."""
        self.taken += nbytes
        if self._budget is not None:
            self._budget.receive(nbytes)

    def seconds_left(self, address: object) -> float:
        """Return how long the request may go on.

        Raises: RemoteError when its time is over, or it was cancelled; LimitExceededError when its
        checkpoint's time is over.
        """
        self.cancellation.check(address)
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        allowed = self.policy.deadline_s + (self._total + self._sent) / self.policy.slowest_rate
        left = self._start + allowed - now
        if left <= 0:
            raise RemoteError(
                f"{address} is too slow: not finished after {allowed:.3g} seconds",
                path=str(address),
                temporary=True,
            )
        return left if self._budget is None else min(left, self._budget.seconds_left())


MAX_HEADER = 100_000_000
