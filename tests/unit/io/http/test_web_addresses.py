"""Web addresses, what a Location may be, and which IP addresses are public."""

from functools import partial

from support.corpus import refusal

from blobstore.errors import RemoteError, UsageError
from blobstore.io.http.web_addresses import WebAddress, is_link_local, is_public

HERE = WebAddress.parse("https://example.org/a/b?q=1")


def test_addresses() -> None:
    for text, target, origin in (
        ("HTTP://Example.ORG:80/x", "/x", ("http", "example.org", 80)),
        ("http://127.0.0.1:8080/a b?c=d#e", "/a%20b?c=d", ("http", "127.0.0.1", 8080)),
        ("https://[2001:db8::1]:1/", "/", ("https", "2001:db8::1", 1)),
        ("https://bücher.example/ä", "/%C3%A4", ("https", "xn--bcher-kva.example", 443)),
        ("https://h/a/../../b", "/b", ("https", "h", 443)),
    ):
        address = WebAddress.parse(text)
        assert (address.target, address.origin) == (target, origin)
        assert WebAddress.parse(address.text) == address


def test_what_is_not_an_address_is_refused() -> None:
    for text in (
        *("//h/x", "file:///etc/passwd", "http://h:65536/", "http://u:p@h/", "http://h\n/"),
        *("http://a..b/", "http://[fe80::1%25eth0]/", "http://" + "a" * 9000),
    ):
        error = refusal(partial(WebAddress.parse, text))
        assert (type(error), error.rule) == (UsageError, "R2"), text


def test_a_query_may_be_a_secret() -> None:
    assert str(HERE) == "https://example.org/a/b"
    assert HERE.text == "https://example.org/a/b?q=1"
    assert "hunter2" not in str(refusal(lambda: WebAddress.parse("http://user:hunter2@h/")))


def test_where_a_location_leads() -> None:
    for location, text in {
        "HTTPS://O.example/x?y": "https://o.example/x?y",
        "//o.example/x": "https://o.example/x",
        "?z": "https://example.org/a/b?z",
        "http://[::1]:8/": "http://[::1]:8/",
    }.items():
        assert HERE.join(location).text == text


def test_a_location_that_leads_nowhere_is_refused() -> None:
    nowhere = ("", "file:///etc", "https:x", "/x\ty", "http://u:p@h/", "http://h:99999/", "/ä")
    for location in (*nowhere, "/x\\y"):
        error = refusal(partial(HERE.join, location))
        assert (type(error), error.rule) == (RemoteError, "R2"), location


def test_public_addresses() -> None:
    addresses = (
        *("8.8.8.8", "172.32.0.1", "2606:4700:4700::1111"),
        *("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"),
    )
    assert [address for address in addresses if not is_public(address)] == []


def test_addresses_that_are_not_public() -> None:
    """Private and reserved networks of the IANA registries, and those inside IPv6 addresses."""
    addresses = (
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1"),  # noqa: S104
        *("172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.0.192"),
        *("168.63.129.16", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("192.0.2.1", "::", "::1", "::7f00:1", "fe80::1", "fe80::1%eth0", "fc00::1"),
        *("fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "3fff::1", "2001::1"),
        *("::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::1"),
    )
    assert [address for address in addresses if is_public(address)] == []


def test_link_local_addresses() -> None:
    found = {
        address: is_link_local(address)
        for address in (
            *("169.254.169.254", "fe80::1%eth0", "::ffff:169.254.0.1"),
            *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"),
            *("127.0.0.1", "10.0.0.1", "::1", "2001:db8::1"),
        )
    }
    assert [*found.values()] == [True] * 5 + [False] * 4, found
