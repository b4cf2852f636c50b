"""Where requests go: web addresses, redirects, and which IP addresses are public.

Rule R2 is about all three; `blobstore.io.http.connections` enforces it for IP addresses:

- an address is http or https, without a user name or password
- at most 5 redirects are followed, none from https to http
- after a redirect from a public server only public IP addresses are connected to, so that no server
  makes this machine send requests into its own network; the user may name private addresses
- a redirect to another origin never leads to a link-local IP address (169.254.169.254)
- an Authorization field is dropped for good when a redirect leads to another origin

A proxy resolves names itself. So behind one, only addresses that are written as numbers are judged
as such; a name is public, unless it can't be on the internet (`is_public_name`).

A web address is http or https, a host, perhaps a port, a path and a query. It has no user name or
password in it (they would end up in logs and error messages), and only printable ASCII, as RFC 3986
has it; what a person types is normalized first (spaces and other characters of a path are
percent-encoded, international host names become IDNA's).
"""

from __future__ import annotations

import ipaddress
import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import quote, unquote, urlencode, urljoin

from blobstore.errors import RemoteError, UsageError, quoted

MAX_REDIRECTS = 5

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_MAX_TEXT = 8192
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?|[0-9a-f]*:[0-9a-f:.]*", re.ASCII)
_ADDRESS = re.compile(
    r"(https?)://([^/?#]+)([^?#]*)(\?[^#]*)?(?:#.*)?", re.ASCII | re.IGNORECASE | re.DOTALL
)
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::([0-9]{0,5}))?", re.ASCII | re.IGNORECASE)
_IN_PATH = "%!$&'()*+,/:;=@[\\]^|"
# What is not percent-encoded, apart from letters, digits and ``_.-~``.
_IN_QUERY = _IN_PATH + "?`{}"
# A Location, by RFC 3986 section 4.1. "ht!tp://x" is refused: a scheme has no "!", and a relative
# path has no colon in its first segment (section 4.2). The class has the printable characters that
# an address may contain.
_CHARACTER = r"[!#-;=?-\[\]_a-z~]"
_REFERENCE = re.compile(
    rf"(?:https?:)?//[!$-.0-;=@A-Z\[\]_a-z~]+(?:[/?#]{_CHARACTER}*)?"  # with an authority
    rf"|/(?!/){_CHARACTER}*|[?#]{_CHARACTER}*"  # a path, a query
    rf"|[!$-.0-9;=@A-Z_a-z~]+(?:[/?#]{_CHARACTER}*)?",  # a name
    re.ASCII | re.IGNORECASE,
)

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Python 3.11 calls these global, but no public server has them: protocol assignments, with Oracle's
# 192.0.0.192 among them (IANA, special-purpose registry), documentation (RFC 9637), and the address
# at which Azure serves its machines.
_NOT_PUBLIC = (
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv6Network("3fff::/20"),
)


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A URL that a request can go to. ``target`` is path and query; ``port`` is always there."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that ``text`` gives; a fragment is dropped.

        Raises: UsageError (rule R2) for anything else than http and https, for a user name or
        password, a host or port that can't be.
        """
        if len(text) > _MAX_TEXT:
            raise _invalid_address("it is too long", text)
        match = _ADDRESS.fullmatch(text)
        if match is None or not text.isprintable():
            raise _invalid_address("it is neither http nor https", text)
        scheme, authority, path, query = match.groups("")
        if "@" in authority:
            raise UsageError(
                "not a web address: a user name or password in it would show in messages and logs",
                rule="R2",
            )
        place = _AUTHORITY.fullmatch(authority)
        host = "" if place is None else _in_ascii(place[1].strip("[]"))
        if place is None or _HOST.fullmatch(host) is None:
            raise _invalid_address("its host is neither a name nor an IP address", text)
        port = int(place[2] or _DEFAULT_PORTS[scheme.lower()])
        if not 0 < port <= _MAX_PORT:
            raise _invalid_address(f"{port} is not a port", text)
        target = _without_dots(quote(path or "/", _IN_PATH)) + quote(query, _IN_QUERY)
        return cls(scheme.lower(), host, port, target)

    def join(self, reference: str) -> WebAddress:
        """Return the address that a server's ``Location`` names, from here (RFC 3986 section 5).

        Raises: RemoteError (rule R2) when it is not a reference, or does not lead to a web address.
        """
        refusal = self.refuse(
            f"redirects to {quoted(reference.partition('?')[0])}, which is not a web address"
        )
        if _REFERENCE.fullmatch(reference) is None:
            raise refusal
        try:
            return WebAddress.parse(urljoin(self.text, reference))
        except (UsageError, ValueError):
            raise refusal from None

    def with_query(self, **fields: str) -> WebAddress:
        start = "&" if "?" in self.target else "?"
        return replace(self, target=f"{self.target}{start}{urlencode(fields)}")

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: what credentials are for (RFC 6454)."""
        return (self.scheme, self.host, self.port)

    @property
    def place(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def authority(self) -> str:
        """The place, without its port if that is the scheme's."""
        is_default = self.port == _DEFAULT_PORTS[self.scheme]
        return self.place.removesuffix(f":{self.port}") if is_default else self.place

    @property
    def text(self) -> str:
        """The whole address, with its query, which may be a secret: signed addresses have one."""
        return f"{self.scheme}://{self.authority}{self.target}"

    def __str__(self) -> str:
        return self.text.partition("?")[0]

    def refuse(self, what: str, rule: str = "R2") -> RemoteError:
        return RemoteError(f"{self} {what} (rule {rule})", rule=rule, path=str(self))


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, which speaks http. ``fields``: its login, which is never shown."""

    address: WebAddress
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, address: WebAddress, proxies: Mapping[str, str]) -> Self | None:
        """Return the proxy for an address; None if it is reached directly.

        ``proxies``: by scheme, ``all`` for both schemes; and ``no``, the hosts that are reached
        directly: names with all below them, addresses, networks (10.0.0.0/8), or ``*``. That is
        what `urllib.request.getproxies_environment` returns.

        Raises: UsageError for a proxy that is not http.
        """
        text = proxies.get(address.scheme) or proxies.get("all")
        if not text or _is_direct(address, proxies):
            return None
        scheme, _, place = text.rpartition("://")
        login, _, place = place.rpartition("@")
        try:
            there = WebAddress.parse(f"{scheme or 'http'}://{place}")
        except UsageError:
            there = None
        if there is None or there.scheme != "http":
            raise UsageError(
                f"not the address of an http proxy: {quoted(f'{scheme}://{place}')}",
                hint="HTTPS_PROXY and HTTP_PROXY are http://[USER:PASSWORD@]HOST:PORT.",
            )
        if not login:
            return cls(there)
        basic = b64encode(unquote(login if ":" in login else f"{login}:").encode()).decode()
        return cls(there, {"Proxy-Authorization": f"Basic {basic}"})


def _is_direct(address: WebAddress, proxies: Mapping[str, str]) -> bool:
    for entry in proxies.get("no", "").lower().split(","):
        name = entry.strip().lstrip(".")
        is_named = name in ("*", address.host, f"{address.host}:{address.port}")
        if is_named or (name and address.host.endswith(f".{name}")):
            return True
        with suppress(ValueError):  # one of the two is a name
            network = ipaddress.ip_network(name.strip("[]"), strict=False)
            if ipaddress.ip_address(address.host) in network:
                return True
    return False


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The address of a request, its authorization, and which IP addresses are allowed.

    ``authorization`` is the whole field, or None. It is never shown. ``public_only``: only public
    addresses are allowed. ``from_server``: a server named the address; link-local ones are refused.
    """

    address: WebAddress
    authorization: str | None = field(default=None, repr=False)
    public_only: bool = False
    from_server: bool = False

    def check(self, *, public: bool, link_local: bool) -> None:
        if self.public_only and not public:
            raise self.address.refuse(
                "is in a private network, and a public server redirected to it"
            )
        if self.from_server and link_local:
            raise self.address.refuse("has a link-local address, and a server redirected to it")


def redirect_target(
    target: RequestTarget, location: str | None, *, from_public: bool
) -> RequestTarget:
    """Return where a redirect of the server at ``target`` leads.

    ``from_public``: the server's own address is public.

    Raises: RemoteError (rule R2) without a usable Location, or when it leads from https to http.
    """
    here = target.address
    if location is None:
        raise here.refuse("redirects without a Location")
    there = here.join(location)
    if here.scheme == "https" and there.scheme == "http":
        raise here.refuse(f"redirects from https to http: {there}")
    is_same = there.origin == here.origin
    return RequestTarget(
        there,
        target.authorization if is_same else None,
        public_only=target.public_only or from_public,
        from_server=target.from_server or not is_same,
    )


def is_public(address: str) -> bool:
    """Return whether an IP address, as text, belongs to the public internet.

    Private, loopback, link-local, shared, reserved and multicast addresses do not, nor do the
    addresses at which clouds serve credentials. An IPv6 address that stands for an IPv4 address
    (mapped, 6to4, NAT64's well-known prefix) is judged as that one.
    """
    ip = _ip(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _GLOBAL_UNICAST:
        return False
    return (
        ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)
    )


def is_public_name(host: str) -> bool:
    """Return whether a name may be of the public internet, without resolving it.

    Names of one label are not, nor those under ``localhost``, ``local``, ``internal`` and
    ``home.arpa`` (RFC 6761, 6762, 8375; ICANN's resolution of 2024-07-29).
    """
    name = host.rstrip(".")
    return "." in name and not name.endswith((".localhost", ".local", ".internal", ".home.arpa"))


def is_link_local(address: str) -> bool:
    """Return whether an IP address, as text, is link-local: 169.254.0.0/16 or fe80::/10.

    Clouds serve a machine's credentials there. IPv6 addresses of IPv4 ones: as `is_public`.
    """
    return _ip(address).is_link_local


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    translated = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else None
    return ip.ipv4_mapped or ip.sixtofour or translated or ip


def _in_ascii(host: str) -> str:
    """Return a host as it is resolved, in lower case; "" for an invalid one."""
    try:
        return host.encode("idna").decode("ascii").lower()
    except UnicodeError:
        return ""


def _without_dots(path: str) -> str:
    """Return a path without ``.`` and ``..`` segments (RFC 3986 section 5.2.4)."""
    return path if path.startswith("//") else urljoin("http://h", path).removeprefix("http://h")


def _invalid_address(why: str, text: str) -> UsageError:
    return UsageError(f"not a web address: {quoted(text)}: {why} (rule R2)", rule="R2")
