"""References to models at registries, and requests to one registry, with its authorization.

A 401 of the registry itself is answered once: the authorization gets a token for exactly the scope
that the request needs, and the request is made again. A 401 of another server, to which a redirect
led, is an error: nothing of ours is sent there.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from blobstore.errors import BlobStoreError, InvalidNameError, UsageError, quoted
from blobstore.formats.documents import Descriptor
from blobstore.formats.strictjson import parse_object
from blobstore.io.budget import Budget
from blobstore.io.http.client import HttpClient, Reply, Request
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.registry.authorization import Authorization, Scope
from blobstore.store.registry.logins import HUB_HOSTS, AnyLogin, Login

_T = TypeVar("_T")
HEAD_BYTES = 64 * 2**10
"""Bytes that may come besides a body: heads of replies, redirects, bodies of errors."""
OK, CREATED, ACCEPTED, PARTIAL = 200, 201, 202, 206
_UNAUTHORIZED, NOT_FOUND = 401, 404
# Without a login, with it, and with a token in the place of one that has expired.
_TRIES = 3
# Statuses whose replies may contain a reason. 429 and 5xx are tried again.
_REFUSALS = frozenset(range(400, 429))
_UNKNOWN = (400, 404)
LOWER_CASE = "Most registries require namespaces and models in lower case."
_HINTS = {
    403: "The login does not allow it.",
    405: "The registry does not allow it.",
    413: "The registry accepts only smaller uploads.",
}
_MAX_ERROR = 16 * 2**10
_SHOWN = 200


_LOOPBACK = re.compile(r"(?:(?:.+\.)?localhost|127(?:\.[0-9]{1,3}){3})(?::[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reference:
    """``[http://|https://][HOST/][NAMESPACE/]MODEL[:TAG][@sha256:…]``.

    ``digest``: of the manifest that is meant, whatever the tag names now. ``scheme``: None if it is
    not written.
    """

    name: ModelName
    digest: Digest | None = None
    scheme: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the reference in a text.

        Raises: InvalidNameError (rule N1); InvalidDigestError (rule D1).
        """
        name, at, digest = text.partition("@")
        parsed = ModelName.parse(name)
        scheme = parsed.scheme if "://" in name else None
        return cls(parsed, Digest.parse(digest) if at else None, scheme)


def repository_of(name: ModelName) -> str:
    """Return the repository of a model: ``NAMESPACE/MODEL``. Its tag is the model's."""
    return f"{name.namespace}/{name.model}"


def check_host(host: str) -> None:
    """Raise UsageError unless ``host`` is one that names may have: ``HOST`` or ``HOST:PORT``."""
    try:
        ModelName(host=host, model="any")
    except InvalidNameError:
        raise UsageError(
            f"not a registry: {quoted(host)}", hint="Write HOST or HOST:PORT."
        ) from None


def registry_address(host: str, *, insecure: bool = False, scheme: str | None = None) -> WebAddress:
    """Return the address of a registry's API, ``https://HOST/v2/``.

    It is http on this machine (localhost, 127.0.0.1), and elsewhere if it may be ``insecure``,
    unless ``scheme`` says https. Docker Hub's API is on another host than its names say.

    Raises: UsageError for a host that can't be, or for http where it may not be.
    """
    check_host(host)
    if host.lower() in HUB_HOSTS:
        host, insecure = HUB_HOSTS[-1], False
    may_be_http = insecure or _LOOPBACK.fullmatch(host) is not None
    if scheme == "http" and not may_be_http:
        hint = "Use https, or allow it with insecure=True."
        raise UsageError(f"{host} would be contacted without TLS", hint=hint)
    chosen = scheme or ("http" if may_be_http else "https")
    return WebAddress.parse(f"{chosen}://{host}/v2/")


class RegistryApi:
    """The registry at ``root``, a web address without a path.

    ``login``, ``realms``: see `Authorization`. Raises: UsageError for another address.
    """

    def __init__(
        self,
        client: HttpClient,
        root: str,
        login: AnyLogin = None,
        *,
        realms: Collection[str] = (),
    ) -> None:
        self.client = client
        self.root = WebAddress.parse(root)
        self._authorization = Authorization(client, self.root, login, realms=realms)

    def address(self, *path: str, query: str = "") -> WebAddress:
        target = "/".join(("/v2", *path))
        return replace(self.root, target=f"{target}?{query}" if query else target)

    def resolve(self, reply: Reply, reference: str | None) -> WebAddress:
        """Return the address at which a reply says that something goes on.

        Raises: RemoteError (rule R2) unless that is an address of the registry.
        """
        if reference is None:
            raise reply.refuse("answers without a Location")
        there = reply.address.join(reference)
        if there.origin != self.root.origin:
            raise reply.address.refuse(f"continues at another server, {there}")
        return there

    @contextmanager
    def request(
        self,
        address: WebAddress,
        scope: Scope | None,
        request: Request,
        nbytes: int = 0,
        budget: Budget | None = None,
    ) -> Iterator[Reply]:
        """Yield the reply. The rest of a small body is read, so that the connection is kept.

        A ``scope`` of None gives no right. ``nbytes``: of the reply. ``budget``: what several
        requests together may take. Raises: NotFoundError for 404, unless that is accepted;
        RemoteError.
        """
        asked = replace(request, accept={*request.accept, *_REFUSALS})
        sent = request.body.size if request.body is not None else 0
        for attempt in range(_TRIES):
            target = RequestTarget(address, self._authorization.field(scope))
            limits = self.client.limits(nbytes + HEAD_BYTES, budget, sent=sent)
            with self.client.request(asked, target, limits) as (reply, _):
                if reply.status in request.accept:
                    yield reply
                    return
                ours = reply.address.origin == self.root.origin
                if reply.status != _UNAUTHORIZED or attempt + 1 == _TRIES or not ours:
                    failure = reply.failure(_detail(reply), _hint(reply))
                    # After a redirect both addresses are named.
                    raise failure if reply.address == address else failure.at(str(address))
                self._authorization.answer_challenge(reply, scope)

    def at_once(self, blobs: Sequence[Descriptor], do: Callable[[Descriptor], _T]) -> list[_T]:
        return results_of(blobs, do, self.client.connections, name="registry")


def check_login(
    client: HttpClient, registry: WebAddress, login: Login, *, realms: Collection[str] = ()
) -> bool:
    """Return True if the registry accepts ``login``, False if it did not ask for one.

    ``registry`` is the address of the registry's API: ``https://HOST/v2/``.

    Raises: as `Authorization.challenged`; RemoteError if it is not a registry.
    """
    api = RegistryApi(client, str(registry), login, realms=realms)
    with api.request(registry, None, Request("GET", (OK,)), HEAD_BYTES) as reply:
        return reply.authorization is not None


def _detail(reply: Reply) -> str:
    """Return a registry's own message (specification, "Error Codes"); "" without one."""
    try:
        error = parse_object(reply.whole(_MAX_ERROR), "an error", rule="R1")["errors"][0]
        return f"{error['code']}, {error.get('message', '')}"[:_SHOWN]
    except (BlobStoreError, LookupError, TypeError, AttributeError):
        return ""


def _hint(reply: Reply) -> str:
    repository = reply.address.target.partition("?")[0]
    if reply.status in _UNKNOWN and repository != repository.lower():
        return LOWER_CASE
    return _HINTS.get(reply.status, "")
