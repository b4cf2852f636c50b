"""Requests: what is sent, which replies are believed, when one is tried again, and TLS."""

from __future__ import annotations

import socket
import ssl
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from support.corpus import refusal
from support.servers import KEEP_ALIVE, Server, head, one_after_another, reply

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    StorageError,
    UsageError,
)
from blobstore.io.http import connections
from blobstore.io.http.client import HttpClient, Request
from blobstore.io.http.remote_files import Remote

from .conftest import CERTIFICATE, RETRY_POLICY, resolving, tls_server

GET = Request("GET", (200,))
WHOLE = b"Content-Length: 1\r\n"


def get(client: HttpClient, url: str) -> bytes:
    """Return the body of a 200."""
    with client.request(GET, client.start(url), client.limits(2**20)) as (answer, _):
        return b"".join(answer.chunks())


def failure(client: HttpClient, url: str) -> RemoteError:
    """Return the error of a request."""
    error = refusal(lambda: get(client, url))
    assert isinstance(error, RemoteError), error
    return error


# Requests


def test_what_a_request_says(server: Server, remote: Remote) -> None:
    script = server.play(lambda _: reply(200, body=b"x"))
    assert get(remote, server.at("a?b=c#d")) == b"x"
    (asked,) = script.asked
    assert asked.target == "/a?b=c"
    assert asked.fields == {
        "host": f"127.0.0.1:{server.port}",
        "user-agent": "blobstore/0.1.0",
        "accept": "*/*",
        "accept-encoding": "identity",
    }


def test_the_environment_is_ignored(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    script = server.play(lambda _: reply(200, body=b"x"))
    with HttpClient(retry_policy=RETRY_POLICY) as client, tls_server() as secure:
        assert get(client, server.url) == b"x"
        assert "authorization" not in script.asked[0].fields
        assert "certificate" in str(failure(client, secure.url))


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "ä", "x" * 5000])
def test_what_is_not_a_token_is_refused(token: str) -> None:
    error = refusal(lambda: HttpClient(token))
    assert isinstance(error, UsageError)
    assert token not in str(error) or token == ""


def test_a_token_is_not_in_an_error_nor_in_its_frames(server: Server) -> None:
    challenge = 'WWW-Authenticate: Bearer realm="http://127.0.0.1:9",service="x"'
    script = server.play(lambda _: reply(401, challenge, "Set-Cookie: a=b; Path=/"))
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


@pytest.mark.parametrize(
    "line",
    [
        b"X: a\r\n b\r\n",
        b" X: a\r\n",
        b"X: a\rContent-Length: 9\r\n",
        b"X: a\0b\r\n",
        b"Content-Length : 9\r\n",
        b"no colon\r\n",
        b"abc\r\n",  # it could be the length of a chunk
        b"HTTP/1.1 200 OK\r\n",
        b"Content-Length: 9\r\n",
        b"Transfer-Encoding: chunked\r\n",  # RFC 9112 section 6.3: it may hide another reply
        b"X: " + b"x" * 70_000 + b"\r\n",
        b'content-type:\xa0Multipart/x; a="' + b";" * 60_000 + b"\r\n",
        b"X: y\r\n" * 100,
        (b"X: " + b"x" * 60_000 + b"\r\n") * 2,
    ],
    ids=range(14),
)
def test_a_head_that_hides_something_is_refused(
    line: bytes, server: Server, remote: Remote
) -> None:
    script = server.play(lambda _: [b"HTTP/1.1 200 OK\r\n" + line + WHOLE + b"\r\nx"])
    assert failure(remote, server.url).rule == "R1"
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "line",
    [
        "Content-Length: +1",
        "Content-Length: 1_0",
        "Content-Length: 1, 1",
        "Content-Length: 9999999999999999999",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked ",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_a_length_that_others_read_otherwise_is_refused(
    line: str, server: Server, remote: Remote
) -> None:
    script = server.play(lambda _: [head(200, line) + b"1\r\nx\r\n0\r\n\r\n"])
    assert failure(remote, server.url).rule == "R1"
    assert len(script.asked) == 1


@pytest.mark.parametrize("status", ["HTTP/2.0 200 x", "HTTP/1.1 +20 x", "ICY 200 OK"])
def test_an_invalid_status_line_is_refused(status: str, server: Server, remote: Remote) -> None:
    server.play(lambda _: [status.encode() + b"\r\n" + WHOLE + b"\r\nx"])
    assert failure(remote, server.url).rule == "R1"


@pytest.mark.parametrize("length", ["-5", "+5", "0x5", "5_0", "", "8000000000000000"])
def test_an_invalid_length_of_a_chunk_is_refused(
    length: str, server: Server, remote: Remote
) -> None:
    chunks = f"{length}\r\nabcde\r\n0\r\n\r\n".encode()
    script = server.play(lambda _: [head(200, "Transfer-Encoding: chunked") + chunks])
    assert failure(remote, server.url).rule == "R1"
    assert len(script.asked) == 1


def test_the_next_page_is_found_in_time(server: Server, remote: Remote) -> None:
    """It took 18 seconds when each address was searched to the end of the field."""
    link = "Link: " + "<a>;" * 15_000 + '<b>; rel="next"'
    server.play(lambda _: reply(200, link))
    with remote.request(GET, remote.start(server.url), remote.limits(2**20)) as (answer, _):
        assert answer.next_page() == "b"


# Bodies and connections


def test_a_body_of_known_length_is_in_pieces_of_a_useful_size(
    server: Server, remote: Remote
) -> None:
    """Whatever a server sends at once: TLS has 16 KiB, and each piece passes several readers."""
    size = 300_000
    server.play(lambda _: [head(200, f"Content-Length: {size}"), *[bytes(5000)] * 60])
    with remote.request(GET, remote.start(server.url), remote.limits(2**20)) as (answer, _):
        assert [len(piece) for piece in answer.body(size)] == [131_072, 131_072, 37_856]


def test_a_document_is_read_up_to_its_limit(server: Server, remote: Remote) -> None:
    script = server.play(lambda _: reply(200, body=b"x" * 1000))
    assert remote.read_page(server.url, 1000)[0] == b"x" * 1000
    assert isinstance(refusal(lambda: remote.read_page(server.url, 999)), LimitExceededError)
    assert [asked.range for asked in script.asked] == [None, None]


def test_a_document_whose_connection_breaks_is_asked_for_again(
    server: Server, remote: Remote
) -> None:
    cut = [head(200, "Content-Length: 1000") + b"x" * 100]
    script = server.play(one_after_another(cut, reply(200, body=b"x" * 1000)))
    assert remote.read_page(server.url, 1000)[0] == b"x" * 1000
    assert len(script.asked) == 2
    script = server.play(lambda _: cut)
    assert isinstance(refusal(lambda: remote.read_page(server.url, 1000)), RemoteError)
    assert len(script.asked) == RETRY_POLICY.attempts


@pytest.mark.parametrize("status", [200, 204, 404])
def test_bytes_after_a_reply_never_answer_the_next_request(
    status: int, server: Server, remote: Remote
) -> None:
    length = b"" if status == 204 else b"Content-Length: 0\r\n"
    more = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny"
    first = [b"HTTP/1.1 %d x\r\n%b\r\n%b" % (status, length, more), KEEP_ALIVE]
    script = server.play(one_after_another(first, reply(200, body=b"right")))
    with suppress(BlobStoreError):
        get(remote, server.url)
    assert get(remote, server.url) == b"right"
    assert script.connections == 2


def test_a_connection_that_is_to_be_closed_is_not_used_again(
    server: Server, remote: Remote
) -> None:
    for begin in (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"):
        answer = [begin + WHOLE + b"\r\nx", KEEP_ALIVE]
        script = server.play(one_after_another(answer))
        assert [get(remote, server.url) for _ in range(2)] == [b"x"] * 2
        assert script.connections == 2


def test_a_body_without_a_length_ends_as_its_protocol_has_it(
    server: Server, remote: Remote
) -> None:
    """A reset, or an end of TCP within TLS, can be anybody's (RFC 9112 section 9.8)."""
    body = b"HTTP/1.1 200 OK\r\n\r\nabc"
    server.play(lambda _: [body])
    assert get(remote, server.url) == b"abc"

    listener = socket.create_server(("127.0.0.1", 0))

    def reset() -> None:
        connection, _ = listener.accept()
        connection.recv(1)  # what is left unread makes the end a reset
        connection.sendall(body)
        connection.close()

    threading.Thread(target=reset, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    with listener, remote.request(GET, remote.start(url), remote.limits(2**20)) as (answer, _):
        error = refusal(lambda: list(answer.chunks()))
    assert isinstance(error, RemoteError)
    assert error.temporary

    with (
        tls_server() as secure,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as trusting,
    ):
        secure.play(lambda _: [body])  # and no close_notify
        failure(trusting, secure.url)


def test_only_a_few_idle_connections_are_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST_IDLE", 3)
    table = {f"{number}.test": ["127.0.0.1"] for number in range(5)}
    monkeypatch.setattr(socket, "getaddrinfo", resolving(table))
    script = server.play(lambda _: reply(200, body=b"x"))
    with HttpClient(retry_policy=RETRY_POLICY) as client:
        for number in (1, 2, 3, 1, 4, 1):
            assert get(client, f"http://{number}.test:{server.port}/") == b"x"
    first = [asked.connection == script.asked[0].connection for asked in script.asked]
    assert first == [True, False, False, True, False, False]


# Failures


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_temporary_failure_is_tried_again(status: int, server: Server, remote: Remote) -> None:
    script = server.play(one_after_another(reply(status), reply(status), reply(200, body=b"x")))
    assert get(remote, server.url) == b"x"
    assert len(script.asked) == 3
    script = server.play(lambda _: reply(status))
    error = failure(remote, server.url)
    assert (error.status, error.temporary) == (status, True)
    assert len(script.asked) == RETRY_POLICY.attempts


@pytest.mark.parametrize("status", [206, 300, 304, 400, 404, 501, 599])
def test_any_other_failure_is_final(status: int, server: Server, remote: Remote) -> None:
    script = server.play(lambda _: reply(status, "Location: /b"))
    error = refusal(lambda: get(remote, server.url))
    assert isinstance(error, NotFoundError if status == 404 else RemoteError)
    assert len(script.asked) == 1
    assert error.path == server.url
    if isinstance(error, RemoteError):
        assert (error.status, error.temporary) == (status, False)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nX: y\r\n"])
def test_a_connection_that_breaks_before_an_answer_is_tried_again(
    begin: bytes, server: Server, remote: Remote
) -> None:
    script = server.play(one_after_another([begin] if begin else [], reply(200, body=b"x")))
    assert get(remote, server.url) == b"x"
    assert len(script.asked) == 2


def test_a_server_that_does_not_exist(remote: Remote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = failure(remote, f"http://127.0.0.1:{port}/")
    assert (refused.temporary, "refused" in str(refused)) == (True, True)
    unknown = failure(remote, "http://nowhere.invalid/")
    assert (unknown.temporary, "its host is unknown" in str(unknown)) == (False, True)


@pytest.mark.parametrize("value", ["0", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "1e9"])
def test_what_retry_after_may_say(value: str, server: Server, remote: Remote) -> None:
    busy = reply(503, f"Retry-After: {value}")
    server.play(one_after_another(busy, reply(200, body=b"x")))
    assert get(remote, server.url) == b"x"


@pytest.mark.parametrize(
    ("line", "seconds"),
    [("Retry-After: 1000000000", "1,000,000,000"), ('RateLimit: "x";r=0;t=600', "601")],
)
def test_a_wait_that_is_too_long_is_an_error_with_a_hint(
    line: str, seconds: str, server: Server, remote: Remote
) -> None:
    script = server.play(lambda _: reply(429, line))
    assert f"asks to wait for {seconds} seconds" in str(failure(remote, server.url).hint)
    assert len(script.asked) == 1


# TLS


def test_certificates_and_names_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tls_server() as server,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as client,
        HttpClient(retry_policy=RETRY_POLICY) as distrusting,
    ):
        script = server.play(lambda _: reply(200, body=b"x"))
        assert [get(client, server.url) for _ in range(3)] == [b"x"] * 3
        assert script.connections == 1
        assert get(client, f"https://localhost:{server.port}/") == b"x"
        monkeypatch.setattr(socket, "getaddrinfo", resolving({"other.test": [server.host]}))
        for one, host in ((client, "other.test"), (distrusting, server.host)):
            error = failure(one, f"https://{host}:{server.port}/")
            assert (error.temporary, "certificate is not trusted" in str(error)) == (False, True)


def test_the_systems_certificates_are_read_for_tls_only(server: Server) -> None:
    server.play(lambda _: reply(200, body=b"x"))

    def broken(_ca_file: object) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=__file__)

    with mock.patch.object(connections, "_tls_context", broken), HttpClient() as client:
        assert get(client, server.url) == b"x"
        error = failure(client, server.url.replace("http:", "https:"))
    assert (error.temporary, "TLS is not possible: NO_CERTIFICATE" in str(error)) == (False, True)


def test_a_server_that_does_not_speak_tls(server: Server, remote: Remote) -> None:
    failure(remote, server.url.replace("http:", "https:"))


def test_certificates_that_can_not_be_read() -> None:
    assert isinstance(refusal(lambda: HttpClient(ca_file="/nowhere.pem")), NotFoundError)
    assert isinstance(refusal(lambda: HttpClient(ca_file=__file__)), StorageError)
