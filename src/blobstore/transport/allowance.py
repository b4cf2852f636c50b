"""Limits the bytes and seconds that one errand may take from servers, within the budget of its checkpoint.

The bytes are counted where they leave a socket, so that nothing is forgotten: heads of replies, redirects, retries, the
framing of chunks. Time is counted for the errand as a whole beside the silence between two bytes, so that a server that
sends a byte every ten seconds does not hold anybody for a day.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from blobstore.budget import Budget
from blobstore.errors import RemoteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long servers are waited for, and how often they are asked again.

    An errand ends after ``deadline_s`` and one second more for every ``slowest_rate`` bytes that it may take, with all
    its redirects, retries and waits.
    """

    connect_s: float = 10
    silence_s: float = 20
    deadline_s: float = 60
    slowest_rate: float = 128 * 2**10
    attempts: int = 5
    backoff_s: float = 0.5
    longest_wait_s: float = 30


class Allowance:
    """The bytes and the time of one errand. Its clock starts with its first use. One thread uses it; any may `cancel` it.

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

        Raises: RemoteError when its time is over, or it was cancelled; LimitExceededError when its checkpoint's is over.
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
                # Of the plain socket: SSLSocket's own would pull the TLS state from under the thread that reads.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
