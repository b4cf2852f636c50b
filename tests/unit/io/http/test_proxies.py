"""Proxies: which are used for what, what they are sent, and what is judged without resolving."""

from collections.abc import Mapping

import pytest
from support.proxies import WebProxy, web_proxy
from support.servers import Server, redirect, reply

from blobstore.errors import RemoteError, UsageError
from blobstore.io.http.client import HttpClient
from blobstore.io.http.web_addresses import Proxy, WebAddress

from .conftest import CERTIFICATE, RETRY_POLICY, tls_server
from .test_client import failure, get

LOGIN = "Basic dXNlcjpwQDo="


@pytest.mark.parametrize(
    ("url", "proxies", "expected"),
    [
        ("http://a.test/x", {"http": "http://p.test:3128"}, "p.test:3128"),
        ("http://a.test/x", {"http": "p.test"}, "p.test:80"),
        ("http://a.test/x", {"http": "http://p.test/", "https": "http://q"}, "p.test:80"),
        ("https://a.test/x", {"http": "http://p.test"}, None),
        ("https://a.test/x", {"all": "http://[::1]:81", "https": ""}, "[::1]:81"),
        ("http://a.test/x", {"http": "p", "no": "*"}, None),
        ("http://a.test/x", {"http": "p", "no": "b.test, .A.test"}, None),
        ("http://b.a.test/x", {"http": "p", "no": "a.test"}, None),
        ("http://ba.test/x", {"http": "p", "no": "a.test,,"}, "p:80"),
        ("http://a.test:81/x", {"http": "p", "no": "a.test:80"}, "p:80"),
        ("http://10.1.2.3/x", {"http": "p", "no": "10.0.0.0/8"}, None),
        ("http://[::1]/x", {"http": "p", "no": "[::1]"}, None),
    ],
)
def test_which_proxy(url: str, proxies: Mapping[str, str], expected: str | None) -> None:
    proxy = Proxy.of(WebAddress.parse(url), proxies)
    assert (None if proxy is None else proxy.address.place) == expected


def test_a_proxy_that_is_not_http_is_refused_without_its_login() -> None:
    for text in ("socks5://u:secret@p:1080", "https://u:secret@p", "http://u:secret@"):
        with pytest.raises(UsageError, match="not the address of an http proxy") as error:
            Proxy.of(WebAddress.parse("https://a.test/"), {"https": text})
        assert "secret" not in str(error.value)


def through(
    proxy: WebProxy, login: str = "user:p%40%3A@", *, as_user: str | None = None
) -> HttpClient:
    address = f"http://{login}{proxy.address}"
    proxies = {"http": address, "https": address}
    ca_file = str(CERTIFICATE)
    return HttpClient(as_user, retry_policy=RETRY_POLICY, ca_file=ca_file, proxies=proxies)


def test_http_and_https_through_a_proxy(server: Server) -> None:
    script = server.play(reply(200, body=b"x"))
    with tls_server() as secure:
        inside = secure.play(reply(200, body=b"y"))
        names = {"files.test": server.port, "localhost:443": secure.port}
        with web_proxy(names, LOGIN) as proxy, through(proxy, as_user="swordfish") as client:
            assert get(client, "https://localhost/b") == b"y"
            assert get(client, "http://files.test/a?b=c") == b"x"
            assert proxy.asked == ["CONNECT localhost:443", "GET http://files.test/a?b=c"]
    assert (script.asked[0].target, script.asked[0].fields["host"]) == ("/a?b=c", "files.test")
    assert (inside.asked[0].target, inside.asked[0].fields["host"]) == ("/b", "localhost")
    assert inside.asked[0].fields["authorization"] == "Bearer swordfish"
    for asked in (*script.asked, *inside.asked):
        assert "proxy-authorization" not in asked.fields


def test_what_goes_wrong_at_a_proxy() -> None:
    with web_proxy({}, LOGIN) as proxy:
        with through(proxy) as client:
            assert "answers 403" in str(failure(client, "https://other.test/"))
        with through(proxy, "user:secret@") as client:
            error = failure(client, "https://other.test/")
            assert f"the proxy {proxy.address} answers 407" in str(error)
            assert "secret" not in f"{error} {vars(error)}"
            assert "HTTP_PROXY" in str(failure(client, "http://other.test/").hint)
    with through(proxy) as client:
        assert f"proxy {proxy.address} can't be reached" in str(failure(client, "http://a.test/"))


def test_public_redirects_to_nothing_private(server: Server) -> None:
    hosts = ("127.0.0.1:9", "127.1", "metadata", "metadata.google.internal", "169.254.169.254")
    with web_proxy({"files.test": server.port}) as proxy, through(proxy, "") as client:
        for host in hosts:
            server.play(redirect(f"http://{host}/"))
            assert "private network" in str(failure(client, "http://files.test/"))
        server.play(redirect("http://other.test/"))
        assert "answers 403" in str(failure(client, "http://files.test/"))
        asked = ["GET http://files.test/"] * (len(hosts) + 1)
        assert proxy.asked == [*asked, "GET http://other.test/"]


def test_a_token_is_not_sent_in_the_clear_to_a_public_name() -> None:
    with web_proxy({}) as proxy, through(proxy, "", as_user="swordfish") as client:
        with pytest.raises(UsageError, match="without TLS"):
            get(client, "http://files.test/")
        with pytest.raises(RemoteError, match="answers 403"):
            get(client, "http://registry/")
