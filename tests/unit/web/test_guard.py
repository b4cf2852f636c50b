"""The guard: which hosts and methods are answered, and the headers of every answer."""

from support.web_client import Client, ask

from blobstore.web.application import HEADERS, Hosts


def test_hosts() -> None:
    named, every = Hosts("192.168.1.7", ["models.example"]), Hosts("::")
    for host in ("127.0.0.1", "localhost", "[::1]", "192.168.1.7", "models.example"):
        assert named.accept(f"{host}:8080")
    others = ("192.168.1.8:8080", "evil.example:8080", "127.0.0.1.evil.example")
    for host in (*others, "localhost:8080@evil.example", ""):
        assert not named.accept(host)
    assert every.accept("192.168.1.8:8080")  # addresses, and no other names
    assert not every.accept("evil.example")


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
    for status, reply in {
        200: client.get("/api/models"),
        400: client.get("/api/model"),
        404: client.get("/nothing"),
        405: client.get("/api/models", method="POST"),
        421: client.get("/api/models", host="evil.example"),
    }.items():
        assert reply.status == status
        assert reply.headers.items() >= HEADERS.items()
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
