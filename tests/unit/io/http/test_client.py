"""Requests: what is sent, which replies are believed, when one is tried again, and TLS."""

import socket
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from support.corpus import refusal
from support.servers import KEEP_ALIVE, Server, head, one_after_another, reply

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UsageError,
)
from blobstore.io.http.client import HttpClient, Request
from blobstore.io.http.remote_files import Remote

from .conftest import CERTIFICATE, RETRY_POLICY, resolving, tls_server

GET = Request("GET", (200,))


def get(client: HttpClient, url: str) -> bytes:
    """Return the body of a 200."""
    with client.request(GET, client.start(url), client.limits(2**20)) as (answer, _):
        return b"".join(answer.chunks())


def failure(client: HttpClient, url: str) -> RemoteError:
    error = refusal(lambda: get(client, url))
    assert isinstance(error, RemoteError), error
    return error


# Requests


def test_what_a_request_says(server: Server, remote: Remote) -> None:
    script = server.play(reply(200, body=b"x"))
    assert get(remote, server.at("a?b=c#d")) == b"x"
    (asked,) = script.asked
    assert asked.target == "/a?b=c"
    assert asked.fields == {
        "host": f"127.0.0.1:{server.port}",
        "user-agent": "blobstore/0.1.0",
        "accept": "*/*",
        "accept-encoding": "identity",
    }


def test_no_environment(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    (tmp_path / ".netrc").chmod(0o600)
    for name, value in {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / ".netrc"),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "ALL_PROXY": "http://127.0.0.1:9",
        "SSL_CERT_FILE": str(CERTIFICATE),
    }.items():
        monkeypatch.setenv(name, value)
    script = server.play(reply(200, body=b"x"))
    with HttpClient(retry_policy=RETRY_POLICY) as client, tls_server() as secure:
        assert get(client, server.url) == b"x"
        assert "authorization" not in script.asked[0].fields
        assert "certificate" in str(failure(client, secure.url))


def test_what_is_not_a_token_is_refused() -> None:
    for token in ("", "a b", "a\r\nX: y", "ä", "x" * 5000):
        assert isinstance(refusal(partial(HttpClient, token)), UsageError)


def test_a_token_is_not_in_an_error_nor_in_its_frames(server: Server) -> None:
    challenge = 'WWW-Authenticate: Bearer realm="http://127.0.0.1:9",service="x"'
    script = server.play(reply(401, challenge, "Set-Cookie: a=b; Path=/"))
    with HttpClient("swordfish", retry_policy=RETRY_POLICY) as client:
        failure(client, server.url)
        error = failure(client, server.url)
        assert "swordfish" not in f"{error} {vars(error)} {client!r}"
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), capture_locals=True
    )
    ours = [frame.locals for frame in frames if "/blobstore/" in frame.filename]
    assert ours
    assert "swordfish" not in str(ours)
    assert all("cookie" not in asked.fields for asked in script.asked)


# Heads of replies


def whole(*lines: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + b"".join(lines) + b"Content-Length: 1\r\n\r\nx"


REFUSED = {
    "a folded line": whole(b"X: a\r\n b\r\n"),
    "a bare CR": whole(b"X: a\rContent-Length: 9\r\n"),
    "a space before the colon": whole(b"Content-Length : 9\r\n"),
    "no colon": whole(b"abc\r\n"),
    "two lengths": whole(b"Content-Length: 9\r\n"),
    "a length and chunks": whole(b"Transfer-Encoding: chunked\r\n"),  # RFC 9112 section 6.3
    "a long line": whole(b"X: " + b"x" * 70_000 + b"\r\n"),
    "a line that takes long to parse": whole(
        b'content-type:\xa0Multipart/x; a="' + b";" * 60_000 + b"\r\n"
    ),
    "many lines": whole(b"X: y\r\n" * 100),
    "many bytes": whole((b"X: " + b"x" * 60_000 + b"\r\n") * 2),
    "a signed length": head(200, "Content-Length: +1") + b"x",
    "an unknown coding": head(200, "Transfer-Encoding: gzip, chunked") + b"1\r\nx\r\n0\r\n\r\n",
    "a signed chunk": head(200, "Transfer-Encoding: chunked") + b"+5\r\nabcde\r\n0\r\n\r\n",
    "a huge chunk": head(200, "Transfer-Encoding: chunked") + b"8000000000000000\r\nabcde",
    "another protocol": b"HTTP/2.0 200 x\r\nContent-Length: 1\r\n\r\nx",
}


def test_an_ambiguous_reply_is_refused(server: Server, remote: Remote) -> None:
    for name, answer in REFUSED.items():
        script = server.play([answer])
        assert (failure(remote, server.url).rule, len(script.asked)) == ("R1", 1), name


def test_the_next_page_is_found_in_time(server: Server, remote: Remote) -> None:
    """It took 18 seconds when each address was searched to the end of the field."""
    server.play(reply(200, "Link: " + "<a>;" * 15_000 + '<b>; rel="next"'))
    assert remote.read_page(server.url, 1000)[1] == "b"


# Bodies and connections


def test_a_document_is_read_up_to_its_limit(server: Server, remote: Remote) -> None:
    for answer in (reply(200, body=b"x" * 1000), [head(200), *[b"x" * 100] * 10]):
        server.play(answer)
        assert remote.read_page(server.url, 1000)[0] == b"x" * 1000
        assert isinstance(refusal(lambda: remote.read_page(server.url, 999)), LimitExceededError)


def test_bytes_after_a_reply_answer_nothing(server: Server, remote: Remote) -> None:
    for first in (
        *(head(204) + whole(), head(404, "Content-Length: 0") + whole()),
        *(whole(b"Connection: close\r\n"), whole().replace(b"HTTP/1.1", b"HTTP/1.0")),
    ):
        script = server.play(one_after_another([first, KEEP_ALIVE], reply(200, body=b"right")))
        with suppress(BlobStoreError):
            get(remote, server.url)
        assert get(remote, server.url) == b"right"
        assert script.connections == 2


def test_a_body_without_a_length_ends_as_its_protocol_says(server: Server, remote: Remote) -> None:
    """An end of TCP within TLS can be anybody's (RFC 9112 section 9.8)."""
    body = b"HTTP/1.1 200 OK\r\n\r\nabc"
    server.play([body])
    assert get(remote, server.url) == b"abc"

    with (
        tls_server() as secure,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as trusting,
    ):
        secure.play([body])  # and no close_notify
        failure(trusting, secure.url)


# Failures


def test_a_temporary_failure_is_tried_again(server: Server, remote: Remote) -> None:
    script = server.play(one_after_another(reply(429), reply(503), reply(200, body=b"x")))
    assert get(remote, server.url) == b"x"
    assert len(script.asked) == 3
    script = server.play(reply(503))
    error = failure(remote, server.url)
    assert (error.status, error.temporary) == (503, True)
    assert len(script.asked) == RETRY_POLICY.attempts


@pytest.mark.parametrize("status", [206, 304, 404, 501])
def test_any_other_failure_is_final(status: int, server: Server, remote: Remote) -> None:
    script = server.play(reply(status, "Location: /b"))
    error = refusal(lambda: get(remote, server.url))
    assert isinstance(error, NotFoundError if status == 404 else RemoteError)
    assert (len(script.asked), error.path) == (1, server.url)
    assert not isinstance(error, RemoteError) or (error.status, error.temporary) == (status, False)


def test_a_broken_connection_is_tried_again(server: Server, remote: Remote) -> None:
    broken = [b"HTTP/1.1 200 OK\r\nX: y\r\n"]
    script = server.play(one_after_another([], broken, reply(200, body=b"x")))
    assert get(remote, server.url) == b"x"
    assert len(script.asked) == 3


def test_a_server_that_does_not_exist(remote: Remote) -> None:
    with socket.socket() as deaf:  # it has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        assert failure(remote, f"http://127.0.0.1:{deaf.getsockname()[1]}/").temporary
    assert not failure(remote, "http://nowhere.invalid/").temporary


def test_what_retry_after_may_say(server: Server, remote: Remote) -> None:
    for value in ("0", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "1e9"):
        busy = reply(503, f"Retry-After: {value}")
        server.play(one_after_another(busy, reply(200, body=b"x")))
        assert get(remote, server.url) == b"x"


def test_a_wait_that_is_too_long_is_an_error_with_a_hint(server: Server, remote: Remote) -> None:
    for line, seconds in (("Retry-After: 9999", "9,999"), ('RateLimit: "x";r=0;t=600', "601")):
        script = server.play(reply(429, line))
        assert seconds in str(failure(remote, server.url).hint)
        assert len(script.asked) == 1


# TLS


def test_certificates_and_names_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tls_server() as server,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as client,
        HttpClient(retry_policy=RETRY_POLICY) as distrusting,
    ):
        script = server.play(reply(200, body=b"x"))
        assert [get(client, server.url) for _ in range(3)] == [b"x"] * 3
        assert script.connections == 1
        assert get(client, f"https://localhost:{server.port}/") == b"x"
        monkeypatch.setattr(socket, "getaddrinfo", resolving({"other.test": [server.host]}))
        for one, host in ((client, "other.test"), (distrusting, server.host)):
            error = failure(one, f"https://{host}:{server.port}/")
            assert (error.temporary, "certificate" in str(error)) == (False, True)
        assert "SSL_CERT_FILE for commands" in (error.hint or "")
