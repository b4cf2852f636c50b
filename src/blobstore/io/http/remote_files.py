"""Files on web servers, read in ranges, several at once, and small documents.

Opening a file asks for its first 64 KiB. Where the caller says that its beginning is longer
(`Wanted`), more requests bring exactly the rest. These bytes are kept, so that a parser makes no
request of its own. At most 128 KiB more than the wanted bytes are taken, heads of replies,
redirects and retries included, whatever the server answers.

Every later reply has to be of the version that the first one gave: a range is asked for with its
ETag (``If-Range``), and size, ETag and Last-Modified of each reply are compared. A body that breaks
goes on where it broke. Redirects often lead to signed addresses that expire: the address that they
led to is used until it does, then the original one gives another.

A server may answer a request for a range with the whole file (RFC 9110 section 14.2). Then the
reply is read as far as is wanted and the connection is closed. The size that such a reply gives
is a claim about bytes that were not read, so it counts only when all of them came.

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
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from blobstore.errors import (
    CorruptDataError,
    RemoteError,
    ShortReadError,
    UnsupportedSourceError,
)
from blobstore.io.budget import Budget, Cancellation, RequestLimits
from blobstore.io.http.client import HttpClient, Reply, linked_of
from blobstore.io.http.web_addresses import UNLINKED, Linked, RequestTarget
from blobstore.io.workers import pooled

_T = TypeVar("_T")
FIRST_READ = 64 * 2**10
_OVERHEAD = 64 * 2**10
_PROGRESS = 64 * 2**10
"""Bytes after which an attempt counts as a new one."""
_OK, _PART, _NOT_SATISFIABLE = 200, 206, 416
_KNOWN = (_OK, _PART, _NOT_SATISFIABLE)
_EXPIRED = (400, 401, 403, 404, 410)
_EMPTY = re.compile(r"bytes \*/0", re.ASCII | re.IGNORECASE)
_PATIENCE = {"attempts": 8, "longest_wait_s": 330, "deadline_s": 400}
"""For weights. The Hub's windows have 300 seconds."""

Wanted = Callable[[bytes | bytearray], int | None]
"""Gives how many first bytes of a file are wanted, from those that are there; None: no more."""


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


class RemoteFile:
    """A version of a file on a web server. Safe to share between threads.

    ``start`` is the file's own address, ``target`` the one that redirects from it led to last.
    """

    def __init__(
        self, client: HttpClient, start: RequestTarget, target: RequestTarget, version: Version
    ) -> None:
        self._client = client
        self.name = str(start.address)
        self._start = start
        self._target = target
        self.version = version

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
        need. Raises: CorruptDataError for another version of the file; NotFoundError; RemoteError;
        ShortReadError, for a file of unknown size.
        """
        patient = replace(self._client.retry_policy, **_PATIENCE)
        done = attempt = 0
        while done < len(buffer):
            before, left = done, buffer[done:]
            own = limits or RequestLimits(patient, len(left) + _OVERHEAD, cancellation=cancellation)
            failure = None
            try:
                for count in self._part(begin + done, left, own):
                    done += count
            except RemoteError as error:
                if not error.temporary:
                    raise
                failure = error
            attempt = 0 if done - before >= _PROGRESS else attempt + 1
            if attempt and done < len(buffer):
                asked = f"{begin}-{begin + len(buffer) - 1}"
                self._client.pause(attempt - 1, own, failure or self._lacks(attempt, asked))

    def _lacks(self, replies: int, asked: str) -> RemoteError:
        what = f"{self.name}: {replies} replies did not bring the bytes {asked} (rule R1)"
        return RemoteError(what, rule="R1", path=self.name)

    def _part(self, begin: int, buffer: memoryview, limits: RequestLimits) -> Iterator[int]:
        """Fill the beginning of ``buffer`` with what one reply brings; yield as `Reply.fill`.

        If the address that redirects led to has expired, the file's own gives another.
        """
        end = begin + len(buffer)
        fields = (("Range", f"bytes={begin}-{end - 1}"), *self.version.condition)
        for target in dict.fromkeys((self._target, self._start)):
            accept = _KNOWN if target == self._start else _KNOWN + _EXPIRED
            with self._client.get(target, limits, accept=accept, fields=fields, retries=False) as (
                reply,
                at,
            ):
                if reply.status in _KNOWN:
                    nbytes = self._checked(reply, at, begin, end)
                    self._target = at
                    yield from reply.fill(buffer[:nbytes])
                    return

    def _checked(self, reply: Reply, at: RequestTarget, begin: int, end: int) -> int:
        """Return how many bytes of the range a reply brings. Raises: as `fill`."""
        size = self.version.size
        if reply.status == _NOT_SATISFIABLE and size is None:
            raise _short(self.name, end)
        if reply.status == _PART:
            stop, size = check_part(reply, begin, end)
        elif reply.status == _OK and begin == 0 and reply.length == size == end:
            stop = end
        else:
            raise changed(self.name)
        self.version.check_same(Version.of(reply, at, size), self.name)
        return stop - begin


class HttpReader:
    """A file on a web server, open. ``size`` is None where the server does not say it.

    Safe to share between threads.

    ``name`` is the address without its query, ``version`` the file's size, ETag and Last-Modified.
    ``file``: what remains of it without the bytes that opening brought.
    ``has_ranges``: all of the file can be read, because the server sends parts of it, or sent all.
    A read beyond what opening brought is one request, or a few where the server answers with less
    than was asked for.
    """

    def __init__(
        self,
        client: HttpClient,
        url: str,
        *,
        first_read: int = FIRST_READ,
        wanted: Wanted | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        """Open the file at ``url``, and take its first bytes, as many as are ``wanted``.

        Raises: UsageError when ``url`` is not a web address; NotFoundError; RemoteError as
        `HttpClient.get` does, and for a reply that breaks rule R1; CorruptDataError when the file
        changes meanwhile, ShortReadError when its server does not say its size and it ends before
        what is wanted.
        """
        self._client = client
        self._wanted: Wanted = wanted or (lambda _: None)  # no more than the first read brings
        start = client.start(url)
        self.name = str(start.address)
        limits = limits or client.limits(0)
        limits.extend(first_read + _OVERHEAD)
        self._head = bytearray()
        fields = (("Range", f"bytes=0-{first_read - 1}"),)
        with client.get(start, limits, accept=_KNOWN, fields=fields) as (reply, at):
            self.size = self._open(reply, first_read, limits)
            self.file = RemoteFile(client, start, at, Version.of(reply, at, self.size))
            self.has_ranges = reply.status != _OK or len(self._head) == self.size
        if self.has_ranges:
            self._complete(limits)

    @property
    def version(self) -> Version:
        """The version that every later reply must have."""
        return self.file.version

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``, by a request for those not kept.

        Raises: ShortReadError when the file has fewer; CorruptDataError when it is another file
        now; UnsupportedSourceError when the server sends whole files only; RemoteError.
        """
        end = offset + length
        if self.size is not None and length and end > self.size:
            raise _short(self.name, end, self.size)
        data = self._head[offset:end]
        if len(data) < length:
            if not self.has_ranges:
                raise UnsupportedSourceError(
                    f"{self.name}: its server sends whole files only, so its data can't be read in"
                    " parts",
                    path=self.name,
                    hint="Download the file first.",
                )
            begin = offset + len(data)
            data += self._fetched(begin, end, self._client.limits(end - begin + _OVERHEAD))
        return bytes(data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``. Raises: as `read`."""
        buffer[:] = self.read(offset, len(buffer))

    def _fetched(self, begin: int, end: int, limits: RequestLimits) -> bytearray:
        data = bytearray(end - begin)
        self.file.fill(begin, memoryview(data), limits)
        return data

    def _open(self, reply: Reply, first_read: int, limits: RequestLimits) -> int | None:
        """Read the first bytes of the file from the first reply, and return its size."""
        if reply.status == _OK:
            return self._open_whole(reply, first_read, limits)
        if reply.status == _NOT_SATISFIABLE:
            if _EMPTY.fullmatch(reply.field("content-range") or "") is None:
                raise reply.refuse("answers that it has no first byte, and not that it is empty")
            return 0
        end, size = check_part(reply, 0, first_read)
        try:
            for chunk in reply.body(end):
                self._head += chunk
        except RemoteError as error:
            if not error.temporary:
                raise
        return size

    def _open_whole(self, reply: Reply, first_read: int, limits: RequestLimits) -> int | None:
        """Read a whole file's reply as far as is wanted, or to its end where the file is small."""
        is_small = reply.length is not None and reply.length <= first_read
        for chunk in reply.chunks():
            self._head += chunk
            wanted = self._wanted(self._head)
            if not is_small and (wanted is None or wanted <= len(self._head)):
                return None
            limits.extend((wanted or 0) + 2 * _OVERHEAD)
        return len(self._head)

    def _complete(self, limits: RequestLimits) -> None:
        """Take the wanted bytes that the first reply lacks, if the file can have so many."""
        while True:
            wanted, count = self._wanted(self._head), len(self._head)
            if wanted is None or wanted <= count:
                return
            if self.size is not None and wanted > self.size:
                return  # its parser says what is wrong
            limits.extend(wanted + 2 * _OVERHEAD)
            self._head += self._fetched(count, wanted, limits)


class Remote(HttpClient):
    """Reads files of web servers over kept-alive connections, several at once.

    A context manager; safe to share between threads.
    """

    first_read = FIRST_READ
    """Bytes that opening a file asks for."""

    def open(
        self,
        url: str,
        budget: Budget | None = None,
        *,
        first_read: int | None = None,
        wanted: Wanted | None = None,
        limits: RequestLimits | None = None,
    ) -> HttpReader:
        """Return a reader of the file at ``url``, with what is ``wanted`` read, within ``budget``.

        Raises: as `HttpReader`.
        """
        limits = limits or self.limits(0, budget)
        first_read = first_read or self.first_read
        return HttpReader(self, url, first_read=first_read, wanted=wanted, limits=limits)

    def at_once(
        self,
        urls: Sequence[str],
        work: Callable[[str, RequestLimits], _T],
        budget: Budget | None = None,
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``work`` makes of each of ``urls`` within its limits. See `pooled`.

        ``connections`` are worked on at once. ``budget``: what they may take in all. Raises:
        UsageError when one of ``urls`` is not a web address, before any request; as ``work``.
        """
        for url in urls:
            self.start(url)  # checks it; the first one's origin gets the token
        cancellation = Cancellation()

        def work_on(url: str) -> _T:
            return work(url, self.limits(0, budget, cancellation=cancellation))

        return pooled(urls, work_on, self.connections, cancellation.cancel, name="remote")

    def read_page(
        self,
        url: str,
        limit: int,
        budget: Budget | None = None,
        *,
        limits: RequestLimits | None = None,
    ) -> tuple[bytes, str | None]:
        """Return all of a small file, and the address of the next page (RFC 8288: ``rel="next"``).

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1
        nothing is asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError,
        RemoteError: as `HttpClient.get`.
        """
        own = limits or self.limits(0, budget)
        own.extend(limit + 1 + _OVERHEAD)

        def read() -> tuple[bytes, str | None]:
            with self.get(self.start(url), own, accept=(_OK,), retries=False) as (reply, _):
                return reply.whole(limit), reply.next_page()

        return self.retrying(read, own)


def _short(name: str, end: int, size: int | None = None) -> ShortReadError:
    """Return the error of a file that ends before byte ``end``."""
    has = "" if size is None else f": it has {size:,}"
    return ShortReadError(f"{name} ends before byte {end:,}{has}", path=name)
