"""Budget: what reading one checkpoint, or one stored model, may take in all, however many files it has.

Limits of single files do not add up to a limit: ten thousand hard links to one file take no space on a disk, and a shard
index may name as many files on a server. So what is read of a checkpoint is counted in one place, before memory is taken
for it: the length of a header is in its first 8 bytes, that of a document in its directory entry. docs/formats.md has the
largest published checkpoints beside these limits.
"""

from __future__ import annotations

import time
from threading import Lock

from blobstore.errors import LimitExceededError

MAX_TEXT = 200_000_000
"""Bytes of a checkpoint's headers, index and documents, which are held in memory: 12 and 17 MB for DeepSeek-V3."""
MAX_TENSORS = 1_000_000
"""Tensors of a checkpoint."""
MAX_RECEIVED = 200_000_000
"""Bytes that servers send for one checkpoint, heads of replies included."""
SECONDS = 60
SLOWEST_RATE = 192 * 2**10
"""Servers get `SECONDS` for one checkpoint, and more only while they send faster than this, in bytes a second."""


class Budget:
    """Counts what is read of one checkpoint, and refuses what goes beyond its limits. Safe to share between threads.

    ``name`` is the checkpoint's path, address or model name, for messages. The clock starts with the first request.
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

    def take_text(self, nbytes: int, what: str) -> None:
        """Count bytes of a header or document, called ``what``, before they are read. Raises: LimitExceededError."""
        if over := self._over("text", nbytes):
            raise LimitExceededError(
                f"limit exceeded: {what} has {nbytes:,} bytes, which makes {over:,} in headers and documents"
                f" of {self.name}; at most {self._limits['text']:,}"
            )

    def give_back_text(self, nbytes: int) -> None:
        """Take back a part of what was counted: the padding of a header, which is not kept."""
        self._over("text", -nbytes)

    def take_tensors(self, count: int, what: str) -> None:
        """Count the tensors of a header, called ``what``, before more is made of them. Raises: LimitExceededError."""
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
        """Return how long servers may be waited for. Raises: LimitExceededError when the time is over."""
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
        """Count an amount, and return what is used in all if that is beyond the limit, else 0; nothing is counted then."""
        with self._lock:
            total = self._used[kind] + amount
            if total > self._limits[kind]:
                return total
            self._used[kind] = total
            return 0
