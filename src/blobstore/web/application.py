"""The application: the API, the pages and their files, the guard before them; and its server.

Work on a store blocks, so it is done in threads: a few for quick answers, and others for those that
read weights, so that a slow one does not keep a list waiting.

The guard says which requests are answered. A page of another site can't read an answer: it has no
CORS headers. But such a page may have a name that its owner points to 127.0.0.1 (DNS rebinding),
and then the browser takes the answer for the page's own. So ``Host`` has to be a name that the
server was started with. An address in digits is never such a name.
"""

import asyncio
import errno
import hashlib
import ipaddress
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio.to_thread
import uvicorn
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blobstore.errors import (
    AccessError,
    AmbiguousNameError,
    BlobStoreError,
    BusyError,
    InvalidDigestError,
    InvalidNameError,
    MissingFileError,
    ModelNotFoundError,
    RemoteError,
    StorageError,
    TensorNotFoundError,
    UsageError,
)
from blobstore.io.budget import allow_open_files
from blobstore.plots.specification import themes
from blobstore.store.ports import Readable
from blobstore.views.results import Problem
from blobstore.web.api import ROUTES, ApiRoute, Served, in_json
from blobstore.web.pages import FOLDER, PAGES, TYPES, colours_of_types, page

BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409
METHOD_NOT_ALLOWED, MISDIRECTED, HEAD_TOO_LARGE = 405, 421, 431
FAILED, BAD_GATEWAY, BUSY = 500, 502, 503

METHODS = ("GET", "HEAD")
REGISTRY = "/v2/"
"""Addresses whose refusals have the form of the registry protocol (distribution.py)."""
_OLLAMA = "for Ollama's requests ask Ollama, for answers POST to /v1/ of serve --lm"
CHAT = "/v1/"
"""Addresses of a model that answers, to which clients post (chat.py)."""
MAX_HEAD = 16 * 2**10
"""Bytes of a request's head. The server's own limit counts heads that arrive in pieces only."""
# Bytes of a field apart from its name and value: a colon, a space and the end of the line.
_PER_FIELD = 4
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]{1,5})?", re.ASCII)
# The first class of an error that is here counts, in the order in which Python looks.
_STATUSES: Mapping[type, int] = {
    InvalidNameError: NOT_FOUND,
    InvalidDigestError: NOT_FOUND,
    AmbiguousNameError: NOT_FOUND,
    ModelNotFoundError: NOT_FOUND,
    TensorNotFoundError: NOT_FOUND,
    MissingFileError: NOT_FOUND,
    UsageError: BAD_REQUEST,
    BusyError: BUSY,
    StorageError: FAILED,
    RemoteError: BAD_GATEWAY,
    BlobStoreError: CONFLICT,  # the model can't be read
}


def problem(status: int, error: str, hint: str | None = None) -> Response:
    """Return an error as a document."""
    body = in_json(Problem(error, hint))
    return Response(body, status, media_type="application/json")


def with_tag(body: bytes, content_type: str, request: Request) -> Response:
    """Return a body and its tag, or only the tag if the client has it."""
    tag = hashlib.sha256(body).hexdigest()
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if is_known(tag, request):
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "content-type": content_type})


def is_known(tag: str, request: Request) -> bool:
    """Return True if the client says that it has the document of that tag."""
    known = request.headers.get("if-none-match", "").split(",")
    return any(one.strip().removeprefix("W/") in (f'"{tag}"', "*") for one in known)


class Hosts:
    """The names that ``Host`` may have: those of loopback, ``bound``, and ``allowed`` ones.

    ``bound``: the address that the server listens at. If that is every address of the machine, any
    address in digits is accepted.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        self._names = frozenset(map(_plain, (*LOOPBACK, bound, *allowed)))
        address = _address(bound)
        self._takes_addresses = address is not None and address.is_unspecified

    def accept(self, host: str) -> bool:
        """Return True if the value of a ``Host`` header is one of the names, with any port."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _plain(match["name"])
        return name in self._names or (self._takes_addresses and _address(name) is not None)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".").strip("[]")


def _address(text: str) -> Any:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


class Guard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        # The server cancels what takes too long when it ends, and logs what is raised.
        with suppress(asyncio.CancelledError):
            await (self._refusal(scope) or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self._hosts.accept(hosts[0].decode("latin-1")):
            message = "the server was not started with this host name"
            return problem(MISDIRECTED, message, "Start it with --allowed-host HOST.")
        if scope["method"] not in METHODS and not scope["path"].startswith((REGISTRY, CHAT)):
            says = _OLLAMA if scope["path"].startswith("/api/") else "use GET or HEAD"
            refused = problem(METHOD_NOT_ALLOWED, f"this server only reads: {says}")
            refused.headers["allow"] = ", ".join(METHODS)
            return refused
        nbytes = len(scope["query_string"]) + len(scope.get("raw_path") or b"")
        nbytes += sum(len(name) + len(value) + _PER_FIELD for name, value in scope["headers"])
        if nbytes > MAX_HEAD:
            return problem(HEAD_TOO_LARGE, f"the request's head has more than {MAX_HEAD:,} bytes")
        return None


_QUICK, _SLOW = 4, 2
"""Threads for quick answers, and for those that read weights."""
_JSON, _HTML, _CSS = "application/json", "text/html; charset=utf-8", "text/css; charset=utf-8"
_Handler = Callable[[Request], Awaitable[Response]]


def application(
    home: Readable, hosts: Hosts, *, more: Iterable[BaseRoute] = (), plan: Any = None
) -> ASGIApp:
    """Return the application over a home.

    ``more``: routes in addition to the API and the pages. ``plan``: of `plan_document`.
    """
    served = Served(home, plan)
    quick, slow = CapacityLimiter(_QUICK), CapacityLimiter(_SLOW)
    routes: list[BaseRoute] = [
        *(Route(one.path, _api(one, served, slow if one.is_slow else quick)) for one in ROUTES),
        *(Route(path, _document(_HTML, page(path).encode())) for path in PAGES),
        Route("/health", _document(_JSON, b'{"status": "ok"}')),
        Route("/static/themes.json", _document(_JSON, in_json(themes()))),
        Route(f"/static/{TYPES}", _document(_CSS, colours_of_types().encode())),
        Mount("/static", StaticFiles(directory=FOLDER)),
        *more,
    ]
    app = Starlette(
        routes=routes, exception_handlers=dict.fromkeys((HTTPException, Exception), _refuse)
    )
    app.router.redirect_slashes = False
    return Guard(app, hosts)


def _api(route: ApiRoute, served: Served, threads: CapacityLimiter) -> _Handler:
    def made(request: Request) -> Response:
        try:
            body = route.body(served, request.scope["query_string"])
        except BlobStoreError as error:
            status = next(_STATUSES[kind] for kind in type(error).mro() if kind in _STATUSES)
            hint = None if error.hint is None else served.without_folders(error.hint)
            return problem(status, served.without_folders(error.message), hint)
        return with_tag(body, route.content_type, request)

    async def handle(request: Request) -> Response:
        return await anyio.to_thread.run_sync(made, request, limiter=threads)

    return handle


def _document(content_type: str, body: bytes) -> _Handler:
    async def handle(request: Request) -> Response:
        return with_tag(body, content_type, request)

    return handle


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return problem(FAILED, "an internal error; see the server's log")
    status = error.status_code
    is_for_program = request.url.path.startswith(("/api/", REGISTRY, CHAT))
    is_for_program = is_for_program or "text/html" not in request.headers.get("accept", "")
    if status == NOT_FOUND and not is_for_program:
        return Response(page(request.url.path), status, media_type=_HTML)
    says = "not found" if status == NOT_FOUND else "invalid request"
    answer = problem(status, says)
    answer.headers.update(error.headers or {})
    return answer


# asyncio accepts as many at once, and closes what clients have left a few rounds later.
_BACKLOG = 256
_CONNECTIONS = 1000  # beyond as many, requests are answered with 503
IDLE_S, END_S = 30, 8
"""Seconds that a connection waits for its next request, and that answers have when we end."""


def serve_at(
    app: ASGIApp, host: str, port: int, *, ready: Callable[[str], None], log: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called with the address.

    ``log``: each request is printed on standard error, with its client's address.

    Requests in flight are then finished, within `END_S`; a second SIGINT ends them. The process
    must call this in its main thread. ``port`` 0: a free one.

    Raises: UsageError for an address that is not the machine's; AccessError for a port that needs
    root; StorageError for one that is taken.
    """
    listening = _listen(host, port)
    allow_open_files(3 * _CONNECTIONS)  # a socket and a blob each; sockets that are being closed
    name = f"[{host}]" if ":" in host else host
    with listening:
        server = uvicorn.Server(_config(app, log))
        with _signals(server):
            ready(f"http://{name}:{listening.getsockname()[1]}/")
            server.run(sockets=[listening])


def check_address(host: str, port: int) -> None:
    """Raise as `serve_at` for an address that can't be listened at, before work that takes long."""
    _listen(host, port).close()


# A line for each request, without colours. Errors go where the process sends its log.
_LOG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "()": "uvicorn.logging.AccessFormatter",
            "fmt": '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s',
            "datefmt": "%Y-%m-%d %H:%M:%S",
            "use_colors": False,
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "uvicorn.access": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "uvicorn.error": {"level": "ERROR"},
    },
}


def _config(app: ASGIApp, log: bool) -> uvicorn.Config:  # noqa: FBT001
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=_LOG if log else None,
        log_level=None if log else "error",
        access_log=log,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=MAX_HEAD,
    )


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[None]:
    """Let signals end the server from now on, and not the process.

    uvicorn sends the signals that it got to the process once more, when it has ended. By default
    SIGTERM would kill the process then.
    """
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, server.handle_exit) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"can't listen on {host!r}: not an address or a known name") from error
    try:
        bound = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise _refusal(error, host, port) from error
    # Without it, a small blob would wait after its head for the client's confirmation: 40 ms.
    # Connections inherit it; asyncio sets it only if the socket's protocol is named.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


# What is said when a port can't be had, by the number of the error; with a hint.
_REFUSALS: Mapping[int | None, tuple[type[BlobStoreError], str, str]] = {
    errno.EADDRINUSE: (
        StorageError,
        "port {port} of {host} is in use by another process",
        "Is it being served already? --port N uses another one, --port 0 any free one.",
    ),
    errno.EADDRNOTAVAIL: (
        UsageError,
        "can't listen on {host}: not an address of this machine",
        "Use 127.0.0.1, or an address of a network card.",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        (
            AccessError,
            "port {port} of {host} may not be used by this user",
            "Ports below 1024 are for root.",
        ),
    ),
}


def _refusal(error: OSError, host: str, port: int) -> BlobStoreError:
    reason = (error.strerror or str(error)).lower()
    other = StorageError, "can't listen on port {port} of {host}: {reason}", None
    kind, says, hint = _REFUSALS.get(error.errno, other)
    return kind(says.format(host=host, port=port, reason=reason), hint=hint, errno=error.errno)
