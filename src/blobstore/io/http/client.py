"""HttpClient: one request with redirects, retries and credentials, and its reply.

The policy: `blobstore.io.http`. Rule R1 for every reply, whatever it brings (RFC 9110, 9112):

- its head has fewer than 100 fields in 100 KiB, with interim replies, and no line is folded
- it has at most one ``Content-Length``, of ASCII digits, and no transfer coding but ``chunked``
- it has no ``Content-Length`` with a ``Transfer-Encoding``: two lengths are how replies are
  smuggled (9112 section 6.3)
- it has no content coding: ``identity`` was asked for, ranges are of the coded form, and a few
  kilobytes can expand to gigabytes (9110 section 8.4)
- a field that is to be there once is there once
"""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse, IncompleteRead
from itertools import chain
from threading import Lock, Semaphore
from typing import TypeVar

from blobstore._version import __version__
from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UsageError,
)
from blobstore.io.budget import Budget, Cancellation, RequestLimits, RetryPolicy
from blobstore.io.http.connections import Connection, Connections, remote_errors
from blobstore.io.http.web_addresses import (
    MAX_REDIRECTS,
    RequestTarget,
    WebAddress,
    is_public,
    redirect_target,
)
from blobstore.io.ranges import Closing

_T = TypeVar("_T")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Redirects that repeat the method and the body (RFC 9110 section 15.4).
_REPEATING = frozenset({307, 308})

_TOKEN = re.compile(r"[!-~]{1,4096}", re.ASCII)
Fields = Sequence[tuple[str, str]]

_SMALL_BODY = 4096
# Bytes of a body at a time: each record of TLS, 16 KiB, would pass through every reader alone.
_PIECE = 2**17
# Bytes after which an attempt counts as a new one.
_PROGRESS = 64 * 2**10
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_TEMPORARY = frozenset({429, 500, 502, 503, 504})
_WITHOUT_BODY = frozenset({204, 304})
_NOT_FOUND = 404
_SPENT = re.compile(r"; *r=0 *; *t=([0-9]{1,9})", re.ASCII)
_NEXT = re.compile(r'<([^<>]{1,4096})>;[^,<]*rel="?next"?', re.ASCII | re.IGNORECASE)
_HINTS = {
    401: "If it is private, give a token (for the Hugging Face Hub: HF_TOKEN). The Hub gives"
    " the same answer for what does not exist.",
    403: "The token, if any, does not grant access. For a gated repository, first request"
    " access on its page.",
    404: "Check the address and, for a repository, its revision.",
    407: "The proxy wants a login: HTTP_PROXY=http://USER:PASSWORD@HOST:PORT",
    416: "The file is shorter than the server said.",
    429: "Too many requests; servers often allow more with a token.",
}


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: ``size`` bytes, which ``pieces`` returns again for each attempt.

    ``has_credentials``: it is treated as an Authorization field is. It is not sent over the public
    internet without TLS, and a redirect to another origin is refused.
    """

    size: int
    pieces: Callable[[], Iterable[bytes]]
    has_credentials: bool = False

    @classmethod
    def of(cls, data: bytes, *, has_credentials: bool = False) -> Body:
        return cls(len(data), lambda: (data,), has_credentials)


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the statuses that the caller handles.

    Temporary failures are tried again, unless ``retries`` is False: then the caller does.
    """

    method: str
    accept: Collection[int]
    fields: Fields = ()
    body: Body | None = None
    retries: bool = True


class Reply:
    """One reply.

    Its body is read once, by the thread that made the request, and only as far as it is asked for.
    ``length``: bytes of the body as the head has it; None where it does not say.
    ``from_public``: the server's address, the one that was connected to, is public.
    """

    def __init__(
        self,
        target: RequestTarget,
        response: HTTPResponse,
        connection: Connection,
        kept: Connections,
        limits: RequestLimits,
        *,
        has_body: bool = True,
    ) -> None:
        """``has_body``: False for a reply to HEAD, whose length is that of another reply.

        ``kept``: what the connection goes back to. Raises: RemoteError (rule R1).
        """
        self.address = target.address
        self.authorization = target.authorization
        self.status = response.status
        self.from_public = connection.public
        self._response = response
        self._connection = connection
        self._kept: Connections | None = kept
        self._limits = limits
        length, coding = self.field("content-length"), self.field("transfer-encoding")
        if response.headers.defects:
            raise self.refuse("answers with an invalid head")
        if length is not None and coding is not None:
            raise self.refuse("answers with both Content-Length and Transfer-Encoding")
        if length is not None and _LENGTH.fullmatch(length) is None:
            raise self.refuse(f"answers with the Content-Length {length[:40]!r}")
        if coding is not None and not response.chunked:
            raise self.refuse(f"uses the transfer coding {coding[:40]!r}")
        self.length = None if length is None else int(length)
        has_body = has_body and self.status not in _WITHOUT_BODY
        self._left = self.length if has_body else 0
        self._may_last = coding is None and not response.will_close

    def field(self, name: str) -> str | None:
        """Return a field's value, None where it is absent.

        Raises: RemoteError (rule R1) when it is there twice.
        """
        values = self.values(name)
        if len(values) > 1:
            raise self.refuse(f"answers with {len(values)} {name} fields")
        return values[0] if values else None

    def values(self, name: str) -> list[str]:
        return [value.strip(" \t") for value in self._response.headers.get_all(name, [])]

    def next_page(self) -> str | None:
        following = _NEXT.search(self.field("link") or "")
        return following[1] if following is not None else None

    def check_uncoded(self) -> None:
        """Raise RemoteError (rule R1), and close, when the body is coded in any way."""
        coding = ", ".join(self.values("content-encoding"))
        if coding not in ("", "identity"):
            self.close()
            raise self.refuse(f"answers in the coding {coding[:40]!r}; identity was requested")

    def chunks(self, *, at_once: bool = True) -> Iterator[bytes]:
        """Yield the body in pieces, as they come if ``at_once``, else of a useful size.

        Raises: RemoteError when the connection breaks before its end.
        """
        read = self._response.read1 if at_once else self._response.read
        while self._left != 0:
            with remote_errors(self.address, self._limits, self._connection):
                chunk = read(_PIECE)
                if not chunk and (self._left is not None or self._connection.received.is_broken):
                    raise IncompleteRead(b"", self._left)
            if not chunk:
                return
            if self._left is not None:
                self._left -= len(chunk)
            yield chunk

    def body(self, nbytes: int) -> Iterator[bytes]:
        """Yield a body of exactly ``nbytes``. Raises: as `chunks`; RemoteError (rule R1)."""
        left = nbytes
        for chunk in self.chunks(at_once=False):
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
        if left:
            raise self.refuse(f"does not send the declared number of bytes, {nbytes:,}")

    def whole(self, limit: int) -> bytes:
        """Return the body. Raises: LimitExceededError beyond ``limit`` bytes; as `chunks`."""
        data = bytearray()
        for chunk in chain((b"",), self.chunks()):  # the length is checked before any byte
            data += chunk
            if max(len(data), self.length or 0) > limit:
                raise LimitExceededError(
                    f"limit exceeded: {self.address} has more than {limit:,} bytes",
                    path=str(self.address),
                )
        return bytes(data)

    def close(self, *, rest: bool = True) -> None:
        """Give the connection back. It is used again only after exactly the body's length.

        ``rest``: the rest of a small body is read, so that a redirect or a 404 does not cost a
        connection. A second call does nothing.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if rest and self._may_last and self._left is not None and self._left <= _SMALL_BODY:
            with suppress(RemoteError, LimitExceededError):  # these bytes are not needed
                for _ in self.chunks():
                    pass
        kept.give_back(self.address, self._connection, keep=self._may_last and self._left == 0)

    def refuse(self, what: str) -> RemoteError:
        return RemoteError(
            f"{self.address} {what} (rule R1)",
            rule="R1",
            path=str(self.address),
            status=self.status,
        )

    def failure(self, detail: str = "", hint: str | None = None) -> BlobStoreError:
        """Return the status's error: `NotFoundError` for 404, `RemoteError` for every other.

        ``detail``: the server's own message. ``hint``: None for one that fits files.
        """
        hint = _HINTS.get(self.status) if hint is None else hint
        said = f": {detail}" if detail else ""
        if self.status == _NOT_FOUND:
            return NotFoundError(
                f"{self.address} does not exist (the server answers 404{said})",
                path=str(self.address),
                hint=hint,
            )
        return RemoteError(
            f"{self.address}: the server answers {self.status}{said}",
            path=str(self.address),
            status=self.status,
            temporary=self.status in _TEMPORARY,
            retry_after_s=self._retry_after(),
            hint=hint,
        )

    def _retry_after(self) -> float:
        """Return the seconds that the server asks to wait, 0 for none.

        ``Retry-After`` (RFC 9110 section 10.2.3), or ``RateLimit: "name";r=0;t=38``: no requests
        are left for 38 seconds, as the Hugging Face Hub says it (IETF
        draft-ietf-httpapi-ratelimit-headers-09; huggingface_hub@2.4.0 utils/_http.py
        `parse_ratelimit_headers`).
        """
        waits = [float(text) for text in self.values("retry-after") if _LENGTH.fullmatch(text)]
        spent = _SPENT.finditer(", ".join(self.values("ratelimit")))
        return max([0.0, *waits, *(float(limit[1]) + 1 for limit in spent)])  # in whole seconds


class HttpClient(Closing):
    """Requests over kept-alive connections. Safe to share between threads; a context manager.

    ``token`` is sent to the origin of the first address that is asked for, and to no other.
    ``connections`` is the number of requests at once, and so the most connections to one host.
    ``ca_file``, ``proxies`` and ``is_public``, for rule R2: as for `Connections`. The policy:
    `blobstore.io.http`.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        connections: int = 16,
        retry_policy: RetryPolicy | None = None,
        ca_file: str | None = None,
        proxies: Mapping[str, str] | None = None,
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
        self._kept = Connections(is_public, ca_file, proxies or {})
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

    @contextmanager
    def request(
        self, request: Request, target: RequestTarget, limits: RequestLimits
    ) -> Iterator[tuple[Reply, RequestTarget]]:
        """Give the reply to a request, and where redirects led, for as long as the block lasts.

        A reply with an accepted status has passed rule R1's general part. Retries are within
        ``limits``.

        Raises: NotFoundError for 404; RemoteError for every other status, a server that can't be
        reached, a reply that breaks rule R1, a redirect that breaks rule R2; as the body.
        """
        answered = partial(self._request_with_login, request, target, limits)
        with self._slots:
            reply, at = self.retry(answered, limits) if request.retries else answered()
            try:
                yield reply, at
            except BaseException:
                reply.close(rest=False)
                raise
            reply.close()

    def resume_body(
        self,
        read: Callable[[int], Iterable[bytes]],
        begin: int,
        end: int,
        limits: RequestLimits,
        name: str,
    ) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)`` of ``name``, of which ``read`` yields some from one on.

        After a temporary failure, or the end of a reply, it continues after the last byte. Attempts
        that bring less than 64 KiB are counted, as `pause` allows.
        """
        at, attempt = begin, 0
        while at < end:
            before = at
            failure = RemoteError(
                f"{name}: {attempt + 1} replies did not contain the bytes {begin}-{end - 1}"
                " (rule R1)",
                rule="R1",
                path=name,
            )
            try:
                for chunk in read(at):
                    at += len(chunk)
                    yield chunk
            except RemoteError as error:
                if not error.temporary:
                    raise
                failure = error
            attempt = 0 if at - before >= _PROGRESS else attempt + 1
            if attempt and at < end:
                self.pause(attempt - 1, limits, failure)

    def retry(self, work: Callable[[], _T], limits: RequestLimits) -> _T:
        """Return what ``work`` does, which is done again after temporary failures. As `pause`."""
        attempt = 0
        while True:
            try:
                return work()
            except RemoteError as error:
                if not error.temporary:
                    raise
                self.pause(attempt, limits, error)
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
            failure.hint = f"The server asks to wait for {asked_s:,.0f} seconds."
            raise failure
        if attempt + 1 >= policy.attempts or wait > limits.seconds_left(failure.path):
            raise failure
        limits.cancellation.wait(wait)

    def allow(self, connections: int) -> None:
        """Set the number of simultaneous requests, if it is lower now."""
        with self._lock:
            if connections > self.connections:
                self._slots.release(connections - self.connections)
                self.connections = connections

    def close(self) -> None:
        self._kept.disconnect_idle()

    def _request_with_login(
        self, request: Request, target: RequestTarget, limits: RequestLimits
    ) -> tuple[Reply, RequestTarget]:
        try:
            reply, at = self._follow(request, target, limits)
            if reply.status not in request.accept:
                reply.close()
                raise reply.failure()
            reply.check_uncoded()
        except (RemoteError, NotFoundError) as error:
            if error.path != str(target.address):  # a redirect led there: name both addresses
                raise error.at(str(target.address)) from error.__cause__
            raise
        return reply, at

    def _follow(
        self, request: Request, target: RequestTarget, limits: RequestLimits
    ) -> tuple[Reply, RequestTarget]:
        has_credentials = request.body is not None and request.body.has_credentials
        for _ in range(MAX_REDIRECTS + 1):
            reply = self._ask(request, target, limits)
            if reply.status not in _REDIRECTS:
                return reply, target
            try:
                if request.method not in ("GET", "HEAD") and reply.status not in _REPEATING:
                    raise target.address.refuse(f"answers {request.method} with {reply.status}")
                before = target.address
                target = redirect_target(
                    target, reply.field("location"), from_public=reply.from_public
                )
                if has_credentials and target.address.origin != before.origin:
                    raise before.refuse(f"redirects credentials to {target.address}")
            finally:
                reply.close()
        raise target.address.refuse(f"has more than {MAX_REDIRECTS} redirects")

    def _ask(self, request: Request, target: RequestTarget, limits: RequestLimits) -> Reply:
        address = target.address
        body = request.body
        has_credentials = target.authorization is not None or (
            body is not None and body.has_credentials
        )
        with remote_errors(address, limits):
            connection = self._kept.take(target, limits, has_credentials=has_credentials)

        pieces = body.pieces() if body is not None else None
        try:
            with remote_errors(address, limits, connection):
                response = connection.exchange(
                    address, limits, request.method, partial(_fields, target, request), pieces
                )
            return Reply(
                target,
                response,
                connection,
                self._kept,
                limits,
                has_body=request.method != "HEAD",
            )
        except BaseException:
            connection.disconnect()
            raise


def _fields(target: RequestTarget, request: Request) -> dict[str, str]:
    fields = {
        "Host": target.address.authority,
        "User-Agent": f"blobstore/{__version__}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }
    if target.authorization is not None:
        fields["Authorization"] = target.authorization
    if request.body is not None:
        fields["Content-Length"] = str(request.body.size)
    return fields | dict(request.fields)
