"""Connections: uvicorn's HTTP/1.1 over h11, with limits on time, and files sent without a copy.

uvicorn has no limit on the time of a head, and none for a client that does not read; and it sends
only bytes that Python holds. So `Connection` extends its protocol class, which `uvicorn.Config`
takes as ``http``. It relies on these facts of uvicorn 0.54 (uvicorn/protocols/http/h11_impl.py),
which tests/unit/web/test_uvicorn.py checks:

* the server calls ``http(config=, server_state=, app_state=, _loop=)`` for each connection, and
  keeps those that are open in ``server_state.connections``;
* ``H11Protocol`` calls ``self.app(scope, receive, send)`` in a task for each request, and has
  ``loop``, ``transport``, ``connections``, ``conn`` (the h11 connection), ``cycle`` (the request
  that is answered, or was last) and ``flow``, whose ``drain()`` returns when the transport has
  called ``resume_writing``;
* a cycle has ``response_started``, ``response_complete`` and ``disconnected``, and its ``send``
  does nothing while ``disconnected`` is true;
* ``send_400_response`` answers what h11 refuses to parse.

Files: the extension "Zero Copy Send" of ASGI (`SENDS_FILES`). h11 0.16 is told the number of bytes
only, and gives back what has to be written around them (``Connection.send_with_data_passthrough``,
made for sendfile: h11 docs/source/api.rst).

A body is never read: a request that has one is answered, and its connection closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected

from blobstore.errors import BlobStoreError
from blobstore.web.file_sending import SENDS_FILES, BrokenOffError, FileSending

_log = logging.getLogger("blobstore.web")

_INCOMPLETE = (h11.IDLE, h11.SEND_BODY)
_CLOSE = (b"connection", b"close")
_TCP_INFO = 192
"""Bytes of Linux's struct tcp_info up to what is needed (linux/include/uapi/linux/tcp.h)."""
_DISCARD = struct.pack("ii", 1, 0)
_BYTES_ACKED = struct.Struct("=120xQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may take.

    ``connections``: open at once; further ones are answered with 503, and closed unheard from twice
    as many on. ``head_nbytes``: of a request's head. ``request_s``: seconds for a request, from its
    first byte, or from the connection. ``idle_s``: seconds between requests. ``stall_s``: seconds
    in which a client has to take ``stall_nbytes`` of what waits for it. ``end_s``: seconds for
    requests in flight when the server ends.
    """

    connections: int = 1000
    head_nbytes: int = 16 * 2**10
    request_s: float = 10
    idle_s: float = 30
    stall_s: float = 60
    stall_nbytes: int = 64 * 2**10
    end_s: float = 8


class _Place:
    """Bytes that h11 counts and does not see."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


class Connection(H11Protocol):
    """A client's connection. ``threads`` send files."""

    def __init__(self, *, limits: Limits, threads: Executor, **given: Any) -> None:
        super().__init__(**given)
        self._application: Any = self.app
        self.app = self._answer  # uvicorn calls it
        self._limits = limits
        self._threads = threads
        self._sending: FileSending | None = None
        self._files_nbytes = 0
        self._asked_since: float | None = None
        """When the request that has not come whole began."""
        self._taken = (0, 0.0)
        """Bytes that the client had taken, and when."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self._limits.connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(0)  # so that `drain` waits until all is written
        self._asked_since = self.loop.time()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._asked_since is None:
            self._asked_since = self.loop.time()
        super().data_received(data)
        if self.conn.their_state not in _INCOMPLETE:
            self._asked_since = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.stop()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, unless an answer has begun: then only close."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _watch(self) -> None:
        """Drop the client if it is too slow; else look again soon.

        This process may have been stopped for so long, and the client's bytes may lie here. asyncio
        reads what lies here before it calls what is due, so the client is dropped with the next
        call only.
        """
        if self._is_too_slow():
            self._timer = self.loop.call_later(0, self._drop_if_too_slow)
            return
        shortest = min(self._limits.request_s, self._limits.stall_s)
        self._timer = self.loop.call_later(shortest / 4, self._watch)

    def _drop_if_too_slow(self) -> None:
        if self._is_too_slow():
            self._drop()
        else:
            self._watch()

    def _is_too_slow(self) -> bool:
        now, began = self.loop.time(), self._asked_since
        return (began is not None and now - began >= self._limits.request_s) or self._stalls(now)

    def _drop(self) -> None:
        """Close the connection, and discard what the system keeps for the client: up to 4 MB."""
        tcp: socket.socket = self.transport.get_extra_info("socket")
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
        self.transport.abort()

    def _stalls(self, now: float) -> bool:
        """Return True if bytes wait for a client that takes too few."""
        sending = self._sending
        waits = self.transport.get_write_buffer_size() > 0
        taken, (before, since) = self._bytes_taken(), self._taken
        is_moving = not 0 <= taken - before < self._limits.stall_nbytes
        if is_moving or not (waits or (sending is not None and sending.is_waiting)):
            self._taken = (taken, now)
            return False
        return now - since >= self._limits.stall_s

    def _bytes_taken(self) -> int:
        """Return the bytes that the client's system has confirmed.

        Other systems than Linux do not tell: there, those that went to the socket, as far as that
        is known.
        """
        if sys.platform == "linux":
            tcp: socket.socket = self.transport.get_extra_info("socket")
            found = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
            if len(found) >= _BYTES_ACKED.size:
                return int(_BYTES_ACKED.unpack_from(found)[0])
        sent = self._files_nbytes + (self._sending.sent if self._sending is not None else 0)
        return sent - self.transport.get_write_buffer_size()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application, with the extension for files."""
        cycle = self.cycle
        closes = _has_body(scope["headers"])

        async def sent(message: Any) -> None:
            if message["type"] == SENDS_FILES:
                await self._send_file(message)
                message = {"type": "http.response.body", "more_body": message.get("more_body")}
            elif message["type"] == "http.response.start" and closes:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            if cycle.disconnected:
                raise ClientDisconnected
            await send(message)

        scope["extensions"] = {**scope.get("extensions", {}), SENDS_FILES: {}}
        try:
            await self._application(scope, receive, sent)
        except ClientDisconnected:
            pass
        except BrokenOffError as error:
            _log.error("%s", error)
            self._break_off()
        except asyncio.CancelledError:  # the server ends, and this took too long
            self._break_off()

    def _break_off(self) -> None:
        self.cycle.disconnected = True
        self.transport.abort()

    async def _send_file(self, message: Any) -> None:
        """Send ``count`` bytes of ``file`` from ``offset``; the connection ends if that fails."""
        cycle = self.cycle
        await self.flow.drain()
        if cycle.disconnected:
            return
        parts: Iterable[Any] = (
            self.conn.send_with_data_passthrough(h11.Data(data=_Place(message["count"]))) or ()  # type: ignore[arg-type]
        )
        tcp = self.transport.get_extra_info("socket").fileno()
        try:
            for part in parts:
                if isinstance(part, _Place):
                    await self.flow.drain()
                    self._sending = FileSending(self._threads, tcp, message["file"].fileno())
                    await self._sending.run(message.get("offset") or 0, part.nbytes)
                else:
                    self.transport.write(part)
        except (OSError, BlobStoreError) as error:
            if not isinstance(error, ConnectionError):
                _log.error("a file can't be sent: %s", error)
            self._break_off()
        finally:
            if self._sending is not None:
                self._files_nbytes += self._sending.sent
                self._sending = None


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
        for name, value in headers
    )
