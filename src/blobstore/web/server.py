"""The server: an application at an address, until the process is told to end."""

from __future__ import annotations

import errno
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from blobstore.errors import AccessError, BlobStoreError, StorageError, UsageError
from blobstore.web.guard import MAX_HEAD

_BACKLOG = 1024
_CONNECTIONS = 1000
"""Beyond as many, requests are answered with 503."""
_FILES = 3 * _CONNECTIONS
"""Open files: a socket and a blob for each connection, and a thousand."""
IDLE_S, END_S = 30, 8
"""Seconds that a connection waits for its next request, and that answers have when we end."""
_FIRST_FREE_PORT = 1024


def serve_at(app: ASGIApp, host: str, port: int, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called with the address.

    Requests in flight are then finished, within `END_S`; a second SIGINT ends them. The process
    must call this in its main thread. ``port`` 0: a free one.

    Raises: UsageError for an address that is not the machine's; AccessError for a port that needs
    root; StorageError for one that is taken.
    """
    listening = _listening(host, port)
    _raise_limit_of_files(_FILES)
    name = f"[{host}]" if ":" in host else host
    with listening:
        server = uvicorn.Server(_config(app))
        with _signals(server):
            ready(f"http://{name}:{listening.getsockname()[1]}/")
            server.run(sockets=[listening])


def check_address(host: str, port: int) -> None:
    """Raise as `serve_at` for an address that can't be listened at, before work that takes long."""
    _listening(host, port).close()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        # Errors go where the process sends its log, and addresses of clients nowhere.
        log_config=None,
        log_level="error",
        access_log=False,
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


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises: as `serve_at`."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"can't listen at {host!r}: not an address or a known name") from error
    try:
        bound = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise _refusal(error, host, port) from error
    # Without it, a small blob would wait behind its head for the client's confirmation: 40 ms.
    # Connections inherit it; asyncio sets it only if the socket's protocol is named.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _refusal(error: OSError, host: str, port: int) -> BlobStoreError:
    """Return our error for an address that can't be bound."""
    place = f"port {port} of {host}"
    if error.errno == errno.EADDRINUSE:
        hint = "Is it being served already? --port N uses another one, --port 0 any free one."
        return StorageError(f"{place} is taken by another process", hint=hint, errno=error.errno)
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "Use 127.0.0.1, or an address of a network card."
        return UsageError(f"can't listen at {host}: not an address of this machine", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = f"Ports below {_FIRST_FREE_PORT} are for root."
        return AccessError(f"{place} may not be used", hint=hint, errno=error.errno)
    reason = (error.strerror or str(error)).lower()
    return StorageError(f"can't listen at {place}: {reason}", errno=error.errno)


def _raise_limit_of_files(wanted: int) -> None:
    """Let the process have so many files open, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
