"""Bodies that go from the socket into the caller's memory, past the HTTP library.

h11 copies a body four times on its way, in pieces of 64 KiB, which takes a third of a core at
1 GB/s. The library asks a network stream for bytes, and the stream is ours
(`blobstore.io.http.connections`). So for a request whose message is ``direct`` the stream gives the
library a head that says ``Content-Length: 0``, and keeps the body: the caller reads it from the
stream. The library then finds the reply complete, and the connection is used again, if the body was
read to its end.

Only a final reply's head with one plain Content-Length is changed this way. Every other reply is
read through the library: chunked ones, those that an interim reply precedes, and those with lengths
that h11 refuses.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blobstore.io.budget import RequestLimits

MAX_HEAD = 64 * 2**10
_END = re.compile(rb"\r?\n\r?\n")
_LENGTH = re.compile(rb"(?im)^(content-length:[ \t]*)([0-9]{1,18})(?=[ \t]*\r?$)")
_LENGTH_FIELD = re.compile(rb"(?im)^content-length[ \t]*:")
_OTHERWISE = re.compile(rb"(?im)^(?:transfer-encoding[ \t]*:|[ \t])")
_WITH_BODY = re.compile(rb"HTTP/1\.1 (?!204|304)[2-5][0-9][0-9][ \r\n]")
_TICK_S = 0.05
REPORT = 2**20

Came = Callable[[int], None]
"""Is told how many bytes came since it was told last, at least 20 times a second, also when few
came or none: a slow connection has to be found too."""


@dataclass(slots=True)
class DirectBody:
    """A body that the library does not see: ``length`` bytes, the ``first`` of them read."""

    length: int
    first: bytes
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.length

    def into(
        self,
        buffer: memoryview,
        connection: socket.socket,
        limits: RequestLimits,
        silence: Callable[[], float],
        came: Came,
        report: int = REPORT,
    ) -> None:
        """Fill ``buffer`` with the next bytes of the body, from ``connection``.

        ``silence``: how long to wait for the next byte. ``report``: ``came`` is told after so many
        bytes at the latest. Raises: TimeoutError after ``silence``; ConnectionError when the
        connection ends; OSError; as ``came``.
        """
        _wait_in_kernel(connection, min(silence(), _TICK_S))
        done = self._take_first(buffer)
        told, told_at = 0, time.monotonic()
        heard_at = told_at
        try:
            while done < len(buffer):
                part = buffer[done : told + report]
                count = _received(connection, part, silence(), heard_at)
                now = time.monotonic()
                if count:
                    heard_at = now
                    limits.take(count)
                    self.left -= count
                    done += count
                if not count or done - told >= report or now - told_at >= _TICK_S:
                    told, news = done, done - told
                    came(news)
                    told_at = time.monotonic()  # what came took its time
        finally:
            if done > told:
                came(done - told)

    def _take_first(self, buffer: memoryview) -> int:
        count = min(len(self.first), len(buffer))
        buffer[:count] = self.first[:count]
        self.first = self.first[count:]
        self.left -= count
        return count


def _received(connection: socket.socket, buffer: memoryview, wait: float, heard_at: float) -> int:
    """Return how many bytes came; 0 if none came for a while, but some may."""
    try:
        count = _receive(connection, buffer, min(wait, _TICK_S))
    except (TimeoutError, BlockingIOError) as error:
        if time.monotonic() - heard_at >= wait:
            raise TimeoutError from error
        return 0
    if not count:
        raise ConnectionError("the connection ended before the body")
    return count


def _receive(connection: socket.socket, buffer: memoryview, seconds: float) -> int:
    """Fill ``buffer``, or a part of it if the rest does not come in time.

    The kernel fills it in one call, for which it waits `_TICK_S` in all. Python would poll and
    receive for each packet's worth, and let go of the interpreter's lock twice: at 2 GB/s the
    threads did little but take turns with it.
    """
    if type(connection) is not socket.socket:  # TLS gives one record at a time
        connection.settimeout(seconds)
        return connection.recv_into(buffer)
    return connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL)


def _wait_in_kernel(connection: socket.socket, seconds: float) -> None:
    """Let the kernel end a call that waits for so long (socket(7), ``SO_RCVTIMEO``)."""
    if type(connection) is not socket.socket:
        return
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def head_end(received: bytes) -> int | None:
    """Return where a head ends in the bytes that were received; None if it has no end yet."""
    match = _END.search(received)
    return match.end() if match is not None else None


def without_body(received: bytes) -> tuple[bytes, DirectBody] | None:
    """Return a head for the library, and the body that it does not see; None where it has to."""
    end = head_end(received)
    if end is None or _WITH_BODY.match(received) is None:
        return None
    head, first = received[:end], received[end:]
    lengths = _LENGTH.findall(head)
    is_plain = len(lengths) == len(_LENGTH_FIELD.findall(head)) == 1
    if not is_plain or _OTHERWISE.search(head) is not None:
        return None
    length = int(lengths[0][1])
    if len(first) > length or length == 0:
        return None
    return _LENGTH.sub(rb"\g<1>0", head), DirectBody(length, first)
