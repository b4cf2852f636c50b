"""A file on a web server, read in ranges. remote_files.py reads many at once.

Opening a file asks for its first 64 KiB. Where the caller says that its beginning is longer
(`Wanted`), one more request brings exactly the rest. These bytes are kept, so that a parser makes
no request of its own. At most 128 KiB more than the wanted bytes are taken, heads of replies,
redirects and retries included, whatever the server answers.

A server may answer a request for a range with the whole file (RFC 9110 section 14.2). Then the
reply is read as far as is wanted and the connection is closed. The size that such a reply gives
is a claim about bytes that were not read, so it counts only when all of them came.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from blobstore.errors import (
    BlobStoreError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    UnsupportedSourceError,
)
from blobstore.io.budget import RequestLimits
from blobstore.io.http.client import HttpClient
from blobstore.io.http.redirects import Linked, RequestTarget
from blobstore.io.http.replies import Reply, Version, changed, check_part

FIRST_READ = 64 * 2**10
_OVERHEAD = 64 * 2**10
_SHORT_REPLIES = 8
_WHOLE, _PART, _NOT_SATISFIABLE = 200, 206, 416
_KNOWN = (_WHOLE, _PART, _NOT_SATISFIABLE)
_EXPIRED = frozenset({400, 401, 403, 410})
_EMPTY = re.compile(r"bytes \*/0", re.ASCII | re.IGNORECASE)


Wanted = Callable[[bytes | bytearray], int | None]
"""Gives how many first bytes of a file are wanted, from those that are there; None: no more."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """An opened file: its first bytes, its version, and whether its server sends ranges."""

    head: bytes
    version: Version
    has_ranges: bool


class _OtherFileError(Exception):
    """A whole file answers for a part, so it is another version now (RFC 9110 section 13.1.5)."""


class HttpReader:
    """A file on a web server, open. ``size`` is None where the server does not say it.

    Safe to share between threads.

    ``name`` is the address without its query, ``version`` the file's size, ETag and Last-Modified.
    ``linked``: what the server, or a redirect to it, says of the file besides.
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
        changes twice meanwhile, ShortReadError when its server does not say its size and it ends
        before what is wanted.
        """
        self._client = client
        self._wanted: Wanted = wanted or (lambda _: None)  # no more than the first read brings
        self._start = self._target = client.start(url)
        self.name = str(self._start.address)
        self._linked: Linked | None = None
        limits = limits or client.limits(0)
        limits.extend(first_read + _OVERHEAD)
        try:
            self._opened = self._open(first_read, limits)
        except _OtherFileError:
            try:
                self._opened = self._open(first_read, limits)
            except _OtherFileError:
                raise changed(self.name) from None
        self.version = self._opened.version
        self.linked = self._target.linked or self._linked
        self.size = self.version.size
        self.has_ranges = self._opened.has_ranges or len(self._opened.head) == self.size

    @property
    def target(self) -> RequestTarget:
        """Where redirects from its address led last."""
        return self._target

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``, by a request for those not kept.

        Raises: ShortReadError when the file has fewer; CorruptDataError when it is another file
        now; UnsupportedSourceError when the server sends whole files only; RemoteError.
        """
        end = offset + length
        head = self._opened.head
        if length == 0 or end <= len(head):
            return head[offset:end]
        if self.size is not None and end > self.size:
            raise self._short(end, self.size)
        begin = max(offset, len(head))
        return head[offset:] + self._fetch(begin, end)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``. Raises: as `read`."""
        buffer[:] = self.read(offset, len(buffer))

    def _open(self, first_read: int, limits: RequestLimits) -> _Opened:
        fields = (("Range", f"bytes=0-{first_read - 1}"),)
        with self._client.get(self._start, limits, accept=_KNOWN, fields=fields) as (
            reply,
            self._target,
        ):
            self._linked = Linked.of(reply)
            if reply.status == _WHOLE:
                return self._open_whole(reply, first_read, limits)
            if reply.status == _NOT_SATISFIABLE:
                if _EMPTY.fullmatch(reply.field("content-range") or "") is None:
                    raise reply.refuse(
                        "answers that it has no first byte, and not that it is empty"
                    )
                return _Opened(b"", Version.of(reply, 0), has_ranges=True)
            end, size = check_part(reply, 0, first_read)
            version = Version.of(reply, size)
            head, _ = _body(reply, end)
        return self._complete(_Opened(head, version, has_ranges=True), limits)

    def _complete(self, opened: _Opened, limits: RequestLimits) -> _Opened:
        """Take the wanted bytes that the first reply lacks, if the file can have so many."""
        head, version = opened.head, opened.version
        while (wanted := self._wanted(head)) is not None and len(head) < wanted <= (
            version.size or wanted
        ):
            limits.extend(wanted + 2 * _OVERHEAD)
            head += self._take(opened, len(head), wanted, limits)
        return _Opened(head, version, has_ranges=True)

    def _open_whole(self, reply: Reply, first_read: int, limits: RequestLimits) -> _Opened:
        """Read a whole file's reply as far as is wanted, or to its end where the file is small."""
        reply.hold_back()
        head = bytearray()
        small = reply.length is not None and reply.length <= first_read
        for chunk in reply.chunks():
            head += chunk
            wanted = self._wanted(head)
            if not small and (wanted is None or wanted <= len(head)):
                return _Opened(bytes(head), Version.of(reply, None), has_ranges=False)
            limits.extend((wanted or 0) + 2 * _OVERHEAD)
        return _Opened(bytes(head), Version.of(reply, len(head)), has_ranges=False)

    def _fetch(self, begin: int, end: int) -> bytes:
        if not self._opened.has_ranges:
            raise UnsupportedSourceError(
                f"{self.name}: its server sends whole files only, so its data can't be read in"
                " parts",
                path=self.name,
                hint="Download the file first.",
            )
        limits = self._client.limits(end - begin + _OVERHEAD)
        try:
            return self._take(self._opened, begin, end, limits)
        except _OtherFileError:
            raise changed(self.name) from None

    def _take(self, opened: _Opened, begin: int, end: int, limits: RequestLimits) -> bytes:
        """Return the bytes ``[begin, end)`` of the opened version, from at most 8 replies."""
        got = b""
        for attempt in range(_SHORT_REPLIES):
            part, failure = self._take_part(opened, begin + len(got), end, limits)
            got += part
            if begin + len(got) == end:
                return got
            if failure is not None and not part:
                self._client.pause(attempt, limits, failure)
        raise RemoteError(
            f"{self.name}: {_SHORT_REPLIES} replies did not bring the bytes {begin}-{end - 1}"
            " (rule R1)",
            rule="R1",
            path=self.name,
        )

    def _take_part(
        self, opened: _Opened, begin: int, end: int, limits: RequestLimits
    ) -> tuple[bytes, RemoteError | None]:
        at = self._target  # other threads change it
        try:
            return self._take_from(at, opened, begin, end, limits)
        except (RemoteError, NotFoundError) as error:
            if at == self._start or not _is_expiry(error):
                raise
        # Redirects often lead to signed addresses that expire; the original address gives a new
        # one.
        return self._take_from(self._start, opened, begin, end, limits)

    def _take_from(
        self, at: RequestTarget, opened: _Opened, begin: int, end: int, limits: RequestLimits
    ) -> tuple[bytes, RemoteError | None]:
        fields = (("Range", f"bytes={begin}-{end - 1}"), *opened.version.condition)
        with self._client.get(at, limits, accept=_KNOWN, fields=fields) as (reply, self._target):
            if reply.status == _NOT_SATISFIABLE:
                raise self._short(end, None) if opened.version.size is None else changed(self.name)
            if reply.status == _WHOLE:
                raise _OtherFileError
            stop, size = check_part(reply, begin, end)
            opened.version.check_same(Version.of(reply, size), self.name)
            return _body(reply, stop - begin)

    def _short(self, end: int, size: int | None) -> ShortReadError:
        has = "" if size is None else f": it has {size:,}"
        return ShortReadError(f"{self.name} ends before byte {end:,}{has}", path=self.name)


def _body(reply: Reply, length: int) -> tuple[bytes, RemoteError | None]:
    """Return the body of a 206 of ``length`` bytes; if the connection broke, a part and the error.

    Raises: RemoteError (rule R1) when the body ends with another number of bytes.
    """
    got = bytearray()
    chunks = reply.chunks()
    while len(got) <= length:
        try:
            chunk = next(chunks, None)
        except RemoteError as error:
            return bytes(got), error
        if chunk is None:
            break
        got += chunk
    if len(got) != length:
        raise reply.refuse(
            f"sends another number of bytes than the {length:,} of its Content-Range"
        )
    return bytes(got), None


def _is_expiry(error: BlobStoreError) -> bool:
    return isinstance(error, NotFoundError) or (
        isinstance(error, RemoteError) and error.status in _EXPIRED
    )
