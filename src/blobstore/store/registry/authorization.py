"""Authorization: which Authorization field requests to a registry carry.

No field is sent until the registry answers 401. The challenge in that reply asks for Basic, which
is the login itself, or for Bearer, a token from its token server (`realms` has the rule for these).
Bearer is taken if both are offered. Tokens are kept in memory, per scope, and replaced before they
expire.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from threading import Lock

from blobstore.errors import AuthenticationError
from blobstore.io.http.client import HttpClient
from blobstore.io.http.messages import Message, Reply
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.store.registry.challenges import Challenge, ChallengeError, parse_challenges
from blobstore.store.registry.login import AnyLogin, Login
from blobstore.store.registry.realms import realm_target, refused
from blobstore.store.registry.tokens import AccessToken, Scope, TokenServer

_YOUNG_S = 10
"""A token that is refused within so many seconds has not expired: it does not allow the request."""
_OK, _UNAUTHORIZED = 200, 401
_ROUNDS = 3
_MOST_BYTES = 128 * 2**10


class Authorization:
    """The authorization at one registry. Safe to share between threads.

    ``registry`` is an address of the registry; ``realms`` are hosts of token servers that the user
    named (``HOST`` or ``HOST:PORT``), beside those that `realms` allows.
    """

    def __init__(
        self,
        client: HttpClient,
        registry: WebAddress,
        login: AnyLogin,
        *,
        realms: Collection[str] = (),
    ) -> None:
        self._client = client
        self._registry = registry
        self._given = login
        self._finding = Lock()
        self._realms = realms
        self._lock = Lock()
        self._wants: TokenServer | str | None = None
        self._tokens: dict[Scope | None, AccessToken] = {}
        self._fetches: dict[Scope | None, Future[AccessToken]] = {}

    @property
    def _login(self) -> Login | None:
        """The login, found by the first challenge: a helper may ask the user for a password."""
        with self._finding:
            if not (self._given is None or isinstance(self._given, Login)):
                self._given = self._given()
            return self._given

    def field(self, scope: Scope | None) -> str | None:
        """Return the field for a request that needs ``scope``; None until a 401 asked for one.

        A ``scope`` of None gives no right: it only shows that a login is valid.

        A token that is missing or has expired is fetched.

        Raises: as `TokenServer.fetch`.
        """
        with self._lock:
            wants = self._wants
        if isinstance(wants, TokenServer):
            return self._token(wants, scope).field
        return wants

    def challenged(self, reply: Reply, scope: Scope | None) -> None:
        """Take a 401 that answers a request for ``scope``, so that `field` has a better answer.

        The caller repeats the request, with that. No request is made here: the caller still has
        its connection, and all of a client's connections may be in the same state.

        Raises: AuthenticationError (rule R3) if the registry refuses what it asked for, needs a
        login, or its challenge is invalid; as the login's function.
        """
        if reply.address.origin != self._registry.origin:
            raise refused(
                self._registry,
                f"redirects to {reply.address}, which asks for credentials: they are not for it",
            )
        if reply.authorization is not None and self._was_refused(scope, reply.authorization):
            raise self._denied(scope, reply)
        wants = self._wanted(reply)
        with self._lock:
            self._wants = wants

    def _was_refused(self, scope: Scope | None, sent: str) -> bool:
        """Return True if no other field can be sent; an expired token is dropped."""
        with self._lock:
            token = self._tokens.get(scope)
            if token is None:
                return sent == self._wants
            if token.field != sent:
                return False  # another thread has replaced it
            if time.monotonic() - token.since < _YOUNG_S:
                return True
            del self._tokens[scope]
            return False

    def _wanted(self, reply: Reply) -> TokenServer | str:
        """Return the token server, or the field of Basic, that a 401 asks for."""
        try:
            challenges = parse_challenges(reply.values("www-authenticate"))
        except ChallengeError as error:
            raise refused(
                self._registry, f"asks for credentials in a malformed way: {error}"
            ) from None
        by_scheme = {challenge.scheme: challenge for challenge in reversed(challenges)}
        if (bearer := by_scheme.get("bearer")) is not None:
            return self._token_server(bearer, reply)
        if "basic" not in by_scheme:
            offered = ", ".join(sorted(by_scheme)) or "none"
            raise refused(
                self._registry,
                f"answers 401 and offers the schemes {offered[:80]}; Basic and Bearer are known",
            )
        login = self._login
        if login is None:
            raise self._denied(None, reply)
        if login.basic is None:
            raise refused(self._registry, f"asks for a user name and a password, not for {login}")
        return login.basic

    def _token_server(self, bearer: Challenge, reply: Reply) -> TokenServer:
        realm = bearer.parameters.get("realm")
        if realm is None:
            raise refused(self._registry, "asks for a token, and names no token server")
        # Every registry names its repository; a name with a * would be a token for all.
        for scope in bearer.parameters.get("scope", "").split():
            kind, _, rest = scope.partition(":")
            if kind == "repository" and "*" in rest.rpartition(":")[0]:
                raise refused(
                    self._registry, f"asks for a token for all repositories: {scope[:80]}"
                )
        target = realm_target(
            realm,
            self._registry,
            self._realms,
            has_login=self._login is not None,
            from_public=reply.from_public,
        )
        return TokenServer(self._registry.authority, target, bearer.parameters.get("service"))

    def _token(self, server: TokenServer, scope: Scope | None) -> AccessToken:
        """Return the token for ``scope``; one thread fetches it, and others wait for that."""
        with self._lock:
            token = self._tokens.get(scope)
            if token is not None and token.lasts():
                return token
            fetch = self._fetches.get(scope)
            if fetch is None:
                self._fetches[scope] = ours = Future[AccessToken]()
        if fetch is not None:
            return fetch.result()
        try:
            token = server.fetch(self._client, scope, self._login)
        except BaseException as error:
            self._end(scope)
            ours.set_exception(error)
            raise
        self._end(scope, token)
        ours.set_result(token)
        return token

    def _end(self, scope: Scope | None, token: AccessToken | None = None) -> None:
        with self._lock:
            del self._fetches[scope]
            self._tokens = {one: known for one, known in self._tokens.items() if known.lasts()}
            if token is not None:
                self._tokens[scope] = token

    def _denied(self, scope: Scope | None, reply: Reply) -> AuthenticationError:
        host = self._registry.authority
        access, login = scope or "access", self._login
        if login is None:
            what = f"{host} denies {access} without a login"
            hint = f"Check that it exists, and log in: blobstore login {host}"
        elif scope is None:
            what, hint = f"{host} refuses {login}", "Check the name and the password."
        else:
            what = f"{host} denies {access} to {login}"
            hint = f"Check that it exists, or log in again: blobstore login {host}"
        return AuthenticationError(
            f"{what} (it answers 401)",
            path=str(reply.address),
            status=_UNAUTHORIZED,
            hint=hint,
        )


def check_login(
    client: HttpClient, registry: WebAddress, login: Login, *, realms: Collection[str] = ()
) -> bool:
    """Return True if the registry accepts ``login``, False if it did not ask for one.

    ``registry`` is the address of the registry's API: ``https://HOST/v2/``.

    Raises: as `Authorization.challenged`; RemoteError if it is not a registry.
    """
    authorization = Authorization(client, registry, login, realms=realms)
    for _ in range(_ROUNDS):
        sent = authorization.field(None)
        target = RequestTarget(registry, sent)
        limits = client.limits(_MOST_BYTES)
        accept = (_OK, _UNAUTHORIZED)
        with client.request(Message("GET"), target, limits, accept=accept) as (reply, _):
            if reply.status == _OK:
                return sent is not None
            authorization.challenged(reply, None)
    raise refused(registry, "asks for credentials again and again")
