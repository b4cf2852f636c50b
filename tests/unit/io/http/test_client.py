"""Requests: what is sent, where redirects may lead, when it is tried again, and who is believed."""

from __future__ import annotations

import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import FIXTURES
from support.corpus import refusal
from support.retry_policies import patient_policy
from support.servers import (
    KEEP_ALIVE,
    Asked,
    Server,
    head,
    one_after_another,
    redirect,
    reply,
    server as run_server,
)

from blobstore.errors import BlobStoreError, NotFoundError, RemoteError, StorageError
from blobstore.io.http import connections
from blobstore.io.http.client import HttpClient, Request
from blobstore.io.http.web_addresses import RequestTarget, WebAddress, redirected

RETRY_POLICY = patient_policy(attempts=3, backoff_s=0.001, longest_wait_s=2)
CERTIFICATE = FIXTURES / "tls" / "certificate.pem"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server."""
    with run_server() as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Iterator[HttpClient]:
    """A client without a token."""
    with HttpClient(retry_policy=RETRY_POLICY) as made:
        yield made


@contextmanager
def public(*addresses: str) -> Iterator[HttpClient]:
    """Give a client for which these addresses are out on the internet and all others are not."""
    with HttpClient(
        retry_policy=RETRY_POLICY, is_public=lambda address: address in addresses
    ) as made:
        yield made


GET = Request("GET", (200,))


def get(client: HttpClient, url: str) -> bytes:
    """Return the body of a 200."""
    with client.request(GET, client.start(url), client.limits(2**20)) as (answer, _):
        return b"".join(answer.chunks())


def failure(client: HttpClient, url: str) -> BlobStoreError:
    return refusal(lambda: get(client, url))


def test_a_body_of_known_length_is_in_pieces_of_a_useful_size(
    server: Server, client: HttpClient
) -> None:
    """Whatever a server sends at once: TLS has 16 KiB, and each piece passes several readers."""
    size = 300_000
    server.play(lambda _: [head(200, f"Content-Length: {size}"), *[bytes(5000)] * 60])
    with client.request(GET, client.start(server.url), client.limits(2**20)) as (answer, _):
        assert [len(piece) for piece in answer.body(size)] == [131_072, 131_072, 37_856]


def test_what_a_request_says(server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: reply(200, body=b"x"))
    assert get(client, server.at("a?b=c#d")) == b"x"
    (asked,) = script.asked
    assert asked.target == "/a?b=c"
    assert asked.fields == {
        "host": f"127.0.0.1:{server.port}",
        "user-agent": "blobstore/0.1.0",
        "accept": "*/*",
        "accept-encoding": "identity",
    }


def test_the_environment_is_not_looked_at(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    (tmp_path / ".netrc").chmod(0o600)
    for name, value in {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / ".netrc"),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "ALL_PROXY": "http://127.0.0.1:9",
        "SSL_CERT_FILE": str(CERTIFICATE),
    }.items():
        monkeypatch.setenv(name, value)
    script = server.play(lambda _: reply(200, body=b"x"))
    with HttpClient(retry_policy=RETRY_POLICY) as client:
        assert get(client, server.url) == b"x"
        assert "authorization" not in script.asked[0].fields
        with tls_server() as secure:
            assert "certificate" in str(failure(client, secure.url))


def test_a_reply_of_two_lengths_is_refused(server: Server, client: HttpClient) -> None:
    """RFC 9112 section 6.3: it may be an attempt to smuggle another reply."""
    two = head(200, "Content-Length: 1", "Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n\r\n"
    server.play(lambda _: [two])
    error = failure(client, server.url)
    assert isinstance(error, RemoteError)
    assert "two lengths" in error.message


WHOLE = b"Content-Length: 1\r\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"X: a\r\n b\r\n", "invalid or unfinished line"),
        (b"X: a\r\n\tb\r\n", "invalid or unfinished line"),
        (b" X: a\r\n", "invalid or unfinished line"),
        (b"X: a\rContent-Length: 9\r\n", "invalid or unfinished line"),
        (b"X: a\0b\r\n", "invalid or unfinished line"),
        (b"Content-Length : 9\r\n", "invalid or unfinished line"),
        (b"Content Length: 9\r\n", "invalid or unfinished line"),
        (b": 9\r\n", "invalid or unfinished line"),
        (b"no colon\r\n", "invalid or unfinished line"),
        (b"abc\r\n", "invalid head"),  # it could be the length of a chunk
        (b"HTTP/1.1 200 OK\r\n", "invalid head"),
        (b"From me\r\n", "invalid or unfinished line"),
        (b"Content-Length: 1\r\n", "2 fields"),
        (b"Content-Length: 9\r\n", "2 fields"),
        (b"Transfer-Encoding: chunked\r\n", "two lengths"),
        (b"X: " + b"x" * 70_000 + b"\r\n", "invalid or unfinished line"),
        (b"Content-Type: multipart/x; boundary*=a; boundary*1=b\r\n", "invalid or unfinished line"),
        (b'content-type:\xa0Multipart/x; a="' + b";" * 60_000 + b"\r\n", "invalid or unfinished"),
        (b"X: y\r\n" * 100, "got more than 100 headers"),
        ((b"X: " + b"x" * 60_000 + b"\r\n") * 2, "more than 102,400 bytes"),
    ],
)
def test_heads_that_hide_something(
    line: bytes, text: str, server: Server, client: HttpClient
) -> None:
    script = server.play(lambda _: [b"HTTP/1.1 200 OK\r\n" + line + WHOLE + b"\r\nx"])
    error = failure(client, server.url)
    assert (error.rule, text in str(error)) == ("R1", True), error
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "line",
    [
        *("Content-Length: +1", "Content-Length: 1_0", "Content-Length: 1, 1", "Content-Length: "),
        *("Content-Length: -1", "Content-Length: 0x1", "Content-Length: 9999999999999999999"),
        *("Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity"),
        *("Transfer-Encoding: ", "Transfer-Encoding: chunked ", "Transfer-Encoding: xchunked"),
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_lengths_that_others_read_otherwise(line: str, server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: [head(200, line) + b"1\r\nx\r\n0\r\n\r\n"])
    assert failure(client, server.url).rule == "R1"
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "status", ["HTTP/2.0 200 x", "HTTP/1.1 +20 x", "HTTP/1.1 2_0 x", "HTTP/1.1 0200", "ICY 200 OK"]
)
def test_invalid_status_lines(status: str, server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: [status.encode() + b"\r\n" + WHOLE + b"\r\nx"])
    assert failure(client, server.url).rule == "R1"
    assert len(script.asked) == 1


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nX: y\r\n"])
def test_a_head_that_ends_too_early_is_asked_for_again(
    begin: bytes, server: Server, client: HttpClient
) -> None:
    script = server.play(one_after_another([begin], reply(200, body=b"x")))
    assert get(client, server.url) == b"x"
    assert len(script.asked) == 2


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny"])
@pytest.mark.parametrize("status", [200, 204, 304, 404])
def test_bytes_behind_a_reply_never_answer_the_next_request(
    status: int, more: bytes, server: Server, client: HttpClient
) -> None:
    length = b"" if status == 204 else b"Content-Length: 0\r\n"
    first = b"HTTP/1.1 %d x\r\n%b\r\n" % (status, length)
    script = server.play(one_after_another([first + more, KEEP_ALIVE], reply(200, body=b"right")))
    with suppress(BlobStoreError):
        get(client, server.url)
    assert get(client, server.url) == b"right"
    assert script.connections == 2


def test_a_connection_that_is_to_be_closed_is_not_used_again(
    server: Server, client: HttpClient
) -> None:
    for begin in (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"):
        answer = [begin + WHOLE + b"\r\nx", KEEP_ALIVE]
        script = server.play(one_after_another(answer))
        assert [get(client, server.url) for _ in range(2)] == [b"x"] * 2
        assert script.connections == 2


def test_a_body_without_a_length_ends_as_its_protocol_has_it(
    server: Server, client: HttpClient
) -> None:
    """A reset, or an end of TCP within TLS, can be anybody's (RFC 9112 section 9.8)."""
    body = [b"HTTP/1.1 200 OK\r\n\r\nabc"]
    server.play(lambda _: body)
    assert get(client, server.url) == b"abc"
    reset = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError):  # the test has closed it
            while True:
                connection, _ = reset.accept()
                connection.recv(1)  # what is left unread makes the end a reset
                connection.sendall(body[0])
                connection.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{reset.getsockname()[1]}/"
    with reset, client.request(GET, client.start(url), client.limits(2**20)) as (one, _):
        error = refusal(lambda: list(one.chunks()))
    assert isinstance(error, RemoteError)
    assert error.temporary
    with (
        tls_server() as secure,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as trusting,
    ):
        secure.play(lambda _: body)  # and no close_notify
        assert isinstance(failure(trusting, secure.url), RemoteError)


def test_connections_to_any_number_of_servers_are_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST_IDLE", 3)
    found = names({f"{number}.test": ["127.0.0.1"] for number in range(5)})
    monkeypatch.setattr(socket, "getaddrinfo", found)
    script = server.play(lambda _: reply(200, body=b"x"))
    with HttpClient(retry_policy=RETRY_POLICY) as client:
        for number in (1, 2, 3, 1, 4, 1):
            assert get(client, f"http://{number}.test:{server.port}/") == b"x"
    assert [asked.connection == script.asked[0].connection for asked in script.asked] == [
        *(True, False, False),
        *(True, False, False),
    ]


def test_references_to_a_next_page_are_found_in_time(server: Server, client: HttpClient) -> None:
    """It took 18 seconds when each of them was looked at to the end of the field."""
    link = "Link: " + "<a>;" * 15_000 + '<b>; rel="next"'
    server.play(lambda _: reply(200, link))
    with client.request(GET, client.start(server.url), client.limits(2**20)) as (one, _):
        assert one.next_page() == "b"


def test_a_token_is_in_no_frame_of_an_error(server: Server) -> None:
    server.play(lambda _: [])
    with HttpClient("swordfish", retry_policy=RETRY_POLICY) as client:
        error = failure(client, server.url)
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), capture_locals=True
    )
    ours = [frame for frame in frames if "/blobstore/" in frame.filename]
    assert ours
    assert "swordfish" not in str([frame.locals for frame in ours])


# Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int, server: Server, client: HttpClient) -> None:
    script = server.play(one_after_another(redirect("/b?c", status), reply(200, body=b"x")))
    assert get(client, server.at("a")) == b"x"
    assert [asked.target for asked in script.asked] == ["/a", "/b?c"]
    assert script.connections == 1


@pytest.mark.parametrize("status", [300, 304, 305, 306])
def test_other_statuses_redirect_nowhere(status: int, server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: redirect("/b", status))
    assert isinstance(failure(client, server.url), RemoteError)
    assert len(script.asked) == 1


def test_five_redirects_are_followed_and_six_are_not(server: Server, client: HttpClient) -> None:
    def answer(asked: Asked) -> list[bytes]:
        return (
            reply(200, body=b"x")
            if asked.target == "/0"
            else redirect(f"/{int(asked.target[1:]) - 1}")
        )

    server.play(answer)
    assert get(client, server.at("5")) == b"x"
    assert failure(client, server.at("6")).rule == "R2"


@pytest.mark.parametrize(
    "lines", [[], ["Location: /a", "Location: /b"], ["Location: "], ["Location: ftp://h/"]]
)
def test_redirects_without_a_usable_location(
    lines: list[str], server: Server, client: HttpClient
) -> None:
    server.play(lambda _: reply(302, *lines))
    assert failure(client, server.url).rule in ("R1", "R2")


def test_the_address_that_was_asked_for_is_in_the_message(
    server: Server, client: HttpClient
) -> None:
    server.play(one_after_another(redirect("/signed?key=secret"), reply(403)))
    error = failure(client, server.at("asked"))
    assert server.at("asked") in str(error)
    assert server.at("signed") in str(error)
    assert "secret" not in str(error) + str(error.path)


def test_no_redirect_from_https_to_http() -> None:
    target = RequestTarget(WebAddress.parse("https://h/a"), "Bearer secret")
    error = refusal(lambda: redirected(target, "http://h/a", from_public=False))
    assert (error.rule, "https to http" in str(error)) == ("R2", True)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("https://h/a", "https://h/b", True),
        ("https://h/a", "https://h:443/b", True),
        ("http://h/a", "https://h/b", False),
        ("https://h/a", "https://h:444/b", False),
        ("https://h/a", "https://i/b", False),
        ("https://h/a", "https://sub.h/b", False),
    ],
)
def test_credentials_stay_with_their_origin(before: str, after: str, kept: bool) -> None:
    start = RequestTarget(WebAddress.parse(before), "Bearer secret")
    target = redirected(start, after, from_public=False)
    assert (target.authorization is not None) is kept
    back = redirected(target, before.replace("http:", "https:"), from_public=False)
    assert back.authorization is None or kept
    without = redirected(RequestTarget(WebAddress.parse(before)), after, from_public=False)
    assert without.authorization is None
    assert "secret" not in repr(start)


def test_what_was_public_stays_public() -> None:
    target = redirected(RequestTarget(WebAddress.parse("https://h/")), "/b", from_public=True)
    assert target.public_only
    assert redirected(target, "/c", from_public=False).public_only


# Public and private networks


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "localhost", "10.0.0.1", "[::1]", "[fe80::1]", "0", "127.2", "0x7f000002"]
)
def test_a_public_server_redirects_to_no_private_one(host: str, server: Server) -> None:
    script = server.play(lambda _: redirect(f"http://{host}:{server.port}/x"))
    with public("127.0.0.1") as client, monkeypatched_localhost():
        assert "private network" in str(failure(client, server.at("a")))
    assert [asked.target for asked in script.asked] == ["/a"]


@contextmanager
def monkeypatched_localhost() -> Iterator[None]:
    """Resolve ``localhost`` to 127.0.0.2 for the block: it plays the public server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", names({"localhost": ["127.0.0.2"]}))
        yield


def names(table: dict[str, list[str]]) -> Callable[..., Any]:
    """Return a ``getaddrinfo`` with its own answers for some names.

    It removes each answer from a list of several.
    """
    system = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        addresses = table.get(host, [])
        return system(
            addresses.pop(0) if len(addresses) > 1 else addresses[0] if addresses else host,
            *arguments,
            **options,
        )

    return getaddrinfo


def test_a_private_server_may_redirect_anywhere(server: Server) -> None:
    with run_server("127.0.0.1") as other:
        server.play(lambda _: redirect(other.url))
        other.play(lambda _: reply(200, body=b"x"))
        with public() as client:
            assert get(client, server.url) == b"x"


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "metadata.test"])
def test_no_server_redirects_to_a_link_local_address(host: str, server: Server) -> None:
    server.play(lambda _: redirect(f"http://{host}/latest/meta-data"))
    with pytest.MonkeyPatch.context() as patch, public() as client:
        patch.setattr(socket, "getaddrinfo", names({"metadata.test": ["169.254.1.1"]}))
        assert "link-local" in str(failure(client, server.url))


def test_a_public_server_may_redirect_to_a_public_one(server: Server) -> None:
    server.play(one_after_another(redirect("/b"), reply(200, body=b"x")))
    with public("127.0.0.1") as client:
        assert get(client, server.url) == b"x"


def test_a_name_that_resolves_to_something_else_a_moment_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: a name is looked up once a connection, and the checked address is used."""
    script = server.play(lambda _: redirect(f"http://rebinding.test:{server.port}/x"))
    monkeypatch.setattr(
        socket, "getaddrinfo", names({"rebinding.test": ["127.0.0.1", "127.0.0.2"]})
    )
    with public("127.0.0.1") as client:
        assert "more than 5 redirects" in str(failure(client, server.at("a")))
    assert len(script.asked) == 6
    assert {asked.fields["host"] for asked in script.asked} == {
        f"127.0.0.1:{server.port}",
        f"rebinding.test:{server.port}",
    }


def test_of_a_name_with_both_kinds_of_addresses_the_public_one_is_taken(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = socket.getaddrinfo

    def both(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "both.test":
            return system(host, *arguments, **options)
        return [
            found
            for one in ("127.0.0.9", "127.0.0.1")
            for found in system(one, *arguments, **options)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    server.play(
        one_after_another(redirect(f"http://both.test:{server.port}/x"), reply(200, body=b"x"))
    )
    with public("127.0.0.1") as client:
        assert get(client, server.url) == b"x"


def test_a_kept_alive_connection_is_judged_again(server: Server) -> None:
    """The private server was asked for by a person before.

    A public one that redirects to it gains nothing by that.
    """
    with run_server("127.0.0.1") as private:
        script = private.play(lambda _: reply(200, body=b"x"))
        server.play(lambda _: redirect(f"http://private.test:{private.port}/"))
        with pytest.MonkeyPatch.context() as patch, public("127.0.0.1") as client:
            patch.setattr(socket, "getaddrinfo", names({"private.test": ["127.0.0.1"]}))
            is_public = client._kept._is_public
            client._kept._is_public = lambda _: False  # as the connection is made
            assert get(client, f"http://private.test:{private.port}/") == b"x"
            client._kept._is_public = is_public
            assert "private network" in str(failure(client, server.url))
        assert len(script.asked) == 1


# Again, and how long to wait


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_temporary_failures_are_tried_again(
    status: int, server: Server, client: HttpClient
) -> None:
    script = server.play(one_after_another(reply(status), reply(status), reply(200, body=b"x")))
    assert get(client, server.url) == b"x"
    assert len(script.asked) == 3
    script = server.play(lambda _: reply(status))
    error = failure(client, server.url)
    assert isinstance(error, RemoteError)
    assert (error.status, error.temporary, len(script.asked)) == (
        status,
        True,
        RETRY_POLICY.attempts,
    )


@pytest.mark.parametrize(
    "status", [206, 400, 401, 402, 403, 405, 407, 410, 418, 451, 501, 505, 599]
)
def test_other_failures_are_not(status: int, server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: reply(status))
    error = failure(client, server.url)
    assert isinstance(error, RemoteError)
    assert (error.status, error.temporary, len(script.asked)) == (status, False, 1)
    assert error.path == server.url


def test_404_is_not_found(server: Server, client: HttpClient) -> None:
    server.play(lambda _: reply(404))
    assert isinstance(failure(client, server.url), NotFoundError)


def test_a_connection_that_breaks_before_an_answer_is_tried_again(
    server: Server, client: HttpClient
) -> None:
    script = server.play(one_after_another([], reply(200, body=b"x")))
    assert get(client, server.url) == b"x"
    assert len(script.asked) == 2


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with HttpClient(retry_policy=RETRY_POLICY) as client:
        error = failure(client, f"http://127.0.0.1:{port}/")
        assert isinstance(error, RemoteError)
        assert (error.temporary, "refused" in str(error)) == (True, True)
        error = failure(client, "http://nowhere.invalid/")
        assert isinstance(error, RemoteError)
        assert (error.temporary, "its host is unknown" in str(error)) == (False, True)


@pytest.mark.parametrize(
    "value", ["0", "1000000000", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "soon", "1e9", "0.5"]
)
def test_what_retry_after_may_say(value: str, server: Server, client: HttpClient) -> None:
    script = server.play(
        one_after_another(reply(503, f"Retry-After: {value}"), reply(200, body=b"x"))
    )
    if value == "1000000000":
        error = failure(client, server.url)
        assert "1,000,000,000 seconds" in str(error.hint)
        assert len(script.asked) == 1
    else:
        assert get(client, server.url) == b"x"


def test_who_asks_to_wait_too_long_is_not_asked_again(server: Server, client: HttpClient) -> None:
    script = server.play(lambda _: reply(429, "Retry-After: 100"))
    assert "asks to wait" in str(failure(client, server.url).hint)
    assert len(script.asked) == 1


# TLS


@contextmanager
def tls_server() -> Iterator[Server]:
    """Run a server whose certificate is for ``localhost`` and 127.0.0.1, and trusted by nobody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, FIXTURES / "tls" / "key.pem")
    with run_server(context=context) as running:
        running.play(lambda _: reply(200, body=b"x"))
        yield running


def test_certificates_and_names_are_checked() -> None:
    with (
        tls_server() as server,
        HttpClient(retry_policy=RETRY_POLICY, ca_file=str(CERTIFICATE)) as client,
    ):
        assert get(client, server.url) == b"x"
        assert get(client, f"https://localhost:{server.port}/") == b"x"
        script = server.play(lambda _: reply(200, body=b"x"))
        assert [get(client, server.url) for _ in range(3)] == [b"x"] * 3
        assert script.connections == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", names({"other.test": ["127.0.0.1"]}))
            error = failure(client, f"https://other.test:{server.port}/")
        assert isinstance(error, RemoteError)
        assert (error.temporary, "certificate is not trusted" in str(error)) == (False, True)


def test_the_systems_certificates_are_read_for_tls_only(server: Server) -> None:
    server.play(lambda _: reply(200, body=b"x"))

    def broken(_ca_file: object) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=__file__)

    with mock.patch.object(connections, "_tls_context", broken), HttpClient() as client:
        assert get(client, server.url) == b"x"
        error = failure(client, server.url.replace("http:", "https:"))
    assert isinstance(error, RemoteError)
    assert (error.temporary, "TLS is not possible: NO_CERTIFICATE" in str(error)) == (False, True)


def test_what_speaks_no_tls(server: Server, client: HttpClient) -> None:
    error = failure(client, server.url.replace("http:", "https:"))
    assert isinstance(error, RemoteError)


def test_certificates_that_are_not_there() -> None:
    assert isinstance(refusal(lambda: HttpClient(ca_file="/nowhere.pem")), NotFoundError)
    assert isinstance(refusal(lambda: HttpClient(ca_file=__file__)), StorageError)
