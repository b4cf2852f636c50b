"""Requests to one registry, with its authorization (OCI distribution specification).

A 401 of the registry itself is answered once: the authorization gets a token for exactly the scope
that the request needs, and the request is made again. A 401 of another server, to which a redirect
led, is an error: nothing of ours is sent there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor
from blobstore.formats.strictjson import parse_object
from blobstore.io.budget import Budget
from blobstore.io.http.client import HttpClient, Message, Reply
from blobstore.io.http.web_addresses import RequestTarget, WebAddress
from blobstore.io.workers import results_of
from blobstore.store.registry.authorization import Authorization, Scope
from blobstore.store.registry.logins import AnyLogin, Login

_T = TypeVar("_T")
HEAD_BYTES = 64 * 2**10
"""Bytes that may come besides a body: heads of replies, redirects, bodies of errors."""
OK, CREATED, ACCEPTED, NO_CONTENT, PARTIAL = 200, 201, 202, 204, 206
_UNAUTHORIZED, NOT_FOUND = 401, 404
_TRIES = 3
"""Without a login, with it, and with a token in the place of one that has expired."""
_REFUSALS = frozenset(range(400, 429))
"""Statuses whose replies may contain a reason. 429 and 5xx are tried again."""
_UNKNOWN = (400, 404)
LOWER_CASE = "Most registries write namespaces and models in lower case."
_HINTS = {
    403: "The login does not allow it.",
    405: "The registry does not allow it.",
    413: "The registry takes less at once.",
}
_MAX_ERROR = 16 * 2**10
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its scope, its message, the accepted statuses, and the bytes of its reply.

    A ``scope`` of None gives no right.
    """

    scope: Scope | None
    message: Message
    accept: Collection[int]
    nbytes: int = 0
    retries: bool = True
    budget: Budget | None = None
    """What several requests together may take."""


class RegistryApi:
    """The registry at ``root``, a web address without a path."""

    def __init__(
        self,
        client: HttpClient,
        root: str,
        login: AnyLogin = None,
        *,
        realms: Collection[str] = (),
    ) -> None:
        """``login``, ``realms``: see `Authorization`. Raises: UsageError for another address."""
        self.client = client
        self.root = WebAddress.parse(root)
        self._authorization = Authorization(client, self.root, login, realms=realms)

    def address(self, *path: str, query: str = "") -> WebAddress:
        """Return the address of something below ``/v2/``."""
        target = "/".join(("/v2", *path))
        return replace(self.root, target=f"{target}?{query}" if query else target)

    @contextmanager
    def request(self, address: WebAddress, ask: Ask) -> Iterator[Reply]:
        """Yield the reply. The rest of a small body is read, so that the connection is kept.

        Raises: NotFoundError for 404, unless that is accepted; RemoteError.
        """
        for attempt in range(_TRIES):
            with self._once(address, ask) as reply:
                if reply.status in ask.accept:
                    yield reply
                    return
                ours = reply.address.origin == self.root.origin
                if reply.status != _UNAUTHORIZED or attempt + 1 == _TRIES or not ours:
                    failure = reply.failure(_detail(reply), _hint(reply))
                    # Behind a redirect: both addresses are named.
                    raise failure if reply.address == address else failure.at(str(address))
                self._authorization.challenged(reply, ask.scope)

    def at_once(self, blobs: Sequence[Descriptor], do: Callable[[Descriptor], _T]) -> list[_T]:
        """Return what ``do`` gives for each blob; as many run at once as the client allows."""
        return results_of(blobs, do, self.client.connections, name="registry")

    @contextmanager
    def _once(self, address: WebAddress, ask: Ask) -> Iterator[Reply]:
        is_ours = address.origin == self.root.origin
        target = RequestTarget(address, self._authorization.field(ask.scope) if is_ours else None)
        sent = ask.message.body.size if ask.message.body is not None else 0
        limits = self.client.limits(ask.nbytes + HEAD_BYTES, ask.budget, sent=sent)
        accept = {*ask.accept, *_REFUSALS}
        with self.client.request(
            ask.message, target, limits, accept=accept, retries=ask.retries
        ) as (reply, _):
            yield reply


def check_login(
    client: HttpClient, registry: WebAddress, login: Login, *, realms: Collection[str] = ()
) -> bool:
    """Return True if the registry accepts ``login``, False if it did not ask for one.

    ``registry`` is the address of the registry's API: ``https://HOST/v2/``.

    Raises: as `Authorization.challenged`; RemoteError if it is not a registry.
    """
    api = RegistryApi(client, str(registry), login, realms=realms)
    with api.request(registry, Ask(None, Message("GET"), (OK,), nbytes=HEAD_BYTES)) as reply:
        return reply.authorization is not None


def _detail(reply: Reply) -> str:
    """Return a registry's own message (specification, "Error Codes"); "" without one."""
    try:
        error = parse_object(reply.whole(_MAX_ERROR), "an error", rule="R1")["errors"][0]
        return f"{error['code']}, {error.get('message', '')}"[:_SHOWN]
    except (BlobStoreError, LookupError, TypeError, AttributeError):
        return ""


def _hint(reply: Reply) -> str:
    """Return a hint for an error; "" without one."""
    repository = reply.address.target.partition("?")[0]
    if reply.status in _UNKNOWN and repository != repository.lower():
        return LOWER_CASE
    return _HINTS.get(reply.status, "")
