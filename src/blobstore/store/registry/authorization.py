"""Authorization: which Authorization field requests to a registry carry, and what may ask for it.

No field is sent until the registry answers 401. The challenge in that reply asks for Basic, which
is the login itself, or for Bearer, a token from its token server. Bearer is taken if both are
offered. Tokens are kept in memory, per scope, and replaced before they expire.
Only the scope that is needed is asked for, whatever the challenge said. Sources:
distribution/distribution@0d6b721d docs/content/spec/auth/token.md (GET), oauth.md (POST, for
identity tokens) and scope.md.

*Challenges*, in WWW-Authenticate fields (RFC 9110 section 11.6.1): a field is a list of challenges.
A challenge is a scheme, then either a token68 or a list of parameters. Both lists are separated by
commas, so a name without ``=`` begins the next challenge.

*Realms*, the token servers that may be asked for a registry (rule R3): a registry names its token
server in a challenge, so a hostile one could make this machine send credentials anywhere, or
requests into its own network (CVE-2020-15157 of containerd, CVE-2026-48978 of oras-go). A realm is
used

- with credentials, on the registry's own host: any port with https, whose certificate is for the
  host; without it, the registry's own origin only;
- with credentials, on a host that the user named;
- with credentials and https, on a domain above or below the registry's: the owner of a domain
  decides about the names below it. A sibling domain may have another owner (under co.uk);
- with credentials and https, on a host that is listed here for this registry;
- without credentials, on any other host, with https, by name, at a public address.

Redirects of a token server that lead to another origin are refused.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from urllib.parse import urlencode

from blobstore.errors import (
    AuthenticationError,
    BlobStoreError,
    DocumentError,
    UsageError,
    quoted,
)
from blobstore.formats.strictjson import Document, parse_document, parse_object, without_none
from blobstore.io.http.client import Body, HttpClient, Reply, Request
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.store.registry.logins import AnyLogin, Login, Secret

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_END = r"[ \t]*+(?:,[ \t,]*+|\Z)"
_PARAMETER_TEXT = rf'({_WORD})[ \t]*+=[ \t]*+(?:({_WORD})|"((?:[^"\\]|\\.)*+)"){_END}'
_PARAMETER = re.compile(_PARAMETER_TEXT, re.ASCII | re.DOTALL)
_SCHEME = re.compile(
    rf"({_WORD})(?: ++(?:[A-Za-z0-9._~+/-]++=*+{_END}|(?={_PARAMETER_TEXT}))|{_END})",
    re.ASCII | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class ChallengeError(ValueError):
    """A text is not a list of challenges: the reason, with the place in the text."""


def parse_challenges(fields: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the challenges of a reply's fields, in their order: schemes, and their parameters.

    Names of schemes and parameters are in lower case. A token68 is dropped: neither Basic nor
    Bearer has one.

    Raises: ChallengeError for anything else than the grammar allows, and for a parameter that
    comes twice in a challenge (section 11.2).
    """
    challenges: list[tuple[str, dict[str, str]]] = []
    for text in fields:
        parameters: dict[str, str] | None = None
        position = len(text) - len(text.lstrip(" \t,"))
        while position < len(text):
            if parameters is not None and (match := _PARAMETER.match(text, position)):
                name, token, quote = match.group(1, 2, 3)
                if name.lower() in parameters:
                    raise ChallengeError(f"{name[:40]} appears twice")
                parameters[name.lower()] = _ESCAPED.sub(r"\1", quote) if token is None else token
            elif match := _SCHEME.match(text, position):
                parameters = {}
                challenges.append((match[1].lower(), parameters))
            else:
                raise ChallengeError(f"invalid at character {position}")
            position = match.end()
    return challenges


RULE = "R3"
# Registries, and the hosts of their token servers that are neither above nor below them.
#
# Sources: distribution/distribution@0d6b721d docs/content/spec/auth/token.md; the challenges of the
# others as recorded in public code (elastic/eui, digitalocean/doctl), oras-project/oras-dotnet#401.
_LISTED = {
    ("registry-1.docker.io", "auth.docker.io"),
    ("docker.elastic.co", "docker-auth.elastic.co"),
    ("registry.digitalocean.com", "api.digitalocean.com"),
    ("nvcr.io", "authn.nvidia.com"),
}
# Texts that `getaddrinfo` reads as an IP address, 127.1 and 0x7f000001 too.
_IP_LITERAL = re.compile(r".*:.*|(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?", re.ASCII | re.IGNORECASE)


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
        raise refusal(registry, "names a token server whose address is invalid") from None
    if realm.scheme == "http" and registry.scheme == "https":
        raise refusal(registry, f"names a token server without TLS: {realm}")
    if _is_own(realm, registry) or realm.authority in named:
        return RequestTarget(realm)
    if realm.scheme == "http" or _IP_LITERAL.fullmatch(realm.host):
        raise refusal(
            registry, f"names the token server {realm} on another host", _hint(realm, registry)
        )
    is_known = _is_related(realm.host, registry.host) or (registry.host, realm.host) in _LISTED
    if has_login and not is_known:
        raise refusal(
            registry,
            f"asks to send credentials to {realm.authority}, which is not known to belong to it",
            _hint(realm, registry),
        )
    return RequestTarget(realm, public_only=from_public or not is_known, from_server=True)


def refusal(registry: WebAddress, what: str, hint: str | None = None) -> AuthenticationError:
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


CLIENT_ID = "blobstore"
MAX_REPLY = 64 * 2**10
MAX_TOKEN = 16 * 2**10
_HEAD = 16 * 2**10
# Seconds that a token lasts at least, and if its server does not say how long.
_DEFAULT_S = 60
_LONGEST_S = 86_400
# Seconds before its end from which a token is not used any more.
_MARGIN_S = 10
_NAME = re.compile(r"[A-Za-z0-9]+(?:[._/-]+[A-Za-z0-9]+)*", re.ASCII)
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 200, 400, 401, 403, 404
_ANSWERS = (_OK, _BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND)


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
        return f"Bearer {self.secret.reveal()}"


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
        request, target = self._request(scope, login)
        asked = time.monotonic()
        limits = client.limits(_HEAD + MAX_REPLY)
        with client.request(request, target, limits) as (reply, at):
            if at.address.origin != target.address.origin:
                raise target.address.refuse(f"redirects a token request to {at.address}", RULE)
            if reply.status != _OK:
                raise self._refusal(reply.status, login)
            return _token_of(reply, asked)

    def _request(self, scope: Scope | None, login: Login | None) -> tuple[Request, RequestTarget]:
        scopes = () if scope is None else scope.texts
        common = without_none({"client_id": CLIENT_ID, "service": self.service})
        if login is not None and login.user is None:
            form = common | {
                "grant_type": "refresh_token",
                "scope": scopes and " ".join(scopes),
                "refresh_token": login.secret.reveal(),
            }
            body = Body.of(urlencode(form, doseq=True).encode(), has_credentials=True)
            fields = (("Content-Type", "application/x-www-form-urlencoded"),)
            return Request("POST", _ANSWERS, fields, body), self.realm
        address = self.realm.address
        query = urlencode(common | {"scope": scopes}, doseq=True, safe=":/,*")
        joint = "&" if "?" in address.target else "?"
        asked = replace(address, target=f"{address.target}{joint}{query}")
        authorization = None if login is None else login.basic
        target = replace(self.realm, address=asked, authorization=authorization)
        return Request("GET", _ANSWERS), target

    def _refusal(self, status: int, login: Login | None) -> AuthenticationError:
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


def _token_of(reply: Reply, asked: float) -> AccessToken:
    try:
        raw = b"".join(reply.chunks())
        value = parse_object(raw, "a token reply", rule=RULE)
        document = parse_document(_TokenReply, value, "a token reply", RULE)
    except DocumentError:
        what = "a token reply that is not a JSON object of the expected keys"
        raise _invalid(reply, what) from None
    token = document.token or document.access_token
    if not token:
        raise _invalid(reply, "without a token")
    if len(token) > MAX_TOKEN:
        raise _invalid(reply, f"with a token of {len(token):,} characters, at most {MAX_TOKEN:,}")
    if _VISIBLE.fullmatch(token) is None:
        raise _invalid(reply, "with a token that contains an invalid character")
    lifetime = min(max(document.expires_in or _DEFAULT_S, _DEFAULT_S), _LONGEST_S)
    return AccessToken(Secret(token), asked, asked + lifetime)


def _invalid(reply: Reply, what: str) -> AuthenticationError:
    return AuthenticationError(
        f"{reply.address} answers a token request {what} (rule {RULE})",
        rule=RULE,
        path=str(reply.address),
        status=reply.status,
    )


# A token that is refused within this time (s) has not expired: it does not allow the request.
_YOUNG_S = 10


class Authorization:
    """The authorization at one registry. Safe to share between threads.

    ``registry`` is an address of the registry; ``realms`` are hosts of token servers that the user
    named (``HOST`` or ``HOST:PORT``), in addition to those that `realm_target` allows.
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
        self._wants: TokenServer | str | None = None
        self._fetching = Lock()
        self._tokens: dict[Scope | None, AccessToken] = {}
        self._failures: dict[Scope | None, BlobStoreError] = {}

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
        wants = self._wants
        return self._token(wants, scope).field if isinstance(wants, TokenServer) else wants

    def answer_challenge(self, reply: Reply, scope: Scope | None) -> None:
        """Take a 401 that answers a request for ``scope``, so that `field` has a better answer.

        The caller repeats the request, with that. No request is made here: the caller still has
        its connection, and all of a client's connections may be in the same state.

        Raises: AuthenticationError (rule R3) if the registry refuses what it asked for, needs a
        login, or its challenge is invalid; as the login's function.
        """
        if reply.address.origin != self._registry.origin:
            raise refusal(
                self._registry,
                f"redirects to {reply.address}, which asks for credentials: none are sent there",
            )
        if reply.authorization is not None and self._was_refused(scope, reply.authorization):
            raise self._denial(scope, reply)
        self._wants = self._wanted(reply)

    def _was_refused(self, scope: Scope | None, sent: str) -> bool:
        """Return True if no other field can be sent; an expired token is dropped."""
        token = self._tokens.get(scope)
        if token is None:
            return sent == self._wants
        if token.field != sent:
            return False  # another thread has replaced it
        if time.monotonic() - token.since < _YOUNG_S:
            return True
        self._tokens.pop(scope, None)
        return False

    def _wanted(self, reply: Reply) -> TokenServer | str:
        try:
            challenges = parse_challenges(reply.values("www-authenticate"))
        except ChallengeError as error:
            raise refusal(
                self._registry, f"asks for credentials in a malformed way: {error}"
            ) from None
        by_scheme = dict(reversed(challenges))
        if (bearer := by_scheme.get("bearer")) is not None:
            return self._token_server(bearer, reply)
        if "basic" not in by_scheme:
            offered = ", ".join(sorted(by_scheme)) or "none"
            raise refusal(
                self._registry,
                f"answers 401 and offers the schemes {offered[:80]}; Basic and Bearer are known",
            )
        login = self._login
        if login is None:
            raise self._denial(None, reply)
        if login.basic is None:
            raise refusal(self._registry, f"asks for a user name and a password, not for {login}")
        return login.basic

    def _token_server(self, bearer: Mapping[str, str], reply: Reply) -> TokenServer:
        realm = bearer.get("realm")
        if realm is None:
            raise refusal(self._registry, "asks for a token, and names no token server")
        # Every registry names its repository; a name with a * would be a token for all.
        for scope in bearer.get("scope", "").split():
            kind, _, rest = scope.partition(":")
            if kind == "repository" and "*" in rest.rpartition(":")[0]:
                raise refusal(
                    self._registry, f"asks for a token for all repositories: {scope[:80]}"
                )
        target = realm_target(
            realm,
            self._registry,
            self._realms,
            has_login=self._login is not None,
            from_public=reply.from_public,
        )
        return TokenServer(self._registry.authority, target, bearer.get("service"))

    def _token(self, server: TokenServer, scope: Scope | None) -> AccessToken:
        """Return the token for ``scope``. One thread fetches it, and others share what it gets.

        An account may be locked after a few wrong passwords, so threads that waited share a
        failure, too.
        """
        before = self._failures.get(scope)
        with self._fetching:
            token = self._tokens.get(scope)
            if token is not None and time.monotonic() < token.until - _MARGIN_S:
                return token
            failure = self._failures.get(scope)
            if failure is not None and failure is not before:
                raise failure
            try:
                self._tokens[scope] = server.fetch(self._client, scope, self._login)
            except BlobStoreError as error:
                self._failures[scope] = error
                raise
            return self._tokens[scope]

    def _denial(self, scope: Scope | None, reply: Reply) -> AuthenticationError:
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
