"""Messages: requests without their address, and replies. Rule R1 is about replies.

Which bytes of a file a reply brings, and of which version of it. Sources: RFC 9110 sections 14.4
(Content-Range), 15.3.7 (206), 8.8 (validators), 13.1.5 (If-Range).

- a 206 has exactly one ``Content-Range: bytes first-last/total`` of ASCII digits; ``total`` may be
  ``*``, unknown
- ``first`` is the asked one, ``last`` not beyond the asked one and not before ``first``, ``total``
  beyond ``last``
- its body has ``last - first + 1`` bytes, and so has its Content-Length, where it has one
- it is not ``multipart/byteranges``, which answers several ranges
- total, ETag and Last-Modified, where they are given, are the same on every reply

Every reply, whatever it brings (RFC 9110, 9112):

- its head has at most 100 fields in 100 KiB, with interim replies, and no line is folded
- it has at most one ``Content-Length``, of ASCII digits, and no transfer coding but ``chunked``
- it has no ``Content-Length`` beside a ``Transfer-Encoding``: two lengths are how replies are
  smuggled (9112 section 6.3)
- it has no content coding: ``identity`` was asked for, ranges are of the coded form, and a few
  kilobytes can expand to gigabytes (9110 section 8.4)
- a field that is to be there once is there once
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse, IncompleteRead
from itertools import chain
from typing import Self

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
)
from blobstore.io.http.connections import Connection
from blobstore.io.http.web_addresses import UNLINKED, Linked, RequestTarget, WebAddress
from blobstore.names import Digest

Fields = Sequence[tuple[str, str]]

_SMALL_BODY = 4096
_PIECE = 2**20
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_TEMPORARY = frozenset({429, 500, 502, 503, 504})
_WITHOUT_BODY = frozenset({204, 304})
_NOT_FOUND = 404
_RATE_LIMIT = re.compile(r'"[^"]{0,64}"((?:\s*;\s*[a-z]+\s*=\s*[0-9]{1,9})+)', re.ASCII)
_PARAMETER = re.compile(r"([a-z]+)\s*=\s*([0-9]{1,9})", re.ASCII)
_NEXT = re.compile(r'<([^<>]{1,4096})>;[^,]*rel="?next"?', re.ASCII | re.IGNORECASE)
_HINTS = {
    401: "Give a token, if it is private (for the Hugging Face Hub: HF_TOKEN); the Hub answers so"
    " for what does not exist, too.",
    403: "The token, if there is one, does not allow it; access to a gated repository has to be"
    " asked for on its page first.",
    404: "Check the address; of a repository also its revision.",
    416: "The file is shorter than it was said to be.",
    429: "Too many requests were made; with a token servers often allow more.",
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
        """Return a body of bytes in memory."""
        return cls(len(data), lambda: (data,), has_credentials)


@dataclass(frozen=True, slots=True)
class Message:
    """Method, fields and body of a request."""

    method: str
    fields: Fields = ()
    body: Body | None = None

    @property
    def has_credentials(self) -> bool:
        """Whether the body contains credentials."""
        return self.body is not None and self.body.has_credentials


class Reply:
    """One reply.

    Its body is read once, by the thread that made the request, and only as far as it is asked for.
    ``length``: bytes of the body as the head has it; None where it does not say.
    ``from_public``: the server's address, the one that was connected to, is public.
    """

    def __init__(
        self,
        address: WebAddress,
        response: HTTPResponse,
        connection: Connection,
        working: Callable[[], AbstractContextManager[None]],
        give_back: Callable[..., None],
        *,
        has_body: bool = True,
        authorization: str | None = None,
    ) -> None:
        """``has_body``: False for a reply to HEAD, whose length is that of another reply.

        ``authorization``: the request's field. Raises: RemoteError (rule R1).
        """
        self.address = address
        self.authorization = authorization
        self.status = response.status
        self.from_public = connection.public
        self._response = response
        self._working = working
        self._give_back = give_back
        self._is_closed = False
        length, coding = self.field("content-length"), self.field("transfer-encoding")
        if response.headers.defects:
            raise self.refuse("answers with an invalid head")
        if length is not None and coding is not None:
            raise self.refuse("gives its answer two lengths: Content-Length and Transfer-Encoding")
        if length is not None and _LENGTH.fullmatch(length) is None:
            raise self.refuse(f"answers with the Content-Length {length[:40]!r}")
        if coding is not None and not response.chunked:
            raise self.refuse(f"answers in the transfer coding {coding[:40]!r}")
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
            raise self.refuse(f"answers with {len(values)} fields {name}")
        return values[0] if values else None

    def values(self, name: str) -> list[str]:
        """Return the values of a field that may be there several times, in their order."""
        return [value.strip(" \t") for value in self._response.headers.get_all(name, [])]

    def next_page(self) -> str | None:
        """Return the reference to the next page of a list (RFC 8288: ``rel="next"``), or None."""
        following = _NEXT.search(self.field("link") or "")
        return following[1] if following is not None else None

    def check_uncoded(self) -> None:
        """Raise RemoteError (rule R1), and close, when the body is coded in any way."""
        coding = ", ".join(self.values("content-encoding"))
        if coding not in ("", "identity"):
            self.close()
            raise self.refuse(f"answers in the coding {coding[:40]!r}, and identity was asked for")

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in pieces as they come.

        Raises: RemoteError when the connection breaks before its end.
        """
        while self._left != 0:
            with self._reading():
                chunk = self._response.read1(_PIECE)
                self._count(len(chunk))
            if not chunk:
                return
            yield chunk

    def fill(self, buffer: memoryview) -> Iterator[int]:
        """Fill ``buffer`` with a body of exactly its size; yield how many bytes each step adds.

        Raises: as `chunks`; RemoteError (rule R1).
        """
        filled = 0
        while filled < len(buffer) and self._left != 0:
            with self._reading():
                count = self._response.readinto(buffer[filled : filled + _PIECE])
                self._count(count)
            if count == 0:
                break
            filled += count
            yield count
        if filled < len(buffer) or any(self.chunks()):
            raise self.refuse(f"sends another number of bytes than {len(buffer):,}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read within the block. After an error the connection is not kept."""
        try:
            with self._working():
                yield
        except BaseException:
            self._may_last = False
            raise

    def _count(self, nbytes: int) -> None:
        """Count bytes of the body. Raises: IncompleteRead at an end that comes too early."""
        if self._left is not None:
            self._left -= nbytes
            if nbytes == 0:
                raise IncompleteRead(b"", self._left)

    def body(self, nbytes: int) -> Iterator[bytes]:
        """Yield a body of exactly ``nbytes``. Raises: as `chunks`; RemoteError (rule R1)."""
        left = nbytes
        for chunk in self.chunks():
            left -= len(chunk)
            if left < 0:
                break
            yield chunk
        if left:
            raise self.refuse(f"sends another number of bytes than {nbytes:,}")

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

    def close(self) -> None:
        """Give the connection back. It is used again only after exactly the body's length.

        The rest of a small body is read: so a redirect or a 404 does not cost a connection.
        """
        if self._may_last and self._left is not None and self._left <= _SMALL_BODY:
            with suppress(RemoteError, LimitExceededError):  # these bytes are not needed
                for _ in self.chunks():
                    pass
        if not self._is_closed:
            self._is_closed = True
            self._give_back(keep=self._may_last and self._left == 0)

    def refuse(self, what: str) -> RemoteError:
        """Return the error of a reply that breaks rule R1."""
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
        waits = [0.0]
        for text in self.values("retry-after"):
            if _LENGTH.fullmatch(text):
                waits.append(float(text))
                continue
            with suppress(ValueError, OverflowError):
                waits.append(parsedate_to_datetime(text).timestamp() - time.time())
        for limit in _RATE_LIMIT.finditer(", ".join(self.values("ratelimit"))):
            numbers = dict(_PARAMETER.findall(limit[1]))
            if numbers.get("r") == "0":
                waits.append(float(numbers.get("t", 0)) + 1)  # in whole seconds
        return max(waits)


_LINKED_DIGEST = re.compile(r'"?([0-9a-f]{64})"?', re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)


def linked_of(reply: Reply) -> Linked:
    """Return what a reply's head declares of the file that it redirects to."""
    etag = _LINKED_DIGEST.fullmatch(reply.field("x-linked-etag") or "")
    commit = _COMMIT.fullmatch(reply.field("x-repo-commit") or "")
    return Linked(Digest(etag[1]) if etag else None, commit[0] if commit else None)


_CONTENT_RANGE = re.compile(
    r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII | re.IGNORECASE
)
_MAX_SIZE = 2**63 - 1
_STRONG = re.compile(r'"[!#-~]*"', re.ASCII)


def check_part(reply: Reply, begin: int, end: int) -> tuple[int, int | None]:
    """Return the end of the range in a 206 that answers ``[begin, end)``, and the file's size.

    The size is None where the server does not say it.

    Raises: RemoteError (rule R1) for any other reply.
    """
    text = reply.field("content-range")
    match = _CONTENT_RANGE.fullmatch(text or "")
    if match is None:
        raise reply.refuse(f"answers 206 with the Content-Range {(text or 'none')[:60]!r}")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    right = first == begin and first <= last < end and (total is None or last < total <= _MAX_SIZE)
    if not right:
        raise reply.refuse(
            f"answers a request for bytes {begin}-{end - 1} with the Content-Range {text!r}"
        )
    if (reply.field("content-type") or "").lower().startswith("multipart/byteranges"):
        raise reply.refuse("answers one range in several parts")
    if reply.length not in (None, last + 1 - first):
        raise reply.refuse(
            f"has a Content-Length of {reply.length} beside the Content-Range {text!r}"
        )
    return last + 1, total


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a file, by its server; None for fields that the server does not send.

    ``linked``: what it, or a redirect to it, declares besides.
    """

    size: int | None
    etag: str | None = None
    modified: str | None = None
    linked: Linked = UNLINKED

    @classmethod
    def of(cls, reply: Reply, target: RequestTarget, size: int | None) -> Self:
        """Return the version in a reply's head; redirects led to ``target``."""
        linked = target.linked if any(target.linked) else linked_of(reply)
        return cls(size, reply.field("etag"), reply.field("last-modified"), linked)

    @property
    def condition(self) -> tuple[tuple[str, str], ...]:
        """An If-Range field, if the server gave a strong validator (RFC 9110 section 13.1.5)."""
        return (
            (("If-Range", self.etag),)
            if self.etag is not None and _STRONG.fullmatch(self.etag)
            else ()
        )

    def check_same(self, other: Version, name: str) -> None:
        """Raise CorruptDataError when a later reply is of another version.

        Fields that only one has do not count.
        """
        mine = (self.size, self.etag, self.modified, *self.linked)
        theirs = (other.size, other.etag, other.modified, *other.linked)
        for known, new in zip(mine, theirs, strict=True):
            if None not in (known, new) and known != new:
                raise changed(name)


def changed(name: str) -> CorruptDataError:
    """Return the error of a file that is not the same on its server any more."""
    return CorruptDataError(
        f"{name} changed while it was read",
        path=name,
        rule="R1",
        hint="Read it again from its beginning.",
    )
