"""Realms (rule R3): which token servers may be asked, and which ones get credentials."""

from functools import partial

import pytest
from support.corpus import refusal

from blobstore.errors import AuthenticationError
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.store.registry.authorization import realm_target

NAMED = ("auth.example.org", "127.0.0.1:5001", "10.0.0.9:8443")
"""Token servers that the user named."""


def target(
    realm: str, registry: str, *, has_login: bool = True, from_public: bool = True
) -> RequestTarget:
    address = WebAddress.parse(f"{registry}/v2/")
    return realm_target(realm, address, NAMED, has_login=has_login, from_public=from_public)


@pytest.mark.parametrize(
    ("realm", "registry", "public_only"),
    [
        # the registry's own host
        ("https://registry.corp:5001/auth", "https://registry.corp:5000", False),
        ("http://127.0.0.1:5000/token", "http://127.0.0.1:5000", False),
        # named by the user
        ("http://127.0.0.1:5001/token", "http://127.0.0.1:5000", False),
        ("https://10.0.0.9:8443/token", "https://registry.example.com", False),
        # a domain above or below
        ("https://gitlab.com/jwt/auth", "https://registry.gitlab.com", True),
        ("https://auth.registry.example.com/t", "https://registry.example.com", True),
        # listed
        ("https://auth.docker.io/token", "https://registry-1.docker.io", True),
    ],
)
def test_realms_that_get_credentials(realm: str, registry: str, public_only: bool) -> None:
    found = target(realm, registry)
    assert (found.address, found.authorization) == (WebAddress.parse(realm), None)
    assert found.public_only is public_only


@pytest.mark.parametrize(
    ("realm", "registry"),
    [
        ("https://ghcr.io.evil.example/token", "https://ghcr.io"),
        ("https://evilghcr.io/token", "https://ghcr.io"),
        ("https://attacker.co.uk/token", "https://registry.co.uk"),
        ("https://auth.docker.io/token", "https://registry.example.com"),
        ("https://com/token", "https://example.com"),
        ("https://auth.example.org:444/token", "https://registry.example.com"),
    ],
)
def test_other_hosts_get_no_credentials_and_are_public(realm: str, registry: str) -> None:
    error = refusal(lambda: target(realm, registry))
    assert isinstance(error, AuthenticationError)
    assert (error.rule, error.path) == ("R3", f"{registry}/v2/")
    assert f'realms="{WebAddress.parse(realm).authority}"' in str(error.hint)
    found = target(realm, registry, has_login=False, from_public=False)
    assert found == RequestTarget(WebAddress.parse(realm), None, public_only=True, from_server=True)


@pytest.mark.parametrize(
    ("realm", "registry"),
    [
        ("/token", "https://registry.example.com"),
        ("https://user:pass@registry.example.com/token", "https://registry.example.com"),
        ("https://registry.example.com:99999/token", "https://registry.example.com"),
        ("http://auth.example.org/token", "https://registry.example.com"),
        ("http://127.0.0.1:11434/token", "http://127.0.0.1:5000"),
        ("http://localhost:5000/token", "http://127.0.0.1:5000"),
        ("https://0xa9fea9fe/", "https://registry.example.com"),
        ("https://127.0.0.1./token", "https://registry.example.com"),
        ("https://93.184.216.34/token", "https://registry.example.com"),
        ("https://[fd00::1]/token", "https://registry.example.com"),
        ("https://x.0.0.1/token", "https://10.0.0.1"),
    ],
)
def test_realms_that_are_never_asked(realm: str, registry: str) -> None:
    for has_login in (True, False):
        error = refusal(partial(target, realm, registry, has_login=has_login))
        assert isinstance(error, AuthenticationError)
        assert error.rule == "R3"
        assert "pass" not in error.message


def test_a_registry_in_a_private_network_may_have_its_token_server_there() -> None:
    realm, registry = "https://gitlab.corp.lan/jwt", "https://registry.gitlab.corp.lan"
    assert not target(realm, registry, from_public=False).public_only
    assert target(realm, registry, from_public=True).public_only
