"""Realms: the token servers that may be asked for a registry (rule R3).

A registry names its token server in a challenge, so a hostile one could make this machine send
credentials anywhere, or requests into its own network (CVE-2020-15157 of containerd,
CVE-2026-48978 of oras-go). A realm is used

- with credentials, on the registry's own host: any port with https, whose certificate is for the
  host; without it, the registry's own origin only;
- with credentials, on a host that the user named;
- with credentials and https, on a domain above or below the registry's: the owner of a domain
  decides about the names below it. A domain beside it may have another owner (under co.uk);
- with credentials and https, on a host that is listed here for this registry;
- without credentials, on any other host, with https, by name, at a public address.

Redirects of a token server that lead to another origin are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from blobstore.errors import AuthenticationError, UsageError
from blobstore.io.http.web_addresses import RequestTarget, WebAddress

RULE = "R3"
_LISTED = {
    ("registry-1.docker.io", "auth.docker.io"),
    ("docker.elastic.co", "docker-auth.elastic.co"),
    ("registry.digitalocean.com", "api.digitalocean.com"),
    ("nvcr.io", "authn.nvidia.com"),
}
"""Registries, and the hosts of their token servers that are neither above nor below them.

Sources: distribution/distribution@0d6b721d docs/content/spec/auth/token.md; the challenges of the
others as recorded in public code (elastic/eui, digitalocean/doctl), oras-project/oras-dotnet#401.
"""
_IP_LITERAL = re.compile(r".*:.*|(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?", re.ASCII | re.IGNORECASE)
"""Texts that `getaddrinfo` reads as an IP address, 127.1 and 0x7f000001 too."""


def realm_target(
    text: str,
    registry: WebAddress,
    named: Collection[str],
    *,
    has_login: bool,
    from_public: bool,
) -> RequestTarget:
    """Return where tokens for ``registry`` are requested, without credentials.

    ``text`` is the realm of its challenge, ``named`` the hosts that the user named (``HOST`` or
    ``HOST:PORT``), ``from_public`` whether the registry's IP address is public.

    Raises: AuthenticationError (rule R3).
    """
    try:
        realm = WebAddress.parse(text)
    except UsageError:
        raise refused(registry, "names its token server by what is not a web address") from None
    if realm.scheme == "http" and registry.scheme == "https":
        raise refused(registry, f"names a token server without TLS: {realm}")
    if _is_own(realm, registry) or realm.authority in named:
        return RequestTarget(realm)
    if realm.scheme == "http" or _IP_LITERAL.fullmatch(realm.host):
        raise refused(
            registry, f"names the token server {realm} on another host", _hint(realm, registry)
        )
    is_known = _is_related(realm.host, registry.host) or (registry.host, realm.host) in _LISTED
    if has_login and not is_known:
        raise refused(
            registry,
            f"asks to send credentials to {realm.authority}, which is not known to belong to it",
            _hint(realm, registry),
        )
    return RequestTarget(realm, public_only=from_public or not is_known, from_server=True)


def refused(registry: WebAddress, what: str, hint: str | None = None) -> AuthenticationError:
    """Return the error of a registry whose challenge is not answered: ``what`` it does."""
    return AuthenticationError(
        f"{registry.authority} {what} (rule {RULE})", rule=RULE, path=str(registry), hint=hint
    )


def _hint(realm: WebAddress, registry: WebAddress) -> str:
    return f'If it is the token server of {registry.authority}, add realms="{realm.authority}".'


def _is_own(realm: WebAddress, registry: WebAddress) -> bool:
    return realm.origin == registry.origin or (
        realm.scheme == "https" and realm.host == registry.host
    )


def _is_related(one: str, other: str) -> bool:
    """Return True if one host name is a domain of at least two labels above the other."""
    above, below = sorted((one.rstrip("."), other.rstrip(".")), key=len)
    return "." in above and below.endswith(f".{above}")
