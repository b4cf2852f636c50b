"""Where redirects may lead: public and private networks, and which origin gets the token."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.corpus import refusal
from support.servers import Asked, Server, one_after_another, part, redirect, reply

from blobstore.errors import RemoteError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.http.remote_files import Remote
from blobstore.io.http.web_addresses import RequestTarget, WebAddress, redirect_target

from .conftest import KIB, RETRY_POLICY, resolving, safetensors_file

DATA = safetensors_file(100 * KIB)


@contextmanager
def public(*addresses: str, token: str | None = None) -> Iterator[Remote]:
    """Give a client for which these addresses are out on the internet and all others are not."""
    with Remote(
        token, retry_policy=RETRY_POLICY, is_public=lambda address: address in addresses
    ) as made:
        yield made


def get(client: Remote, url: str) -> bytes:
    return client.read_page(url, 1000)[0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int, server: Server, remote: Remote) -> None:
    script = server.play(one_after_another(redirect("/b?c", status), reply(200, body=b"x")))
    assert get(remote, server.at("a")) == b"x"
    assert [asked.target for asked in script.asked] == ["/a", "/b?c"]
    assert script.connections == 1


def test_five_redirects_are_followed_and_six_are_not(server: Server, remote: Remote) -> None:
    def answer(asked: Asked) -> list[bytes]:
        left = int(asked.target[1:])
        return redirect(f"/{left - 1}") if left else reply(200, body=b"x")

    server.play(answer)
    assert get(remote, server.at("5")) == b"x"
    assert refusal(lambda: get(remote, server.at("6"))).rule == "R2"


@pytest.mark.parametrize("lines", [[], ["Location: /a", "Location: /b"], ["Location: ftp://h/"]])
def test_a_redirect_without_a_location(lines: list[str], server: Server, remote: Remote) -> None:
    server.play(reply(302, *lines))
    assert refusal(lambda: get(remote, server.url)).rule in ("R1", "R2")


def test_an_error_names_both_addresses_and_no_secret(server: Server, remote: Remote) -> None:
    server.play(one_after_another(redirect("/signed?key=secret"), reply(403)))
    error = refusal(lambda: get(remote, server.at("asked")))
    assert server.at("asked") in str(error)
    assert server.at("signed") in str(error)
    assert "secret" not in f"{error} {error.path}"


# Credentials


def test_credentials_stay_with_their_origin() -> None:
    for before, after, is_kept in (
        ("https://h/a", "https://h:443/b", True),
        ("http://h/a", "https://h/b", False),
        ("https://h/a", "https://h:444/b", False),
        ("https://h/a", "https://sub.h/b", False),
    ):
        start = RequestTarget(WebAddress.parse(before), "Bearer secret")
        target = redirect_target(start, after, from_public=False)
        assert (target.authorization is not None) is is_kept
        assert "secret" not in repr(start)


def test_where_a_redirect_may_lead() -> None:
    """Not from https to http, nor from public to private, however many are between."""
    start = RequestTarget(WebAddress.parse("https://h/a"))
    assert refusal(lambda: redirect_target(start, "http://h/a", from_public=False)).rule == "R2"
    target = redirect_target(start, "/b", from_public=True)
    assert target.public_only
    assert redirect_target(target, "/c", from_public=False).public_only


def test_a_token_is_for_the_first_origin_only(server: Server, other_server: Server) -> None:
    """Not for others that are named or redirected to, nor for where those redirect to."""
    leads = {
        "/away": redirect(other_server.url),
        "/and-back": redirect(other_server.at("back")),
        "/back": redirect(server.at("end")),
    }
    scripts = [
        one.play(lambda asked: leads.get(asked.target) or part(asked, DATA))
        for one in (server, other_server)
    ]
    with Remote("secret", retry_policy=RETRY_POLICY) as remote:
        for url in (server.url, other_server.url, server.at("away"), server.at("and-back")):
            header_of(remote.open(url))
    sent = [
        {asked.target: asked.fields.get("authorization") for asked in script.asked}
        for script in scripts
    ]
    first = dict.fromkeys(["/model.safetensors", "/away", "/and-back"], "Bearer secret")
    assert sent == [first | {"/end": None}, {"/model.safetensors": None, "/back": None}]


def test_a_token_is_not_sent_in_the_clear_to_a_public_server(server: Server) -> None:
    script = server.play(reply(200, body=b"x"))
    with public("127.0.0.1", token="secret") as client:  # noqa: S106
        assert "TLS" in str(refusal(lambda: get(client, server.url)))
    with public("127.0.0.1") as client:
        assert get(client, server.url) == b"x"
    assert [asked.fields.get("authorization") for asked in script.asked] == [None]


# Public and private networks


def test_a_public_server_may_not_redirect_to_a_private_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving({"localhost": ["127.0.0.2"]}))
    with public("127.0.0.1") as client:
        for host in ("127.0.0.2", "localhost", "[::1]", "0x7f000002"):
            script = server.play(redirect(f"http://{host}:{server.port}/x"))
            assert "private network" in str(refusal(lambda: get(client, server.at("a"))))
            assert [asked.target for asked in script.asked] == ["/a"]


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1",)])
def test_a_private_server_may_redirect_anywhere_and_a_public_one_to_itself(
    addresses: tuple[str, ...], server: Server, other_server: Server
) -> None:
    server.play(
        lambda asked: reply(200, body=b"x") if asked.target == "/b" else redirect(other_server.url)
    )
    other_server.play(redirect(server.at("b")))
    with public(*addresses) as client:
        assert get(client, server.at("a")) == b"x"


def test_no_server_may_redirect_to_a_link_local_address(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library understands many spellings, so addresses are checked after it."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving({"metadata.test": ["169.254.1.1"]}))
    hosts = ("169.254.169.254", "2852039166", "[::ffff:a9fe:a9fe]", "[fe80::1]", "metadata.test")
    with public() as client:
        for host in hosts:
            server.play(redirect(f"http://{host}/latest/meta-data"))
            assert "link-local" in str(refusal(lambda: get(client, server.url))), host


def test_a_name_that_moves_a_moment_later(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: a name is looked up once a connection, and the checked address is used."""
    script = server.play(redirect(f"http://rebinding.test:{server.port}/x"))
    table = {"rebinding.test": ["127.0.0.1", "127.0.0.2"]}
    monkeypatch.setattr(socket, "getaddrinfo", resolving(table))
    with public("127.0.0.1") as client:
        error = refusal(lambda: get(client, server.at("a")))
    assert "5 redirects" in str(error)
    assert len(script.asked) == 6


def test_a_kept_alive_connection_is_checked_again(
    server: Server, other_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user asked for the private server; a public one that redirects to it gains nothing."""
    is_public = {"127.0.0.1": False}
    monkeypatch.setattr(socket, "getaddrinfo", resolving({"private.test": ["127.0.0.1"]}))
    url = f"http://private.test:{other_server.port}/"
    script = other_server.play(reply(200, body=b"x"))
    server.play(redirect(url))
    with Remote(retry_policy=RETRY_POLICY, is_public=lambda address: is_public[address]) as client:
        assert get(client, url) == b"x"
        is_public["127.0.0.1"] = True
        error = refusal(lambda: get(client, server.url))
    assert isinstance(error, RemoteError)
    assert "private network" in str(error)
    assert len(script.asked) == 1
