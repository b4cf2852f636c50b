"""``/v1/``: requests reach a service, and its events come back as they are written."""

from collections.abc import Callable
from typing import Any

from support.web_client import OWN, Reply, ask

from blobstore.errors import ModelNotFoundError, UsageError
from blobstore.web.chat import Chat

OTHER = "http://example.com"
PREFLIGHT: Any = {
    "method": "OPTIONS",
    "origin": OTHER,
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization, x-stainless-os",
}


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


def asked(
    service: Service,
    *body: bytes,
    path: str = "/v1/completions",
    method: str = "POST",
    allowed: str = "https://allowed.example/",
    api_key: str | None = None,
    leaves_after: int | None = None,
    **headers: str,
) -> Reply:
    """Return the answer to one request."""
    chat = Chat(service, [allowed], api_key)  # type: ignore[arg-type]
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(chat, path, method, fields, body=body or (b"",), leaves_after=leaves_after)


def test_a_whole_answer() -> None:
    service = Service()
    reply = asked(service, b"a", b"b")
    assert (reply.status, reply.json) == (200, {"text": "hello"})
    assert service.requests == [("/v1/completions", b"ab")]
    assert service.stopped == 1


def test_a_stream_comes_in_pieces() -> None:
    reply = asked(Service(is_stream=True), b"a")
    assert reply.pieces == [
        b'data: {"text": "he"}\n\n',
        b": keepalive 1/2\n\n",
        b'data: {"text": "llo"}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert reply.headers["content-type"].startswith("text/event-stream")


def test_errors_have_openais_form() -> None:
    for error, status in ((UsageError("no"), 400), (RuntimeError("no"), 500)):
        reply = asked(Service(error), b"a")
        assert (reply.status, "no" in reply.json["error"]["message"]) == (status, True)
        late = asked(Service({"text": "a"}, error, is_stream=True), b"a")
        assert late.status == 200
        assert late.pieces[-1].startswith(b'data: {"error": ')
    assert asked(Service(), b"wrong").status == 400


def test_addresses() -> None:
    for method, path, status in (
        ("GET", "/v1/models/m", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 404),
        ("POST", "/v1/embeddings", 404),
        ("DELETE", "/v1/completions", 405),
    ):
        reply = asked(Service(), method=method, path=path)
        assert (reply.status, "error" in reply.json) == (status, status != 200)


def test_a_key_that_clients_must_send() -> None:
    for given in ("", "Bearer", "Bearer wrong", "Basic ü", "key"):
        service = Service()
        reply = asked(service, b"a", api_key="key", authorization=given)
        assert (reply.status, service.requests) == (401, [])
        assert reply.json["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    assert asked(Service(), b"a", api_key="key", authorization="bearer key").status == 200
    assert asked(Service(), allowed="*", api_key="key", **PREFLIGHT).status == 200


def test_a_large_request_is_refused() -> None:
    service = Service()
    assert asked(service, b"x" * (5 * 2**20), b"x" * (4 * 2**20)).status == 413
    assert service.requests == []


def test_an_answer_stops_when_its_client_is_gone() -> None:
    for is_stream, leaves_after in ((True, 2), (False, 0), (True, 0)):
        service = Service((1, 2), is_stream=is_stream)  # it never ends
        asked(service, b"a", leaves_after=leaves_after)
        assert service.stopped == 1


def test_pages_of_other_sites_may_not_use_the_model() -> None:
    service = Service()
    for origin, method in ((OTHER, "POST"), ("null", "OPTIONS"), (f"http://{OWN}.com", "POST")):
        reply = asked(service, method=method, origin=origin)
        assert (reply.status, service.requests) == (403, [])
        assert "access-control-allow-origin" not in reply.headers
    assert asked(service, origin=f"http://{OWN}").status == 200


def test_they_may_if_they_are_allowed() -> None:
    for allowed in ("*", "HTTP://EXAMPLE.com/"):
        assert asked(Service(), b"a", allowed=allowed, origin=OTHER).status == 200
        reply = asked(Service(), allowed=allowed, **PREFLIGHT)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] in (OTHER, "*")
        # OpenAI's client for browsers has headers of its own.
        assert "authorization" in reply.headers["access-control-allow-headers"]
