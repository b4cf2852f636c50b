"""Requests to an application, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The document in the body."""
        return json.loads(self.body)


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
        pairs = list(({"host": "127.0.0.1:8080"} | named).items())
        return self.send(target, pairs, method=method)

    def send(self, target: str, headers: list[tuple[str, str]], *, method: str = "GET") -> Reply:
        """Return the answer to a request with exactly these headers."""
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
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
        return self._runner.run(_reply(self._app, scope))

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


async def _reply(app: ASGIApp, scope: dict[str, Any]) -> Reply:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    try:
        await app(scope, receive, send)
    except Exception:
        if not sent:  # the server logs an error that follows an answer
            raise
    start, *parts = sent
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], headers, b"".join(part.get("body", b"") for part in parts))
