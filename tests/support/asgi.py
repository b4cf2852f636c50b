"""Requests to an ASGI application without a socket."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

SENDS_FILES = "http.response.zerocopysend"


@dataclass
class Answered:
    """An answer. ``files``: the offset and the length of each part that was sent from a file."""

    status: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    files: list[tuple[int, int]] = field(default_factory=list)

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a registry's error."""
        return str(self.document["errors"][0]["code"])


def ask(
    app: ASGIApp,
    target: str,
    method: str = "GET",
    fields: dict[str, str] | None = None,
    *,
    sends_files: bool = False,
    sent: list[bytes] | None = None,
) -> Answered:
    """Return the answer to a request.

    ``sends_files``: the server sends files by itself. ``sent``: gets the pieces of the body, also
    if the application fails.
    """
    path, _, query = target.partition("?")
    given = {"host": "127.0.0.1:8080", **(fields or {})}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
    }
    if sends_files:
        scope["extensions"] = {SENDS_FILES: {}}
    answered = Answered()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.fields = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["type"] == SENDS_FILES:
            answered.files.append((message["offset"], message["count"]))
            answered.body += os.pread(message["file"].fileno(), message["count"], message["offset"])
        else:
            answered.body += message.get("body", b"")
            if sent is not None:
                sent.append(message.get("body", b""))

    async def run() -> None:
        await app(scope, receive, send)

    asyncio.run(run())
    return answered
