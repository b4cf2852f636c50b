"""``/v1/``: requests reach a service, and its events come back as they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.errors import ModelNotFoundError, UsageError
from blobstore.web.chat import Chat

OWN = "127.0.0.1:8080"
OTHER = "http://example.com"
PREFLIGHT = {"access-control-request-method": "POST"}
PREFLIGHT["access-control-request-headers"] = "authorization, x-stainless-os"


class Service:
    """Sends ``events`` to each request; keeps the requests that it got."""

    def __init__(self, *events: Any, is_stream: bool = False) -> None:
        texts = ({"text": "he"}, (1, 2), {"text": "llo"}, None)
        self.events = events or (texts if is_stream else ((1, 2), {"text": "hello"}, None))
        self.document = {"stream": is_stream}
        self.requests: list[tuple[str, bytes]] = []
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1

    def submit(self, path: str, body: bytes, put: Callable[[Any], None]) -> Any:
        self.requests.append((path, body))
        if body == b"wrong":
            raise UsageError("wrong")
        for event in self.events:
            put(event)
        return self

    def models(self, name: str | None = None) -> Any:
        if name == "other":
            raise ModelNotFoundError("not served")
        return {"name": name}


class Client:
    """One request, and its response. ``body``: pieces; after them the client waits, or leaves."""

    def __init__(self, service: Service, method: str = "POST", **headers: str) -> None:
        self.path = "/v1/completions"
        self.chat = Chat(service, ["https://allowed.example/"])  # type: ignore[arg-type]
        pairs = {"host": OWN, **headers}
        self._scope = {
            "type": "http",
            "method": method,
            "query_string": b"",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in pairs.items()],
        }
        self.sent: list[Any] = []
        self.leaves_after: int | None = None

    def ask(self, *body: bytes) -> int:
        """Return the status of the answer; 0 for none."""
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
        if self.leaves_after == 0:
            left.set()

        async def receive() -> Any:
            if body:
                return {"type": "http.request", "body": body.pop(0), "more_body": bool(body)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if len(self.sent) == self.leaves_after:
                left.set()

        await self.chat({**self._scope, "path": self.path}, receive, send)


def test_a_whole_answer() -> None:
    service = Service()
    client = Client(service)
    assert client.ask(b"a", b"b") == 200
    assert service.requests == [("/v1/completions", b"ab")]
    assert json.loads(client.text) == {"text": "hello"}
    assert service.stopped == 1


def test_a_stream_comes_in_pieces() -> None:
    client = Client(Service(is_stream=True))
    assert client.ask(b"a") == 200
    assert [one.get("body") for one in client.sent[1:]] == [
        b'data: {"text": "he"}\n\n',
        b": keepalive 1/2\n\n",
        b'data: {"text": "llo"}\n\n',
        b"data: [DONE]\n\n",
        b"",
    ]
    assert client.headers[b"content-type"].startswith(b"text/event-stream")


@pytest.mark.parametrize(("error", "status"), [(UsageError("no"), 400), (RuntimeError("no"), 500)])
def test_errors_have_openais_form(error: Exception, status: int) -> None:
    client = Client(Service(error))
    assert client.ask(b"a") == status
    assert "no" in json.loads(client.text)["error"]["message"]
    late = Client(Service({"text": "a"}, error, is_stream=True))
    assert late.ask(b"a") == 200
    assert json.loads(late.text.split(b"data: ")[-1])["error"]
    assert Client(Service()).ask(b"wrong") == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/m", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("DELETE", "/v1/completions", 405),
    ],
)
def test_addresses(method: str, path: str, status: int) -> None:
    client = Client(Service(), method)
    client.path = path
    assert client.ask(b"") == status
    assert ("error" in json.loads(client.text)) == (status != 200)


def test_a_large_request_is_refused() -> None:
    service = Service()
    client = Client(service)
    assert client.ask(b"x" * (5 * 2**20), b"x" * (4 * 2**20)) == 413
    assert service.requests == []


@pytest.mark.parametrize(("is_stream", "leaves_after"), [(True, 2), (False, 0), (True, 0)])
def test_an_answer_stops_when_its_client_is_gone(*, is_stream: bool, leaves_after: int) -> None:
    service = Service((1, 2), is_stream=is_stream)  # it never ends
    client = Client(service)
    client.leaves_after = leaves_after
    client.ask(b"a")
    assert service.stopped == 1


@pytest.mark.parametrize(
    ("origin", "method"),
    [
        (OTHER, "POST"),
        ("null", "OPTIONS"),
        (f"http://{OWN}.com", "POST"),
    ],
)
def test_pages_of_other_sites_may_not_use_the_model(origin: str, method: str) -> None:
    service = Service()
    client = Client(service, method, origin=origin)
    assert client.ask(b"") == 403
    assert service.requests == []
    assert b"access-control-allow-origin" not in client.headers
    assert Client(service, origin=f"http://{OWN}").ask(b"") == 200


@pytest.mark.parametrize("allowed", ["*", "HTTP://EXAMPLE.com/"])
def test_they_may_if_they_are_allowed(allowed: str) -> None:
    for method, headers in {"POST": {}, "OPTIONS": PREFLIGHT}.items():
        client = Client(Service(), method, origin=OTHER, **headers)
        client.chat = Chat(Service(), [allowed])  # type: ignore[arg-type]
        assert client.ask(b"a") == 200
        assert client.headers[b"access-control-allow-origin"] in (OTHER.encode(), b"*")
    # OpenAI's client for browsers has headers of its own.
    assert b"authorization" in client.headers[b"access-control-allow-headers"]
