"""Budgets: what reading a checkpoint, or a stored model, may take in all.

And what one request may take of that.

Limits of single files do not add up to a limit: ten thousand hard links to one file take no space
on a disk, and a shard index may name as many files on a server. So what is read of a checkpoint is
counted in one place, before memory is taken for it: the length of a header is in its first 8 bytes,
that of a document in its directory entry. docs/formats.md has the largest published checkpoints
beside these limits.

What a request takes (`Allowance`) is counted where bytes leave a socket, so that nothing is
forgotten: heads of replies, redirects, retries, the framing of chunks. Time is counted for it as a
whole beside the silence between two bytes, so that a server that sends a byte every ten seconds
can't keep a command waiting for a day.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock

from blobstore.errors import LimitExceededError, RemoteError

MAX_TEXT = 200_000_000
"""Bytes of a checkpoint's headers, index and documents, which are held in memory: 12 and 17 MB for DeepSeek-V3."""
MAX_STORED_TEXT = 100_000_000
"""Bytes of a stored model's headers: hundreds each of at most 110,000 blobs, and their names and metadata become objects."""
MAX_TENSORS = 1_000_000
"""Tensors of a checkpoint."""
MAX_RECEIVED = 200_000_000
"""Bytes that servers send for one checkpoint, heads of replies included."""
SECONDS = 60
SLOWEST_RATE = 192 * 2**10
"""Servers get `SECONDS` for one checkpoint, and more only while they send faster than this, in bytes a second."""


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
        self._limits = {"text": text, "tensors": tensors, "received": received}
        self._used = dict.fromkeys(self._limits, 0)
        self._seconds = seconds
        self._start: float | None = None
        self._lock = Lock()

    @classmethod
    def of_stored(cls, name: str) -> Budget:
        """Return the budget of a stored model."""
        return cls(name, text=MAX_STORED_TEXT)

    def take_text(self, nbytes: int, what: str) -> None:
        """Count bytes of a header or document, called ``what``, before they are read.

        Raises: LimitExceededError.
        """
        if over := self._over("text", nbytes):
            raise LimitExceededError(
                f"limit exceeded: {what} has {nbytes:,} bytes, which makes {over:,} in headers and documents"
                f" of {self.name}; at most {self._limits['text']:,}"
            )

    def give_back_text(self, nbytes: int) -> None:
        """Take back a part of what was counted: the padding of a header, which is not kept."""
        self._over("text", -nbytes)

    def take_tensors(self, count: int, what: str) -> None:
        """Count the tensors of a header, called ``what``, before more is made of them.

        Raises: LimitExceededError.
        """
        if over := self._over("tensors", count):
            raise LimitExceededError(
                f"limit exceeded: {what} has {count:,} tensors, which makes {over:,} in {self.name};"
                f" at most {self._limits['tensors']:,}"
            )

    def receive(self, nbytes: int) -> None:
        """Count bytes that servers sent. Raises: LimitExceededError."""
        if over := self._over("received", nbytes):
            raise LimitExceededError(
                f"limit exceeded: servers sent {over:,} bytes for the headers and documents of {self.name};"
                f" at most {self._limits['received']:,}"
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
                f"limit exceeded: servers sent {received:,} bytes for {self.name} in {now - self._start:,.3g} seconds;"
                f" at most {allowed:,.3g} seconds are allowed for that many bytes",
                hint="Try again later, or download the checkpoint first.",
            )
        return left

    def _over(self, kind: str, amount: int) -> int:
        """Count an amount, and return what is used in all if that is beyond the limit, else 0.

        Nothing is counted then.
        """
        with self._lock:
            total = self._used[kind] + amount
            if total > self._limits[kind]:
                return total
            self._used[kind] = total
            return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long servers are waited for, and how often they are asked again.

    An errand ends after ``deadline_s`` and one second more for every ``slowest_rate`` bytes that it
    may take, with all its redirects, retries and waits.
    """

    connect_s: float = 10
    silence_s: float = 20
    deadline_s: float = 60
    slowest_rate: float = 128 * 2**10
    attempts: int = 5
    backoff_s: float = 0.5
    longest_wait_s: float = 30


class Allowance:
    """The bytes and the time of one errand. Its clock starts with its first use.

    One thread uses it; any may `cancel` it.

    ``budget`` is that of the checkpoint that the errand is for, None for a file by itself.
    """

    def __init__(self, patience: Patience, total: int, budget: Budget | None = None) -> None:
        self._patience = patience
        self._total = total
        self._budget = budget
        self._taken = 0
        self._start: float | None = None
        self._cancelled = Event()
        self._socket: socket.socket | None = None

    @property
    def taken(self) -> int:
        """Bytes taken from sockets until now."""
        return self._taken

    @property
    def left(self) -> int:
        """Bytes that may still be taken."""
        return self._total - self._taken

    def extend(self, total: int) -> None:
        """Allow ``total`` bytes in all, where that is more than now."""
        self._total = max(self._total, total)

    def take(self, nbytes: int) -> None:
        """Count bytes that were taken. Raises: LimitExceededError when the budget is spent."""
        self._taken += nbytes
        if self._budget is not None:
            self._budget.receive(nbytes)

    def seconds_left(self, address: object) -> float:
        """Return how long the errand may go on.

        Raises: RemoteError when its time is over, or it was cancelled; LimitExceededError when its
        checkpoint's is over.
        """
        if self._cancelled.is_set():
            raise RemoteError(f"{address}: cancelled", path=str(address))
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        allowed = self._patience.deadline_s + self._total / self._patience.slowest_rate
        left = self._start + allowed - now
        if left <= 0:
            what = f"{address} is too slow: it was given {allowed:.3g} seconds in all"
            raise RemoteError(what, path=str(address), temporary=True)
        return left if self._budget is None else min(left, self._budget.seconds_left())

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until the errand is cancelled."""
        self._cancelled.wait(seconds)

    def use(self, connection: socket.socket) -> None:
        """Remember which connection the errand waits for."""
        self._socket = connection

    def finish(self) -> None:
        """Forget the connection: it is kept alive, and may be another errand's from now on."""
        self._socket = None

    def cancel(self) -> None:
        """End the errand, from any thread: a read that waits ends at once, and nothing more is asked."""
        self._cancelled.set()
        if (connection := self._socket) is not None:
            with suppress(OSError):  # the peer was faster
                # Of the plain socket: SSLSocket's own would pull the TLS state from under the
                # thread that reads.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


MAX_HEADER = 100_000_000
