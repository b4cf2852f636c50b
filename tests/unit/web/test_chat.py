"""``/v1/``: requests reach a service in threads, and answers come back as they are written."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.web.chat import Chat

OWN = "127.0.0.1:8080"
OTHER = "http://example.com"
Work = Callable[[Any], None]


class Service:
    """Answers with ``work``; keeps the requests that it got."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.requests: list[tuple[str, str, bytes]] = []

    def answer(self, method: str, path: str, body: bytes, exchange: Any) -> None:
        self.requests.append((method, path, body))
        self.work(exchange)


def hello(exchange: Any) -> None:
    exchange.start(200, [("Content-Type", "application/json")])
    exchange.write(b"he")
    exchange.write(b"llo")


class Client:
    """One request, and what came back. ``body``: pieces; after them the client waits, or leaves."""

    def __init__(self, chat: Chat, method: str = "POST", **headers: str) -> None:
        self._chat = chat
        pairs = {"host": OWN, **headers}
        self._scope = {
            "type": "http",
            "method": method,
            "path": "/v1/completions",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in pairs.items()],
        }
        self.sent: list[Any] = []
        self.leaves_after: int | None = None

    def ask(self, *body: bytes) -> int:
        """Return the status of the answer."""
        asyncio.run(asyncio.wait_for(self._ask(list(body)), 600))
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def text(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    async def _ask(self, body: list[bytes]) -> None:
        left = asyncio.Event()

        async def receive() -> Any:
            if body:
                return {"type": "http.request", "body": body.pop(0), "more_body": bool(body)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) == self.leaves_after:
                left.set()

        await self._chat(self._scope, receive, send)


def test_an_answer_comes_in_pieces() -> None:
    service = Service(hello)
    client = Client(Chat(service))  # type: ignore[arg-type]
    assert client.ask(b"a", b"b") == 200
    assert service.requests == [("POST", "/v1/completions", b"ab")]
    assert [one.get("body") for one in client.sent] == [None, b"he", b"llo", b""]


def test_a_service_that_fails_answers_500() -> None:
    def fails(_: Any) -> None:
        raise ConnectionAbortedError

    assert Client(Chat(Service(fails))).ask(b"") == 500  # type: ignore[arg-type]


@pytest.mark.parametrize("headers", [{}, {"content_length": str(9 * 2**20)}])
def test_a_large_request_is_refused(headers: dict[str, str]) -> None:
    service = Service(hello)
    client = Client(Chat(service), **headers)  # type: ignore[arg-type]
    assert client.ask(b"x" * (5 * 2**20), b"x" * (4 * 2**20)) == 413
    assert service.requests == []


def test_the_thread_learns_that_its_client_is_gone() -> None:
    ended = threading.Event()

    def endless(exchange: Any) -> None:
        exchange.start(200, [])
        try:
            while True:
                exchange.write(b".")
        except ConnectionError:
            ended.set()

    client = Client(Chat(Service(endless)))  # type: ignore[arg-type]
    client.leaves_after = 3
    client.ask(b"")
    assert ended.wait(600)


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost:1", f"http://{OWN}.com"])
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_pages_of_other_sites_may_not_use_the_model(origin: str, method: str) -> None:
    service = Service(hello)
    client = Client(Chat(service), method, origin=origin)  # type: ignore[arg-type]
    assert client.ask(b"") == 403
    assert service.requests == []
    assert b"access-control-allow-origin" not in client.headers
    assert "--allow-origin" in json.loads(client.text)["error"]["message"]


@pytest.mark.parametrize("allowed", [OTHER, "*", "HTTP://EXAMPLE.com/"])
def test_they_may_if_they_are_allowed(allowed: str) -> None:
    chat = Chat(Service(hello), [allowed])  # type: ignore[arg-type]
    for method, status in {"POST": 200, "OPTIONS": 204}.items():
        client = Client(chat, method, origin=OTHER)
        assert client.ask(b"") == status
        assert client.headers[b"access-control-allow-origin"] == OTHER.encode()
        assert client.headers[b"vary"] == b"Origin"
    # OpenAI's client for browsers has headers of its own.
    assert client.headers[b"access-control-allow-headers"] == b"authorization, *"


def test_pages_of_the_server_itself_may() -> None:
    client = Client(Chat(Service(hello)), origin=f"http://{OWN}")  # type: ignore[arg-type]
    assert client.ask(b"") == 200
    assert b"access-control-allow-origin" not in client.headers


def test_other_methods_are_refused() -> None:
    assert Client(Chat(Service(hello)), "DELETE").ask(b"") == 405  # type: ignore[arg-type]


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.web.chat._MOST_REQUESTS", 0)
    client = Client(Chat(Service(hello)))  # type: ignore[arg-type]
    assert client.ask(b"") == 503
    error = json.loads(client.text)["error"]  # as OpenAI's clients read it
    assert (error["message"], error["type"]) == ("too many requests at once", "server_error")
