"""``/v1/``: the models of ``serve --lm`` for clients of OpenAI's protocol.

The service computes in a thread of its own; its events come through a queue, so the other routes do
not wait. A page of another site could send a request that costs hours of computing, even if it
can't read the answer: so an ``Origin`` has to be the server's own, or an allowed one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    BusyError,
    NotFoundError,
    UsageError,
    quoted,
)
from blobstore.mlx_lm.chat_requests import (
    CHAT,
    MAX_BODY,
    MODELS,
    TEXT,
    error_document,
)
from blobstore.web.application import (
    BAD_REQUEST,
    BUSY,
    CHAT as PREFIX,
    FAILED,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
)

if TYPE_CHECKING:
    from blobstore.mlx_lm.chat_service import ChatService, Event

_log = logging.getLogger("blobstore.web")
_UNAUTHORIZED, _FORBIDDEN, _TOO_LARGE = 401, 403, 413
# Requests that are answered at once, or wait for it.
_MOST_REQUESTS = 64
_STREAM = {"Cache-Control": "no-cache"}
# Seconds after which the client of an answer that is not a stream may be found gone.
_LOOK_S = 0.5


class Chat:
    """The application of ``/v1/``. ``origins``: of other sites whose pages may use it.

    ``api_key``: clients must send it as a bearer token.
    """

    def __init__(
        self, service: ChatService, origins: Iterable[str] = (), api_key: str | None = None
    ) -> None:
        self._service = service
        self._api_key = api_key
        self._origins = {origin.rstrip("/").lower() for origin in origins}
        self._free = asyncio.Semaphore(_MOST_REQUESTS)
        self._app = CORSMiddleware(
            self._answer,
            allow_origins=sorted(self._origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )

    def route(self) -> BaseRoute:
        return Route(f"{PREFIX}{{path:path}}", self, methods=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower()
        is_own = origin.partition("://")[2] == headers.get("host", "").lower()
        if origin and not is_own and not self._origins & {"*", origin}:
            error = UsageError(
                "pages of other origins may not use the model",
                hint="Start the server with --allow-origin ORIGIN.",
            )
            await _refusal(_FORBIDDEN, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack, suppress(ClientDisconnect):
            try:
                response = await self._response(Request(scope, receive), stack)
            except ClientDisconnect:
                raise
            except Exception as error:  # noqa: BLE001  # also of mlx-lm's own code
                response = _refusal(_status_of(error), error)
            await response(scope, receive, send)

    async def _response(self, request: Request, stack: ExitStack) -> Response:
        """Return the response to a request. ``stack`` ends the answer when it is sent."""
        path, method = request.url.path, request.method
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_ours = hmac.compare_digest(key.encode(), (self._api_key or "").encode())
        if self._api_key is not None and not (is_ours and scheme.lower() == "bearer"):
            hint = "Send the key of serve --api-key: Authorization: Bearer KEY."
            raise AccessError("the API key is missing or wrong", hint=hint)
        if method == "GET" and path == MODELS:
            return JSONResponse(self._service.models())
        if method == "GET" and path.startswith(f"{MODELS}/"):
            return JSONResponse(self._service.models(path.removeprefix(f"{MODELS}/")))
        if method not in ("GET", "POST"):
            return _refusal(METHOD_NOT_ALLOWED, UsageError("use GET or POST"))
        if method == "GET" or path not in (CHAT, TEXT):
            raise NotFoundError(
                f"there is nothing to {method} at {quoted(path)}",
                hint=f"POST {CHAT} or {TEXT}, or GET {MODELS}. mlx-lm's models write text; they"
                " are not embedding models.",
            )
        if self._free.locked():
            return _refusal(BUSY, BusyError("too many requests at once"))
        await self._free.acquire()
        stack.callback(self._free.release)
        return await self._respond(path, request, stack)

    async def _respond(self, path: str, request: Request, stack: ExitStack) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _refusal(_TOO_LARGE, UsageError(f"the request has over {MAX_BODY:,} bytes"))
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended, and the client with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = self._service.submit(path, bytes(body), put)
        stack.callback(job.stop)
        event = await _next(events, request)
        if job.document["stream"]:
            return StreamingResponse(_stream(event, events), 200, _STREAM, "text/event-stream")
        while isinstance(event, tuple):
            event = await _next(events, request)
        return JSONResponse(event)


async def _next(events: asyncio.Queue[Event], request: Request) -> Event:
    """Return the next event. Raises: one that is an error; ClientDisconnect."""
    while True:
        with suppress(TimeoutError):
            event = await asyncio.wait_for(events.get(), _LOOK_S)
            break
        if await request.is_disconnected():
            raise ClientDisconnect
    if isinstance(event, Exception):
        raise event
    return event


async def _stream(event: Event, events: asyncio.Queue[Event]) -> AsyncIterator[bytes]:
    while isinstance(event, dict | tuple):
        if isinstance(event, tuple):  # a comment, so that the connection lives
            yield b": keepalive %d/%d\n\n" % event
        else:
            yield b"data: %b\n\n" % json.dumps(event).encode()
        event = await events.get()
    if event is not None:  # the status is sent: only the stream can say it
        _status_of(event)
    yield b"data: %b\n\n" % (b"[DONE]" if event is None else error_document(event))


_STATUSES: Mapping[type, int] = {
    NotFoundError: NOT_FOUND,
    AccessError: _UNAUTHORIZED,
    BlobStoreError: BAD_REQUEST,
    ValueError: BAD_REQUEST,
}


def _status_of(error: Exception) -> int:
    """Return the status of an error; one that is not the client's is logged."""
    statuses = (status for kind, status in _STATUSES.items() if isinstance(error, kind))
    status = next(statuses, FAILED)
    if status == FAILED:
        _log.error("an answer failed", exc_info=error)
    return status


def _refusal(status: int, error: Exception) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == _UNAUTHORIZED else None
    return Response(error_document(error), status, headers, "application/json")
