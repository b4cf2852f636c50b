"""HttpClient: one request with redirects, retries and credentials (policy: `blobstore.io.http`)."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock, Semaphore
from typing import Self, TypeVar

from blobstore._version import __version__
from blobstore.errors import BlobStoreError, NotFoundError, RemoteError, UsageError
from blobstore.io.budget import Budget, Cancellation, RequestLimits, RetryPolicy
from blobstore.io.http.connections import Connections, remote_errors
from blobstore.io.http.messages import Fields, Message, Reply, linked_of
from blobstore.io.http.web_addresses import (
    MAX_REDIRECTS,
    RequestTarget,
    WebAddress,
    is_public,
    redirected,
)

_T = TypeVar("_T")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REPEATING = frozenset({307, 308})
"""Redirects that repeat the method and the body (RFC 9110 section 15.4)."""
_SAFE = frozenset({"GET", "HEAD"})
_TOKEN = re.compile(r"[!-~]{1,4096}", re.ASCII)


class HttpClient:
    """Requests over kept-alive connections. Safe to share between threads; a context manager.

    ``token`` is sent to the origin of the first address that is asked for, and to no other.
    ``connections`` is the number of requests at once, and so the most connections to one host.
    ``ca_file`` names certificates (PEM) to trust beside the system's. ``is_public`` says which IP
    addresses are public, for rule R2. The policy: `blobstore.io.http`.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        connections: int = 16,
        retry_policy: RetryPolicy | None = None,
        ca_file: str | None = None,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        """Raises: UsageError for an invalid token; StorageError, NotFoundError for ``ca_file``."""
        if token is not None and _TOKEN.fullmatch(token) is None:
            raise UsageError(
                "not a token: it is empty, too long, or contains a character that is not visible"
                " ASCII"
            )
        self.retry_policy = retry_policy or RetryPolicy()
        self.connections = connections
        self._slots = Semaphore(connections)
        self._token = token
        self._token_origin: tuple[str, str, int] | None = None
        self._lock = Lock()
        self._kept = Connections(is_public, ca_file)
        weakref.finalize(self, self._kept.close)

    def start(self, url: str) -> RequestTarget:
        """Return where requests for ``url`` begin.

        The token is for the origin of the first address that is given here.

        Raises: UsageError (rule R2) when ``url`` is not a web address.
        """
        address = WebAddress.parse(url)
        with self._lock:
            self._token_origin = self._token_origin or address.origin
        has_token = self._token is not None and address.origin == self._token_origin
        return RequestTarget(address, f"Bearer {self._token}" if has_token else None)

    def limits(
        self,
        total: int,
        budget: Budget | None = None,
        *,
        sent: int = 0,
        cancellation: Cancellation | None = None,
    ) -> RequestLimits:
        """Return the limits of a request: ``total`` bytes, heads included, within ``budget``.

        ``sent``: bytes of its body, which need time too.
        """
        return RequestLimits(self.retry_policy, total, budget, sent=sent, cancellation=cancellation)

    def get(
        self,
        target: RequestTarget,
        limits: RequestLimits,
        *,
        accept: Collection[int],
        fields: Fields = (),
        retries: bool = True,
    ) -> AbstractContextManager[tuple[Reply, RequestTarget]]:
        """Give the reply to a GET request. See `request`."""
        return self.request(Message("GET", fields), target, limits, accept=accept, retries=retries)

    @contextmanager
    def request(
        self,
        message: Message,
        target: RequestTarget,
        limits: RequestLimits,
        *,
        accept: Collection[int],
        retries: bool = True,
    ) -> Iterator[tuple[Reply, RequestTarget]]:
        """Give the reply to a request, and where redirects led, for as long as the block lasts.

        ``accept`` are the statuses that the caller handles; a reply with one of them has passed
        rule R1's general part. Temporary failures are tried again, within ``limits``, unless
        ``retries`` is False: then the caller does.

        Raises: NotFoundError for 404; RemoteError for every other status, a server that can't be
        reached, a reply that breaks rule R1, a redirect that breaks rule R2; as the body.
        """
        answered = partial(self._answered, message, target, limits, accept)
        with self._slots:
            reply, at = self.retrying(answered, limits) if retries else answered()
            try:
                yield reply, at
            finally:
                reply.close()

    def retrying(self, work: Callable[[], _T], limits: RequestLimits) -> _T:
        """Return what ``work`` does, which is done again after temporary failures. As `pause`."""
        attempt = 0
        while True:
            try:
                return work()
            except RemoteError as error:
                if not error.temporary:
                    raise
                failure = error
            self.pause(attempt, limits, failure)
            attempt += 1

    def pause(self, attempt: int, limits: RequestLimits, failure: BlobStoreError) -> None:
        """Wait before the next attempt: twice as long each time, minus a random part.

        Raises ``failure`` when no attempt is left, or the server asks for a longer wait than the
        policy allows.
        """
        policy = limits.policy
        asked_s = failure.retry_after_s if isinstance(failure, RemoteError) else 0.0
        wait = max(asked_s, policy.backoff_s * 2**attempt * random.uniform(0.5, 1))  # noqa: S311
        if asked_s > policy.longest_wait_s:
            failure.hint = f"It asks to wait for {asked_s:,.0f} seconds."
            raise failure
        if attempt + 1 >= policy.attempts or wait > limits.seconds_left(failure.path):
            raise failure
        limits.cancellation.sleep(wait)

    def allow(self, connections: int) -> None:
        """Let so many requests run at once, if it is less than that now."""
        with self._lock:
            if connections > self.connections:
                self._slots.release(connections - self.connections)
                self.connections = connections

    def close(self) -> None:
        """Close the connections that are kept."""
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(
        self,
        message: Message,
        target: RequestTarget,
        limits: RequestLimits,
        accept: Collection[int],
    ) -> tuple[Reply, RequestTarget]:
        """Return the reply to one attempt, if its status is accepted, and where redirects led."""
        try:
            reply, at = self._followed(message, target, limits)
            if reply.status not in accept:
                reply.close()
                raise reply.failure()
            reply.check_uncoded()
        except (RemoteError, NotFoundError) as error:
            if error.path != str(target.address):  # a redirect led there: name both addresses
                raise error.at(str(target.address)) from error.__cause__
            raise
        return reply, at

    def _followed(
        self,
        message: Message,
        target: RequestTarget,
        limits: RequestLimits,
    ) -> tuple[Reply, RequestTarget]:
        for _ in range(MAX_REDIRECTS + 1):
            reply = self._ask(message, target, limits)
            if reply.status not in _REDIRECTS:
                return reply, target
            try:
                if message.method not in _SAFE and reply.status not in _REPEATING:
                    raise target.address.refuse(f"answers {message.method} with {reply.status}")
                origin = target.address
                target = redirected(
                    target,
                    reply.field("location"),
                    from_public=reply.from_public,
                    linked=linked_of(reply),
                )
                if message.has_credentials and target.address.origin != origin.origin:
                    raise origin.refuse(f"redirects credentials to {target.address}")
            finally:
                reply.close()
        raise target.address.refuse(f"is behind more than {MAX_REDIRECTS} redirects")

    def _ask(self, message: Message, target: RequestTarget, limits: RequestLimits) -> Reply:
        address = target.address
        has_credentials = target.authorization is not None or message.has_credentials
        with remote_errors(address, limits):
            connection = self._kept.take(target, limits, has_credentials=has_credentials)

        working = partial(remote_errors, address, limits, connection)
        body = message.body.pieces() if message.body is not None else None
        try:
            with working():
                response = connection.exchange(
                    address, limits, message.method, partial(_fields, target, message), body
                )
            return Reply(
                address,
                response,
                connection,
                working,
                partial(self._kept.give_back, address, connection),
                has_body=message.method != "HEAD",
                authorization=target.authorization,
            )
        except BaseException:
            connection.disconnect()
            raise


def _fields(target: RequestTarget, message: Message) -> dict[str, str]:
    fields = {
        "Host": target.address.authority,
        "User-Agent": f"blobstore/{__version__}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }
    if target.authorization is not None:
        fields["Authorization"] = target.authorization
    if message.body is not None:
        fields["Content-Length"] = str(message.body.size)
    return fields | dict(message.fields)
