"""Access tokens, as docker's token servers give them.

Sources: distribution/distribution@0d6b721d docs/content/spec/auth/token.md (GET), oauth.md (POST,
for identity tokens) and scope.md. Only the scope that is needed is asked for, whatever the
challenge said.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode

from blobstore.errors import AuthenticationError, UsageError, quoted
from blobstore.formats import strictjson
from blobstore.formats.strictdocument import Document, InvalidError
from blobstore.io.http.client import HttpClient
from blobstore.io.http.messages import Body, Message, Reply
from blobstore.io.http.web_addresses import RequestTarget
from blobstore.store.registry.login import Login, Secret
from blobstore.store.registry.realms import RULE

CLIENT_ID = "blobstore"
MAX_REPLY = 64 * 2**10
MAX_TOKEN = 16 * 2**10
_HEAD = 16 * 2**10
_DEFAULT_S = 60
"""Seconds that a token lasts at least, and if its server does not say how long."""
_LONGEST_S = 86_400
_MARGIN_S = 10
"""Seconds before its end from which a token is not used any more."""
_NAME = re.compile(r"[A-Za-z0-9]+(?:[._/-]+[A-Za-z0-9]+)*", re.ASCII)
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 200, 400, 401, 403, 404


@dataclass(frozen=True, slots=True)
class Scope:
    """What a token allows: ``("pull",)`` or ``("pull", "push")`` of one repository.

    ``mounted``: repositories that blobs are mounted from, which needs pull of each. ``kind``: see
    `CATALOG`.

    Raises: UsageError for a name that could smuggle another scope in.
    """

    repository: str
    actions: tuple[str, ...] = ("pull",)
    mounted: tuple[str, ...] = ()
    kind: str = "repository"

    def __post_init__(self) -> None:
        for name in (self.repository, *self.mounted):
            if _NAME.fullmatch(name) is None:
                raise UsageError(f"not a repository: {quoted(name)}")

    @property
    def texts(self) -> tuple[str, ...]:
        """The scopes as requests name them (scope.md)."""
        return (
            f"{self.kind}:{self.repository}:{','.join(self.actions)}",
            *(f"repository:{name}:pull" for name in self.mounted),
        )

    def __str__(self) -> str:
        return f"{' and '.join(self.actions)} of {self.repository}"


CATALOG = Scope("catalog", ("*",), kind="registry")
"""The right to list the repositories of a registry."""


@dataclass(frozen=True, slots=True)
class AccessToken:
    """An access token. ``since`` and ``until`` are by `time.monotonic`."""

    secret: Secret
    since: float
    until: float

    @property
    def field(self) -> str:
        """The Authorization field (RFC 6750 section 2.1)."""
        return f"Bearer {self.secret.reveal()}"

    def lasts(self) -> bool:
        """Return True if it can be used for some seconds more."""
        return time.monotonic() < self.until - _MARGIN_S


@dataclass(frozen=True, slots=True)
class TokenServer:
    """Where the tokens of a registry (``HOST:PORT``) come from.

    ``service`` is the registry's name there, None if its challenge did not give it.
    """

    registry: str
    realm: RequestTarget
    service: str | None

    def fetch(self, client: HttpClient, scope: Scope | None, login: Login | None) -> AccessToken:
        """Return a new token for ``scope``; None asks for no access, which checks the login.

        The server may grant less than that, which only the registry's next reply shows.

        Raises: AuthenticationError (rule R3) if the server refuses the login, or its reply is not a
        token; RemoteError if it can't be reached.
        """
        message, target = self._request(scope, login)
        asked = time.monotonic()
        accept = (_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND)
        limits = client.limits(_HEAD + MAX_REPLY)
        with client.request(message, target, limits, accept=accept) as (reply, at):
            if at.address.origin != target.address.origin:
                raise target.address.refuse(f"redirects a token request to {at.address}", RULE)
            if reply.status != _OK:
                reply.discard()
                raise self._refusal(reply.status, login)
            return _token_of(reply, asked)

    def _request(self, scope: Scope | None, login: Login | None) -> tuple[Message, RequestTarget]:
        scopes = () if scope is None else scope.texts
        common = [("client_id", CLIENT_ID)]
        common += [("service", self.service)] if self.service is not None else []
        if login is not None and login.user is None:
            form = [
                ("grant_type", "refresh_token"),
                *common,
                *([("scope", " ".join(scopes))] if scopes else []),
                ("refresh_token", login.secret.reveal()),
            ]
            body = Body.of(urlencode(form).encode(), has_credentials=True)
            fields = (("Content-Type", "application/x-www-form-urlencoded"),)
            return Message("POST", fields, body), self.realm
        address = self.realm.address
        query = urlencode([*common, *(("scope", one) for one in scopes)], safe=":/,*")
        joint = "&" if "?" in address.target else "?"
        asked = replace(address, target=f"{address.target}{joint}{query}")
        authorization = None if login is None else login.basic
        return Message("GET"), replace(self.realm, address=asked, authorization=authorization)

    def _refusal(self, status: int, login: Login | None) -> AuthenticationError:
        """Return the error of a token server that gives no token."""
        server = str(self.realm.address)
        if login is None:
            what = "gives no token without a login"
        elif status in (_UNAUTHORIZED, _FORBIDDEN) or (
            status == _BAD_REQUEST and login.user is None
        ):
            secret = "identity token" if login.user is None else "user name or the password"
            what = f"refuses the {secret}{f' from {login.place}' if login.place else ''}"
        else:
            what = f"has no token for {login}"
        return AuthenticationError(
            f"{server} {what} (it answers {status}; rule {RULE})",
            rule=RULE,
            path=server,
            status=status,
            hint=f"Log in: blobstore login {self.registry}",
        )


@dataclass(frozen=True, slots=True)
class _TokenReply(Document):
    token: str | None = None
    access_token: str | None = None
    expires_in: int | None = None
    issued_at: Any = None


def _token_of(reply: Reply, asked: float) -> AccessToken:
    raw = b"".join(reply.chunks())
    try:
        value = strictjson.parse(raw)
        strictjson.check_depth(value)
        document = _TokenReply.checked(value)
    except (strictjson.StrictJsonError, InvalidError):
        raise _invalid(
            reply, "a token reply that is not a JSON object of the expected keys"
        ) from None
    token = document.token or document.access_token
    if not token:
        raise _invalid(reply, "without a token")
    if len(token) > MAX_TOKEN:
        raise _invalid(reply, f"with a token of {len(token):,} characters, at most {MAX_TOKEN:,}")
    if _VISIBLE.fullmatch(token) is None:
        raise _invalid(reply, "with a token that contains an invalid character")
    lifetime = min(max(document.expires_in or _DEFAULT_S, _DEFAULT_S), _LONGEST_S)
    age = _age_of(document.issued_at, reply.field("date"))
    return AccessToken(Secret(token), asked, asked + lifetime - age)


def _age_of(issued_at: Any, date: str | None) -> float:
    """Return how many seconds ago a token was issued, by the server's own clock.

    The server's Date field is the other end of the span, so this machine's clock does not matter.
    0 if either of the two is missing or can't be read: a token that has expired is refused, and
    replaced then.
    """
    if not isinstance(issued_at, str) or date is None:
        return 0
    try:
        issued = datetime.fromisoformat(issued_at)
        now = parsedate_to_datetime(date)
        return max(0.0, (now.astimezone(UTC) - issued.astimezone(UTC)).total_seconds())
    except (ValueError, OverflowError):
        return 0


def _invalid(reply: Reply, what: str) -> AuthenticationError:
    return AuthenticationError(
        f"{reply.address} answers a token request {what} (rule {RULE})",
        rule=RULE,
        path=str(reply.address),
        status=reply.status,
    )
