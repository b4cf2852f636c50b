"""The guard: which hosts and methods are answered, and the headers of every answer."""

import pytest
from support.web_client import Client, ask

from blobstore.web.application import HEADERS, Hosts


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        ("127.0.0.1:8080", True),
        ("localhost:8080", True),
        ("[::1]:8080", True),
        ("192.168.1.7:8080", True),
        ("192.168.1.8:8080", False),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:8080@evil.example", False),
        ("", False),
    ],
)
def test_hosts(host: str, is_accepted: bool) -> None:
    assert Hosts("192.168.1.7", ["models.example"]).accept(host) is is_accepted


def test_a_server_at_every_address_takes_addresses_and_no_other_names() -> None:
    hosts = Hosts("::")
    assert hosts.accept("192.168.1.8:8080")
    assert not hosts.accept("evil.example")


def test_another_host_gets_nothing_of_the_store(client: Client) -> None:
    for target in ("/api/models", "/"):
        reply = client.get(target, host="evil.example:8080")
        assert reply.status == 421
        assert b"small" not in reply.body
        assert reply.json["hint"] == "Start it with --allowed-host HOST."


def test_one_host_has_to_be_named(client: Client) -> None:
    assert ask(client.app, "/api/models", fields=[]).status == 421
    twice = [("host", "127.0.0.1"), ("host", "evil.example")]
    assert ask(client.app, "/api/models", fields=twice).status == 421
    assert ask(client.app, "/api/models", fields=twice[:1]).status == 200


def test_every_answer_has_the_headers(client: Client) -> None:
    for target, method, host, status in (
        ("/api/models", "GET", "127.0.0.1", 200),
        ("/api/model", "GET", "127.0.0.1", 400),
        ("/nothing", "GET", "127.0.0.1", 404),
        ("/api/models", "POST", "127.0.0.1", 405),
        ("/api/models", "GET", "evil.example", 421),
    ):
        reply = client.get(target, method=method, host=host)
        assert reply.status == status
        for name, value in HEADERS.items():
            assert reply.headers[name] == value
        policy = reply.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "access-control-allow-origin" not in reply.headers
        assert (reply.headers.get("allow") == "GET, HEAD") == (status == 405)


def test_a_large_head_is_refused(client: Client) -> None:
    """As one write it is within what the server reads at once."""
    host = ("host", "127.0.0.1")
    assert ask(client.app, "/api/models", fields=[host, ("x-long", "x" * 16_000)]).status == 200
    assert ask(client.app, "/api/models", fields=[host, ("x-long", "x" * 120_000)]).status == 431
    assert ask(client.app, "/api/models", fields=[host, *[("x", "y")] * 4000]).status == 431
    assert client.get("/api/model?name=" + "a" * 2**14).status == 431
