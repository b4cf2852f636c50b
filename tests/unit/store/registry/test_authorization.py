"""Authorization at a registry: tokens, realms, challenges."""

import io
import logging
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from support.clock import Clock
from support.corpus import refusal
from support.servers import redirect, server
from support.token_server import (
    IDENTITY,
    PASSWORD,
    SERVICE,
    USER,
    GuardedApi,
    TokenServer,
    basic,
    guarded_api,
    token_server,
)

from blobstore.errors import AuthenticationError, RemoteError, UsageError
from blobstore.io.budget import RetryPolicy
from blobstore.io.http.client import HttpClient, Request
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.store.registry import authorization as authorization_module
from blobstore.store.registry.authorization import (
    CATALOG,
    MAX_TOKEN,
    Authorization,
    ChallengeError,
    Scope,
    parse_challenges,
    realm_target,
)
from blobstore.store.registry.logins import Login, Secret

POLICY = RetryPolicy(connect_s=60, silence_s=60, deadline_s=240, backoff_s=0.001)
LOGIN = Login(USER, Secret(PASSWORD), "FILE")
TOKEN = Login(None, Secret(IDENTITY), "FILE")
WRONG = Login(USER, Secret(f"wrong-{PASSWORD}"), "FILE")
PULL = Scope("a/b")
PUSH = Scope("a/b", ("pull", "push"))


@pytest.fixture(scope="module")
def client() -> Iterator[HttpClient]:
    """A client for loopback, where nothing is public."""
    with HttpClient(retry_policy=POLICY) as made:
        yield made


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of tokens, which stands still: a busy machine makes none old."""
    made = Clock()
    monkeypatch.setattr(authorization_module, "time", SimpleNamespace(monotonic=made))
    return made


@dataclass(frozen=True)
class Rig:
    client: HttpClient
    tokens: TokenServer
    api: GuardedApi

    def authorization(self, login: Login | None, *realms: str) -> Authorization:
        """Return the authorization at the registry; the user named its token server."""
        registry = WebAddress.parse(f"http://{self.api.host}")
        return Authorization(self.client, registry, login, realms=(self.tokens.host, *realms))

    def ask(self, asked: Authorization, scope: Scope, tries: int = 2) -> str | None:
        """Ask for the last right of a scope as the registry's client does; return what was sent."""
        path = f"{scope.kind}:{scope.repository}:{scope.actions[-1]}"
        address = WebAddress.parse(f"http://{self.api.host}/v2/{path}")
        for _ in range(tries):
            sent = asked.field(scope)
            target = RequestTarget(address, sent)
            limits = self.client.limits(2**16)
            with self.client.request(Request("GET", (200, 401)), target, limits) as (reply, _):
                if reply.status == 200:
                    return sent
                asked.answer_challenge(reply, scope)
        raise AssertionError("refused for ever")

    def denial(self, login: Login | None, scope: Scope = PULL) -> AuthenticationError:
        with pytest.raises(AuthenticationError) as caught:
            self.ask(self.authorization(login), scope)
        return caught.value


@pytest.fixture
def rig(client: HttpClient) -> Iterator[Rig]:
    with token_server() as tokens, guarded_api(tokens.allows, tokens.challenge) as api:
        yield Rig(client, tokens, api)


def test_a_token_is_fetched_once_for_a_scope(rig: Rig) -> None:
    asked = rig.authorization(LOGIN)
    assert asked.field(PULL) is None
    first = rig.ask(asked, PULL)
    assert rig.ask(asked, PULL) == first
    assert rig.ask(asked, PUSH) != first
    assert rig.ask(asked, CATALOG)
    rig.ask(asked, Scope("a/b", ("pull", "push"), mounted=("c/d",)))
    assert [one.scopes for one in rig.tokens.asked] == [
        ["repository:a/b:pull"],
        ["repository:a/b:pull,push"],
        ["registry:catalog:*"],
        ["repository:a/b:pull,push", "repository:c/d:pull"],
    ]
    assert {one.authorization for one in rig.tokens.asked} == {basic(USER, PASSWORD)}
    fields = {"client_id": ["blobstore"], "service": [SERVICE], "scope": ["repository:a/b:pull"]}
    assert rig.tokens.asked[0].fields == fields
    # One 401 in all: later tokens are fetched before they are asked for.
    assert [one.authorization is None for one in rig.api.asked] == [True, *[False] * 5]


def test_without_a_login(rig: Rig) -> None:
    assert rig.ask(rig.authorization(None), PULL)
    login = f"blobstore login {rig.api.host}"
    denied = rig.denial(None, PUSH)
    assert (rig.api.host in denied.message, login in str(denied.hint)) == (True, True)
    rig.tokens.public = False
    assert login in str(rig.denial(None, Scope("c/d")).hint)
    assert {one.authorization for one in rig.tokens.asked} == {None}


def test_an_identity_token(rig: Rig) -> None:
    assert rig.ask(rig.authorization(TOKEN), PUSH)
    (one,) = rig.tokens.asked
    assert (one.method, one.path, one.authorization) == ("POST", "/token", None)
    assert one.fields == {
        "grant_type": ["refresh_token"],
        "service": [SERVICE],
        "client_id": ["blobstore"],
        "scope": ["repository:a/b:pull,push"],
        "refresh_token": [IDENTITY],
    }


@pytest.mark.parametrize("login", [WRONG, Login(None, Secret("wrong-1"))])
def test_a_wrong_login_is_sent_once(rig: Rig, login: Login) -> None:
    rig.api.challenges.insert(0, 'Basic realm="x"')  # Bearer is taken before it
    error = rig.denial(login)
    assert rig.tokens.realm in error.message
    assert error.hint == f"Log in: blobstore login {rig.api.host}"
    assert len(rig.tokens.asked) == len(rig.api.asked) == 1


def test_basic(rig: Rig) -> None:
    right = basic(USER, PASSWORD)
    rig.api.challenges = ['Basic realm="x"']
    rig.api.allows = lambda field, _: field == right
    asked = rig.authorization(LOGIN)
    assert asked.field(PULL) is None
    assert rig.ask(asked, PULL) == right
    assert asked.field(PUSH) == right
    rig.denial(None)
    assert "identity token" in rig.denial(TOKEN).message
    before = len(rig.api.asked)
    assert f"'{USER}' (from FILE)" in rig.denial(WRONG).message
    assert len(rig.api.asked) == before + 2


@pytest.mark.parametrize(
    "challenge",
    [
        'Bearer service="x"',
        "Negotiate",
        'Bearer realm="https://evil.example/token"',
        'Bearer realm="REALM",scope="repository:a/b:pull repository:*:pull"',
    ],
)
def test_challenges_that_are_refused(rig: Rig, challenge: str) -> None:
    rig.api.challenges = [challenge.replace("REALM", rig.tokens.realm)]
    assert rig.denial(LOGIN).rule == "R3"
    assert len(rig.api.asked) == 1
    assert rig.tokens.asked == []


def test_a_scope_does_not_contain_another() -> None:
    for name in ("a b", "a:push", "", "*", "a/b repository:c:push", "ä"):
        assert isinstance(refusal(partial(Scope, name)), UsageError)
        assert isinstance(refusal(partial(Scope, "a", mounted=(name,))), UsageError)


@pytest.mark.parametrize(
    "reply",
    [
        {"token": None, "access_token": ""},
        {"token": "a\r\nX-Evil: 1"},
        {"token": "x" * (MAX_TOKEN + 1)},
        {"token": "t", "expires_in": "300"},
        b'{"token":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_replies_that_are_not_tokens(rig: Rig, reply: Any) -> None:
    rig.tokens.change = lambda _: reply
    rig.denial(LOGIN)
    assert len(rig.tokens.asked) == 1


@pytest.mark.parametrize(("expires_in", "expires"), [(None, True), (-1, True), (10**40, False)])
def test_a_token_in_time(rig: Rig, clock: Clock, expires_in: int | None, expires: bool) -> None:
    """As docker: after 60 s if it does not say when, and never before."""
    rig.tokens.expires_in = expires_in
    rig.tokens.change = lambda one: {**one, "access_token": one["token"], "token": ""}
    asked = rig.authorization(LOGIN)
    first = rig.ask(asked, PULL)
    clock.now = 30
    assert asked.field(PULL) == first
    clock.now = 1000
    assert (asked.field(PULL) != first) is expires


def test_a_token_that_expired_early_is_replaced_once(rig: Rig, clock: Clock) -> None:
    asked = rig.authorization(LOGIN)
    first = rig.ask(asked, PULL)
    clock.now = 30
    rig.tokens.granted.clear()  # the registry does not take it any more
    assert rig.ask(asked, PULL) != first
    rig.api.allows = lambda *_: False
    count = len(rig.tokens.asked)
    with pytest.raises(AuthenticationError):
        rig.ask(asked, PULL)
    assert len(rig.tokens.asked) == count


@pytest.mark.parametrize(("login", "status"), [(LOGIN, 302), (TOKEN, 307)])
def test_a_token_request_does_not_leave_its_server(rig: Rig, login: Login, status: int) -> None:
    with server() as elsewhere:
        elsewhere.play(lambda _: redirect(rig.tokens.realm, status))
        rig.api.challenges = [f'Bearer realm="{elsewhere.at("t")}"']
        asked = rig.authorization(login, f"127.0.0.1:{elsewhere.port}")
        assert isinstance(refusal(lambda: rig.ask(asked, PULL)), RemoteError)
    sent = rig.tokens.asked
    assert not [one for one in sent if one.authorization or "refresh_token" in one.fields]


def test_a_login_is_not_sent_in_the_clear_over_the_internet(rig: Rig) -> None:
    rig.api.challenges.append('Basic realm="x"')
    with HttpClient(retry_policy=POLICY, is_public=lambda _: True) as client:
        away = replace(rig, client=client)
        for login in (LOGIN, TOKEN):
            error = refusal(partial(away.ask, away.authorization(login), PULL))
            assert isinstance(error, UsageError)
            assert "TLS" in error.message
    assert rig.tokens.asked == []


@pytest.fixture
def all_logs(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """All that any library logs."""
    text = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(text)])
    monkeypatch.setattr(logging.root, "level", logging.DEBUG)
    logging.getLogger("http.client").debug("the fixture works")
    return text


def test_nothing_secret_is_shown(rig: Rig, all_logs: io.StringIO) -> None:
    """Neither in logs of any library, nor in errors, their tracebacks and their causes."""
    shown: list[str] = []
    rig.tokens.rights = ("pull",)
    for login in (LOGIN, TOKEN, WRONG, Login(None, Secret(f"wrong-{IDENTITY}"))):
        asked = rig.authorization(login)
        rig.api.challenges = [rig.tokens.challenge]
        try:
            rig.ask(asked, PULL)
            rig.api.challenges = ["Basic"]
            rig.ask(asked, Scope("not/allowed", ("delete",)))
        except AuthenticationError as error:
            walked = traceback.walk_tb(error.__traceback__)
            frames = traceback.StackSummary.extract(walked, capture_locals=True)
            shown += [str(one.locals) for one in frames if "/blobstore/" in one.filename]
            shown += [repr(error), repr(vars(error)), *traceback.format_exception(error)]
        shown += [repr(asked), repr(login)]
    seen = "\n".join([*shown, all_logs.getvalue()])
    assert "the fixture works" in seen
    assert seen.count("AuthenticationError: ") >= 4
    for secret in (PASSWORD, IDENTITY, basic(USER, PASSWORD)[6:]):
        assert secret not in seen


# Realms (rule R3): which token servers may be asked, and which ones get credentials


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


# Challenges (RFC 9110 section 11.6.1): what is read; garbage only raises our error


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (
            'Basic realm="x", Bearer realm="https://a.io/token",scope="repository:a/b:pull,push"',
            [
                ("basic", {"realm": "x"}),
                ("bearer", {"realm": "https://a.io/token", "scope": "repository:a/b:pull,push"}),
            ],
        ),
        (
            'Newauth realm="apps", type=1, title="Login to \\"apps\\""',
            [("newauth", {"realm": "apps", "type": "1", "title": 'Login to "apps"'})],
        ),
        ("Negotiate oYIBSjCC==, Basic", [("negotiate", {}), ("basic", {})]),
        ('bEaReR ReAlM = "a,b" , Scope=c', [("bearer", {"realm": "a,b", "scope": "c"})]),
        (", ,\tBasic realm=x ,, ", [("basic", {"realm": "x"})]),
    ],
)
def test_what_is_read(field: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges([field]) == expected


@pytest.mark.parametrize(
    "text",
    [
        'Bearer realm="x',  # corpus: registry-auth-realm-unquoted-garbage
        'Bearer realm="x" service="y"',
        'Bearer realm="x",REALM="y"',
        "Bearer Basic realm=x",
        "Bearer ;",
        "a " * 50_000,
        'a b="' + "\\" * 100_000,
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ChallengeError):
        parse_challenges([text])


@settings(max_examples=15)
@given(st.text(alphabet='aB1 \t,="\\;:/?é\x00~', max_size=40))
@example("," * 100_000)
@example("a b=c," * 15_000)
def test_garbage_is_read_or_refused(text: str) -> None:
    with suppress(ChallengeError):
        assert all(scheme for scheme, _ in parse_challenges([text]))
