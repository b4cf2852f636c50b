"""Files on web servers, read in ranges, several at once, and small documents.

Opening a file asks for its first 64 KiB, which are kept until it is closed: most headers end in
them. At most 128 KiB more than the wanted bytes are taken, heads of replies, redirects and retries
included, whatever the server answers.

Every later reply has to be of the version that the first one gave: a range is asked for with its
ETag (``If-Range``), and size, ETag and Last-Modified of each reply are compared. A body that breaks
goes on where it broke. Redirects often lead to signed addresses that expire: the address that they
led to is used until it does, then the original one gives another.

A server may answer a request for a range with the whole file (RFC 9110 section 14.2). Then the
reply is read as far as is wanted, which is good for headers. The size that such a reply gives is a
claim about bytes that were not read, so it does not count.

Rule R1, of which bytes of a file a reply brings, and of which version of it. Sources: RFC 9110
sections 14.4 (Content-Range), 15.3.7 (206), 8.8 (validators), 13.1.5 (If-Range).

- a 206 has exactly one ``Content-Range: bytes first-last/total`` of ASCII digits; ``total`` may be
  ``*``, unknown
- ``first`` is the asked one, ``last`` not beyond the asked one and not before ``first``, ``total``
  beyond ``last``
- its body has ``last - first + 1`` bytes, and so has its Content-Length, where it has one
- it is not ``multipart/byteranges``, which answers several ranges: no reply is multipart
- total, ETag and Last-Modified, where they are given, are the same on every reply
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, TypeVar

from blobstore.errors import CorruptDataError, RemoteError
from blobstore.io.budget import Budget, Cancellation, RequestLimits
from blobstore.io.http.client import Fields, HttpClient, Reply, Request
from blobstore.io.http.web_addresses import RequestTarget
from blobstore.io.ranges import UNKNOWN_SIZE, Identity, SourceReader
from blobstore.io.workers import run_in_pool

_T = TypeVar("_T")
FIRST_READ = 64 * 2**10
_OVERHEAD = 64 * 2**10
_OK, _PART, _NOT_SATISFIABLE = 200, 206, 416
_KNOWN = (_OK, _PART, _NOT_SATISFIABLE)
_EXPIRED = (400, 401, 403, 404, 410)
_EMPTY = re.compile(r"bytes \*/0", re.ASCII | re.IGNORECASE)
# For weights. The Hub's windows have 300 seconds.
_PATIENCE = {"attempts": 8, "longest_wait_s": 330, "deadline_s": 400}
_CONTENT_RANGE = re.compile(
    r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII | re.IGNORECASE
)
_STRONG = re.compile(r'"[!#-~]*"', re.ASCII)


def check_part(reply: Reply, begin: int, end: int) -> tuple[int, int]:
    """Return the end of the range in a 206 that answers ``[begin, end)``, and the file's size.

    Raises: RemoteError (rule R1) for any other reply.
    """
    text = reply.field("content-range")
    match = _CONTENT_RANGE.fullmatch(text or "")
    if match is None:
        raise reply.refuse(f"answers 206 with the Content-Range {(text or 'none')[:60]!r}")
    first, last = int(match[1]), int(match[2])
    total = UNKNOWN_SIZE if match[3] == "*" else int(match[3])
    if not (first == begin and first <= last < end and last < total <= UNKNOWN_SIZE):
        raise reply.refuse(
            f"answers a request for bytes {begin}-{end - 1} with the Content-Range {text!r}"
        )
    if reply.length not in (None, last + 1 - first):
        raise reply.refuse(f"has a Content-Length of {reply.length} and the Content-Range {text!r}")
    return last + 1, total


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a file, by its server; None for fields that the server does not send."""

    size: int
    etag: str | None = None
    modified: str | None = None

    @classmethod
    def of(cls, reply: Reply, size: int) -> Self:
        return cls(size, reply.field("etag"), reply.field("last-modified"))

    @property
    def condition(self) -> Fields:
        """An If-Range field, if the server gave a strong validator (RFC 9110 section 13.1.5)."""
        if self.etag is None or _STRONG.fullmatch(self.etag) is None:
            return ()
        return (("If-Range", self.etag),)

    def check_same(self, other: Version, name: str) -> None:
        """Raise CorruptDataError when a later reply is of another version.

        Fields that only one has do not count.
        """
        mine, theirs = (
            (None if one.size == UNKNOWN_SIZE else one.size, one.etag, one.modified)
            for one in (self, other)
        )
        if any(None not in pair and pair[0] != pair[1] for pair in zip(mine, theirs, strict=True)):
            raise changed_error(name)


def changed_error(name: str) -> CorruptDataError:
    """Return the error of a file that is not the same on its server any more."""
    return CorruptDataError(
        f"{name} changed while it was read",
        path=name,
        rule="R1",
        hint="Read it again from the start.",
    )


class RemoteFile(SourceReader):
    """A version of a file on a web server. Safe to share between threads.

    ``start`` is the file's own address, ``target`` the one that redirects from it led to last,
    ``head`` the file's first bytes, which are kept until it is closed. ``limits``: of all reads
    together; None gives each its own. ``identify`` returns its identity: the folder that the file
    is in sets it.
    """

    piece_nbytes = 4 * 2**20
    identify: Callable[[RemoteFile], Identity]

    def __init__(
        self,
        client: HttpClient,
        start: RequestTarget,
        target: RequestTarget,
        version: Version,
        head: bytes = b"",
        limits: RequestLimits | None = None,
    ) -> None:
        self._client = client
        self.name = str(start.address)
        self._start = start
        self._target = target
        self.version = version
        self.size = version.size
        self._head = bytearray(head)
        self._limits = limits
        self._whole: Iterator[bytes] | None = None
        self._opened = ExitStack()

    @cached_property
    def identity(self) -> Identity:  # type: ignore[override]  # its folder may ask its server
        return self.identify(self)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``, by a request for those not kept.

        Raises: ShortReadError when the file has fewer; as `fill`.
        """
        self._check(offset, length)
        if self._whole is not None and len(self._head) < offset + length:
            self._read_on(offset + length)
        data = bytes(self._head[offset : offset + length])
        if len(data) == length:
            return data
        rest = bytearray(length - len(data))
        limits = self._limits or self._client.limits(0)
        limits.extend(offset + length + 2 * _OVERHEAD if self._limits else len(rest) + _OVERHEAD)
        self.fill(offset + len(data), memoryview(rest), limits)
        return data + rest

    def keep(self, reply: Reply, opened: ExitStack) -> None:
        """Read the file from a reply that has all of it, and is open until the file is closed."""
        self._whole = reply.chunks()
        self._opened = opened

    def _read_on(self, end: int) -> None:
        """Read a reply with the whole file up to byte ``end``."""
        if self._limits is not None:
            self._limits.extend(end + 2 * _OVERHEAD)
        for chunk in self._whole or ():
            self._head += chunk
            if len(self._head) >= end:
                return
        raise self._short(0, end)

    def close(self) -> None:
        self._head = bytearray()
        self._opened.close()

    def fill(
        self,
        begin: int,
        buffer: memoryview,
        limits: RequestLimits | None = None,
        *,
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fill ``buffer`` with the bytes from byte ``begin`` on, in as many requests as it takes.

        ``limits``: of all of them together; None gives each its own, with the patience that weights
        need. Raises: CorruptDataError for another version of the file; NotFoundError; RemoteError.
        """
        own = limits or RequestLimits(
            replace(self._client.retry_policy, **_PATIENCE), 0, cancellation=cancellation
        )
        at, end = begin, begin + len(buffer)

        def attempt(start: int) -> Iterator[bytes]:
            if limits is None:
                own.restart(end - start + _OVERHEAD)
            return self._part(start, end, own)

        for chunk in self._client.resume_body(attempt, begin, end, own, self.name):
            buffer[at - begin : at - begin + len(chunk)] = chunk
            at += len(chunk)

    def _part(self, begin: int, end: int, limits: RequestLimits) -> Iterator[bytes]:
        """Yield what one reply has of the bytes ``[begin, end)``.

        If the address that redirects led to has expired, the file's own gives another.
        """
        fields = (("Range", f"bytes={begin}-{end - 1}"), *self.version.condition)
        for target in dict.fromkeys((self._target, self._start)):
            accept = _KNOWN if target == self._start else _KNOWN + _EXPIRED
            request = Request("GET", accept, fields, retries=False)
            with self._client.request(request, target, limits) as (reply, at):
                if reply.status in _KNOWN:
                    nbytes = self._check_range(reply, begin, end)
                    self._target = at
                    yield from reply.body(nbytes)
                    return

    def _check_range(self, reply: Reply, begin: int, end: int) -> int:
        size = self.size
        if reply.status == _PART:
            stop, size = check_part(reply, begin, end)
        elif reply.status == _OK and begin == 0 and reply.length == size == end:
            stop = end
        elif reply.status == _NOT_SATISFIABLE and size == UNKNOWN_SIZE:
            raise self._short(begin, end - begin)
        else:
            raise changed_error(self.name)
        self.version.check_same(Version.of(reply, size), self.name)
        return stop - begin


class Remote(HttpClient):
    """Reads files of web servers over kept-alive connections, several at once.

    A context manager; safe to share between threads.
    """

    def open(self, url: str, limits: RequestLimits | None = None) -> RemoteFile:
        """Return the file at ``url``, with its first 64 KiB, which count for ``limits``.

        Raises: UsageError when ``url`` is not a web address; NotFoundError; RemoteError as
        `HttpClient.request` does, and for a reply that breaks rule R1.
        """
        start = self.start(url)
        own = limits or self.limits(0)
        own.extend(FIRST_READ + _OVERHEAD)
        request = Request("GET", _KNOWN, (("Range", f"bytes=0-{FIRST_READ - 1}"),))
        with ExitStack() as opened:
            reply, at = opened.enter_context(self.request(request, start, own))
            head, size = _read_first(reply)
            is_whole = reply.status == _OK and size == UNKNOWN_SIZE
            file = RemoteFile(
                self, start, at, Version.of(reply, size), head, own if is_whole else limits
            )
            if is_whole:
                file.keep(reply, opened.pop_all())
            return file

    def at_once(
        self,
        urls: Sequence[str],
        work: Callable[[str, RequestLimits], _T],
        budget: Budget | None = None,
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``work`` makes of each of ``urls`` within its limits. See `run_in_pool`.

        ``connections`` are worked on at once. ``budget``: what they may take in all. Raises:
        UsageError when one of ``urls`` is not a web address, before any request; as ``work``.
        """
        for url in urls:
            self.start(url)  # checks it; the first one's origin gets the token

        def work_on(url: str, cancellation: Cancellation) -> _T:
            return work(url, self.limits(0, budget, cancellation=cancellation))

        return run_in_pool(urls, work_on, self.connections)

    def read_page(
        self,
        url: str,
        limit: int,
        limits: RequestLimits | None = None,
    ) -> tuple[bytes, str | None]:
        """Return all of a small file, and the address of the next page (RFC 8288: ``rel="next"``).

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1
        nothing is asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError,
        RemoteError: as `HttpClient.get`.
        """
        own = limits or self.limits(0)
        own.extend(limit + 1 + _OVERHEAD)

        def read() -> tuple[bytes, str | None]:
            request = Request("GET", (_OK,), retries=False)
            with self.request(request, self.start(url), own) as (reply, _):
                return reply.whole(limit), reply.next_page()

        return self.retry(read, own)


def _read_first(reply: Reply) -> tuple[bytes, int]:
    """Return the first bytes of a file, or fewer if the connection breaks, and the file's size."""
    if reply.status == _OK:
        if reply.length is None or reply.length > FIRST_READ:
            return b"", UNKNOWN_SIZE
        return reply.whole(FIRST_READ), reply.length
    if reply.status == _NOT_SATISFIABLE:
        if _EMPTY.fullmatch(reply.field("content-range") or "") is None:
            raise reply.refuse("answers that byte 0 does not exist, but not that the file is empty")
        return b"", 0
    end, size = check_part(reply, 0, FIRST_READ)
    head = bytearray()
    try:
        for chunk in reply.body(end):
            head += chunk
    except RemoteError as error:
        if not error.temporary:
            raise
    return bytes(head), size
