"""Requests to an application, without sockets."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

OWN = "127.0.0.1:8080"


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["errors"][0]["code"])


class Client:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def get(self, target: str, *, method: str = "GET", **headers: str) -> Reply:
        """Return the answer to a request; ``_`` in a header's name is a dash."""
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        reply = Reply()
        try:
            ask(self.app, target, method, named, reply=reply)
        except Exception:
            if not reply.status:  # the server logs an error that follows an answer
                raise
        return reply


def ask(
    app: ASGIApp,
    target: str,
    method: str = "GET",
    fields: Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
    *,
    body: Sequence[bytes] = (b"",),
    reply: Reply | None = None,
    leaves_after: int | None = None,
) -> Reply:
    """Return the answer to one request. Raises: as the application.

    ``fields``: headers; pairs are all that there are, a mapping has ``Host`` by default. ``body``:
    its pieces. ``reply``: gets the answer, also if the application fails. ``leaves_after``: so many
    messages of the answer the client goes away.
    """
    if fields is None or isinstance(fields, Mapping):
        fields = ({"host": OWN} | dict(fields or {})).items()
    found = Reply() if reply is None else reply
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8080),
    }
    asyncio.run(_exchange(app, scope, found, list(body), leaves_after))
    return found


async def _exchange(
    app: ASGIApp, scope: dict[str, Any], reply: Reply, body: list[bytes], leaves_after: int | None
) -> None:
    left, sent = asyncio.Event(), 0
    if leaves_after == 0:
        left.set()

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(0), "more_body": bool(body)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == leaves_after:
            left.set()
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            pairs = message["headers"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in pairs}
        elif message.get("body"):
            reply.pieces.append(message["body"])

    await app(scope, receive, send)
