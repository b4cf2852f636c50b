"""Requests to an application, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message


@dataclass
class Reply:
    """An answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """The bytes that came."""
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        """The document in the body."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a registry's error."""
        return str(self.json["errors"][0]["code"])


class Client:
    """A client of an application, in an event loop of its own; close it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._runner = asyncio.Runner()

    def get(self, target: str, *, method: str = "GET", **headers: str) -> Reply:
        """Return the answer to a request; ``_`` in a header's name is a dash.

        ``Host`` is 127.0.0.1, unless it is given.
        """
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        return self.send(target, ({"host": OWN} | named).items(), method=method)

    def send(
        self, target: str, headers: Iterable[tuple[str, str]], *, method: str = "GET"
    ) -> Reply:
        """Return the answer to a request with exactly these headers."""
        reply = Reply()
        try:
            self._runner.run(_exchange(self._app, scope_of(target, method, headers), reply))
        except Exception:
            if not reply.status:  # the server logs an error that follows an answer
                raise
        return reply

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


OWN = "127.0.0.1:8080"


def ask(
    app: ASGIApp,
    target: str,
    method: str = "GET",
    fields: Mapping[str, str] | None = None,
    *,
    reply: Reply | None = None,
) -> Reply:
    """Return the answer to one request. Raises: as the application.

    ``reply``: gets the answer, also if the application fails.
    """
    scope = scope_of(target, method, ({"host": OWN} | dict(fields or {})).items())
    found = Reply() if reply is None else reply
    asyncio.run(_exchange(app, scope, found))
    return found


def scope_of(target: str, method: str, headers: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return ASGI's description of a request."""
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8080),
    }


async def _exchange(app: ASGIApp, scope: dict[str, Any], reply: Reply) -> None:
    asked = asyncio.Event()

    async def receive() -> Message:
        if asked.is_set():
            await asyncio.Event().wait()  # the client stays
        asked.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            pairs = message["headers"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in pairs}
        elif message.get("body"):
            reply.pieces.append(message["body"])

    await app(scope, receive, send)
