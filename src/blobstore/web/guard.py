"""The guard before everything else: which requests are answered, and the headers of all answers.

A page of another site can't read an answer: it has no CORS headers. But such a page may have a name
that its owner points to 127.0.0.1 (DNS rebinding), and then the browser takes the answer for the
page's own. So ``Host`` has to be a name that the server was started with. An address in digits is
never such a name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blobstore.web.responses import (
    HEAD_TOO_LARGE,
    METHOD_NOT_ALLOWED,
    MISDIRECTED,
    TOO_LONG,
    problem,
)

METHODS = ("GET", "HEAD")
REGISTRY = "/v2/"
"""Addresses whose refusals have the form of the registry protocol (distribution.py)."""
CHAT = "/v1/"
"""Addresses of a model that answers, to which clients post (chat.py)."""
MAX_QUERY = 32 * 1024
"""Bytes of a query: as many as the parameters of a route can have. A longer one is not parsed."""
MAX_PATH = 2048
"""Bytes of a path, percent-encoded. Names under ``/v2/`` have at most 1,024 characters."""

MAX_HEAD = 16 * 2**10
"""Bytes of a request's head. The server's own limit counts heads that arrive in pieces only."""
_PER_FIELD = 4
"""Bytes of a field beside its name and its value: a colon, a space and the end of the line."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:[0-9]{1,5})?", re.ASCII)


class Hosts:
    """The names that ``Host`` may have: those of loopback, ``bound``, and ``allowed`` ones.

    ``bound``: the address that the server listens at. If that is every address of the machine, any
    address in digits is accepted.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        names = (*LOOPBACK, bound, *allowed)
        self._names = frozenset(name.lower().removesuffix(".").strip("[]") for name in names)
        found = _address(bound)
        self._takes_addresses = found is not None and found.is_unspecified

    def accept(self, host: str) -> bool:
        """Return True if the value of a ``Host`` header is one of the names, with any port."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].lower().removesuffix(".").strip("[]")
        return name in self._names or (self._takes_addresses and _address(name) is not None)


def _head_nbytes(scope: Scope) -> int:
    target = len(scope["query_string"]) + len(scope.get("raw_path") or b"")
    return target + sum(len(name) + len(value) + _PER_FIELD for name, value in scope["headers"])


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
        """Answer a request, or refuse it. Only HTTP gets here, and the server's own lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [item for item in message.get("headers", ()) if item[0].lower() not in own]
                message = {**message, "headers": [*kept, *HEADERS]}
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
            refused = problem(METHOD_NOT_ALLOWED, "this server only reads: use GET or HEAD")
            refused.headers["allow"] = ", ".join(METHODS)
            return refused
        if len(scope["query_string"]) > MAX_QUERY or len(scope.get("raw_path") or b"") > MAX_PATH:
            return problem(TOO_LONG, "the address is too long")
        if _head_nbytes(scope) > MAX_HEAD:
            return problem(HEAD_TOO_LARGE, f"the request's head has more than {MAX_HEAD:,} bytes")
        return None
