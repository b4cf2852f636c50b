"""Pauses that a server asks for, kept by all requests to it.

One pause holds for every connection to an origin, so that sixteen connections do not ask sixteen
times whether it is over. Servers ask in two ways: ``Retry-After`` with a 429 or 503 (RFC 9110
section 10.2.3), and ``RateLimit: "name";r=0;t=38`` with any reply: no requests are left, for 38
seconds (IETF draft-ietf-httpapi-ratelimit-headers-09). The Hugging Face Hub sends the second one
for windows of five minutes. Source: huggingface_hub@2.4.0 utils/_http.py
`parse_ratelimit_headers`; huggingface/hub-docs docs/hub/rate-limits.md.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable

from blobstore.errors import RemoteError
from blobstore.io.http.replies import Reply
from blobstore.io.http.web_addresses import WebAddress

Origin = tuple[str, str, int]
BUSY = frozenset({429, 503})
_LIMIT = re.compile(r'"[^"]{0,64}"((?:\s*;\s*[a-z]+\s*=\s*[0-9]{1,9})+)', re.ASCII)
_PARAMETER = re.compile(r"([a-z]+)\s*=\s*([0-9]{1,9})", re.ASCII)
_MARGIN_S = 1.0
"""``t`` is in whole seconds."""


def asked_to_wait(reply: Reply) -> float:
    """Return the seconds that a reply asks all requests to its server to wait; 0 for none."""
    waits = [reply.retry_after()] if reply.status in BUSY else []
    for value in reply.values("ratelimit"):
        for limit in _LIMIT.finditer(value):
            said = {name: int(number) for name, number in _PARAMETER.findall(limit[1])}
            if said.get("r") == 0 and "t" in said:
                waits.append(said["t"] + _MARGIN_S)
    return max(waits, default=0.0)


class Pauses:
    """Until when each origin is to be left alone. Safe to share between threads.

    ``longest_s``: a server that asks for more is an error.
    """

    def __init__(self, longest_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._until: dict[Origin, float] = {}
        self._noted: dict[Origin, float] = {}
        self._lock = threading.Lock()

    def see(self, reply: Reply) -> None:
        """Note the pause that a reply asks for."""
        seconds = asked_to_wait(reply)
        if seconds > 0:
            self.set(reply.address.origin, seconds)

    def set(self, origin: Origin, seconds: float) -> None:
        """Leave an origin alone for so long, if it is not left alone for longer."""
        with self._lock:
            until = self._clock() + seconds
            self._until[origin] = max(until, self._until.get(origin, 0.0))

    def is_new(self, origin: Origin) -> bool:
        """Return True for the first failure of a pause: others were under way when it began."""
        with self._lock:
            now = self._clock()
            is_new = now >= self._noted.get(origin, 0.0)
            if is_new:
                self._noted[origin] = max(now, self._until.get(origin, 0.0))
        return is_new

    def left(self, origin: Origin) -> float:
        """Return how many seconds an origin is to be left alone from now on."""
        with self._lock:
            return max(0.0, self._until.get(origin, 0.0) - self._clock())

    def wait(self, address: WebAddress, sleep: Callable[[float], object]) -> None:
        """Wait until a request may go to an address.

        Raises: RemoteError when its server asks for a longer wait than is allowed; as ``sleep``.
        """
        while (left := self.left(address.origin)) > 0:
            if left > self._longest_s:
                raise RemoteError(
                    f"{address}: the server asks to wait for {left:,.0f} seconds",
                    path=str(address),
                    temporary=True,
                    hint="Try again later: what was fetched is kept. With a token servers often"
                    " allow more.",
                )
            sleep(left + random.uniform(0, min(1.0, left / 10)))  # noqa: S311  # not all at once
