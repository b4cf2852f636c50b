"""``/v1/``: the model of ``serve --lm`` for clients of OpenAI's protocol.

An answer is written by a thread, and read here from a queue, so the other routes do not wait. A
page of another site could send a request that costs hours of computing, even if it can't read the
answer: so an ``Origin`` has to be the server's own, or an allowed one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress

from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from blobstore.errors import BlobStoreError, BusyError, UsageError
from blobstore.mlx_lm.chat_requests import MAX_BODY, error_document
from blobstore.mlx_lm.chat_service import ChatService
from blobstore.web.guard import CHAT
from blobstore.web.problems import BUSY, METHOD_NOT_ALLOWED

_FORBIDDEN, _TOO_LARGE = 403, 413
_MOST_REQUESTS = 64
"""Requests that are answered at once, or wait for it. Each has a thread."""
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, *"),  # `*` does not include it
    (b"access-control-max-age", b"600"),
)
_END = None


class Chat:
    """The application of ``/v1/``. ``origins``: of other sites whose pages may use it."""

    def __init__(self, service: ChatService, origins: Iterable[str] = ()) -> None:
        self._service = service
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._running = 0

    def route(self) -> BaseRoute:
        """Return the route for the application."""
        return Route(f"{CHAT}{{path:path}}", self, methods=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        origin = _header(scope, b"origin")
        is_other = bool(origin) and not _is_own(origin, scope)
        is_allowed = "*" in self._origins or origin.lower() in self._origins
        if is_other and not is_allowed:
            hint = "Start the server with --allow-origin ORIGIN."
            error = UsageError("pages of other origins may not use the model", hint=hint)
            await _refuse(send, _FORBIDDEN, error)
            return
        sent = _with_origin(send, origin) if is_other else send
        if scope["method"] == "OPTIONS":
            await _preflight(sent)
        elif scope["method"] not in ("GET", "POST"):
            await _refuse(sent, METHOD_NOT_ALLOWED, UsageError("use GET or POST"))
        elif self._running >= _MOST_REQUESTS:
            await _refuse(sent, BUSY, BusyError("too many requests at once"))
        else:
            self._running += 1
            try:
                await self._answer(scope, receive, sent)
            finally:
                self._running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(scope, receive)
        if body is None:
            error = UsageError(f"the request has over {MAX_BODY:,} bytes")
            await _refuse(send, _TOO_LARGE, error)
            return
        exchange = _Exchange(asyncio.get_running_loop())
        request = (scope["method"], scope["path"], body)
        threading.Thread(target=self._work, args=(request, exchange), daemon=True).start()
        gone = asyncio.create_task(_until_gone(receive, exchange))
        try:
            await _send(exchange, send)
        finally:
            exchange.end()
            gone.cancel()

    def _work(self, request: tuple[str, str, bytes], exchange: _Exchange) -> None:
        try:
            with suppress(ConnectionError):
                self._service.answer(*request, exchange)
        finally:
            exchange.put(_END)


class _Exchange:
    """What a thread writes, for the loop to send."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.is_ended = False

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
        self.put({"type": "http.response.start", "status": status, "headers": pairs})

    def write(self, data: bytes) -> int:
        self.check()
        self.put({"type": "http.response.body", "body": data, "more_body": True})
        return len(data)

    def flush(self) -> None:
        pass

    def check(self) -> None:
        if self.is_ended:
            raise ConnectionAbortedError

    def end(self) -> None:
        self.is_ended = True

    def put(self, message: Message | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the client with it
            self._loop.call_soon_threadsafe(self.messages.put_nowait, message)


async def _send(exchange: _Exchange, send: Send) -> None:
    has_started = False
    while (message := await exchange.messages.get()) is not _END:
        if exchange.is_ended:
            return
        has_started = True
        await send(message)
    if not has_started:
        start = {"type": "http.response.start", "status": 500, "headers": []}
        await send(start)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive, exchange: _Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.end()
    exchange.put(_END)


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """Return a request's body; None for one that is too large."""
    length = _header(scope, b"content-length")
    if length.isdecimal() and int(length[:20]) > MAX_BODY:
        return None
    parts, size, is_whole = [], 0, False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        is_whole = not message.get("more_body", False)
        if size > MAX_BODY:
            return None
    return b"".join(parts)


def _header(scope: Scope, wanted: bytes) -> str:
    found = (value for name, value in scope["headers"] if name == wanted)
    return str(next(found, b"").decode("latin-1"))


def _is_own(origin: str, scope: Scope) -> bool:
    """Return True for the origin of a page of this server, whose ``Host`` was checked."""
    return origin.partition("://")[2].lower() == _header(scope, b"host").lower()


def _with_origin(send: Send, origin: str) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message["headers"], *own]}
        await send(message)

    return sent


async def _refuse(send: Send, status: int, error: BlobStoreError) -> None:
    """Send an error as OpenAI's clients read it."""
    fields = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": error_document(error)})


async def _preflight(send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": list(_PREFLIGHT)})
    await send({"type": "http.response.body", "body": b""})
