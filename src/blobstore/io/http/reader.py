"""Remote: files on web servers, one or many at once.

HttpReader: a safetensors file on a web server, as a RangeReader. Opening it brings its header.

Opening asks for the first 64 KiB, which is all of most headers, and where the header is longer once
more for exactly the rest. What was brought is kept, so `header_of` makes no request of its own. No
more than header + 128 KiB is taken for it, heads of replies, redirects and retries included,
whatever the server answers.

A server may answer a request for a range with the whole file (RFC 9110 section 14.2). Then the
reply is read as far as the header goes and the connection is closed. The size that such a reply
gives is a claim about bytes that were not read, so it counts only when all of them came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    UnsupportedSourceError,
)
from blobstore.io.budget import MAX_HEADER, Allowance, Budget, Patience
from blobstore.io.http.addresses import is_public
from blobstore.io.http.client import HttpClient
from blobstore.io.http.replies import Reply, Version, changed, check_part

FIRST_READ = 64 * 2**10
_OVERHEAD = 64 * 2**10
_PREFIX = 8
_SHORT_REPLIES = 8
_WHOLE, _PART, _NOT_SATISFIABLE = 200, 206, 416
_KNOWN = (_WHOLE, _PART, _NOT_SATISFIABLE)
_EXPIRED = frozenset({400, 401, 403, 410})
_EMPTY = re.compile(r"bytes \*/0", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the opening of a file brought: its first bytes, its version, and whether its server sends ranges."""

    head: bytes
    version: Version
    has_ranges: bool


class _OtherFileError(Exception):
    """A whole file came where a part of a known version was asked for: it is another file now (RFC 9110 section 13.1.5)."""


class HttpReader:
    """A file on a web server, open. ``size`` is None where the server does not say it.

    Safe to share between threads.

    ``name`` is the address without its query. A read beyond what opening brought is one request, or
    a few where the server answers with less than was asked for.
    """

    def __init__(
        self,
        client: HttpClient,
        url: str,
        *,
        first_read: int = FIRST_READ,
        allowance: Allowance | None = None,
    ) -> None:
        """Open the file at ``url``, and take its header.

        Raises: UsageError when ``url`` is not a web address; NotFoundError; RemoteError as
        `HttpClient.get` does, and for a reply that breaks rule R1; CorruptDataError when the file
        changes twice meanwhile, ShortReadError when its server does not say its size and it ends
        inside its header.
        """
        self._client = client
        self._start = self._place = client.start(url)
        self.name = str(self._start.address)
        allowance = allowance or client.allowance(0)
        allowance.extend(first_read + _OVERHEAD)
        try:
            self._opened = self._open(first_read, allowance)
        except _OtherFileError:
            try:
                self._opened = self._open(first_read, allowance)
            except _OtherFileError:
                raise changed(self.name) from None
        self.size = self._opened.version.size

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset``: a copy of what is there, and the rest in one request.

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

    def _open(self, first_read: int, allowance: Allowance) -> _Opened:
        fields = (("Range", f"bytes=0-{first_read - 1}"),)
        with self._client.get(self._start, allowance, accept=_KNOWN, fields=fields) as (
            reply,
            self._place,
        ):
            if reply.status == _WHOLE:
                return _open_whole(reply, first_read, allowance)
            if reply.status == _NOT_SATISFIABLE:
                if _EMPTY.fullmatch(reply.field("content-range") or "") is None:
                    raise reply.refuse(
                        "answers that it has no first byte, and not that it is empty"
                    )
                return _Opened(b"", Version.of(reply, 0), has_ranges=True)
            end, size = check_part(reply, 0, first_read)
            version = Version.of(reply, size)
            head, _ = _body(reply, end)
        return self._complete(_Opened(head, version, has_ranges=True), allowance)

    def _complete(self, opened: _Opened, allowance: Allowance) -> _Opened:
        """Take what the first reply left out of the header, unless no file could have such a one."""
        head, version = opened.head, opened.version
        while (wanted := header_end(head)) is not None and len(head) < wanted <= (
            version.size or wanted
        ):
            allowance.extend(wanted + 2 * _OVERHEAD)
            head += self._take(opened, len(head), wanted, allowance)
        return _Opened(head, version, has_ranges=True)

    def _fetch(self, begin: int, end: int) -> bytes:
        if not self._opened.has_ranges:
            what = f"{self.name}: its server sends whole files only, so no part of its data can be read"
            raise UnsupportedSourceError(what, path=self.name, hint="Download the file first.")
        allowance = self._client.allowance(end - begin + _OVERHEAD)
        try:
            return self._take(self._opened, begin, end, allowance)
        except _OtherFileError:
            raise changed(self.name) from None
        except (RemoteError, NotFoundError) as error:
            if self._place == self._start or not _is_expiry(error):
                raise
        # What a server redirects to is often a signed address with an end; the original gives a new
        # one.
        self._place = self._start
        return self._fetch(begin, end)

    def _take(self, opened: _Opened, begin: int, end: int, allowance: Allowance) -> bytes:
        """Return the bytes ``[begin, end)`` of the opened version, in as many replies as it takes, but 8 at most."""
        got = b""
        for attempt in range(_SHORT_REPLIES):
            part, failure = self._take_part(opened, begin + len(got), end, allowance)
            got += part
            if begin + len(got) == end:
                return got
            if failure is not None and not part:
                self._client.pause(attempt, allowance, failure)
        what = f"{self.name}: {_SHORT_REPLIES} replies did not bring the bytes {begin}-{end - 1} (rule R1)"
        raise RemoteError(what, rule="R1", path=self.name)

    def _take_part(
        self, opened: _Opened, begin: int, end: int, allowance: Allowance
    ) -> tuple[bytes, RemoteError | None]:
        fields = (("Range", f"bytes={begin}-{end - 1}"), *opened.version.condition)
        with self._client.get(self._place, allowance, accept=_KNOWN, fields=fields) as (
            reply,
            self._place,
        ):
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


def header_end(head: bytes | bytearray) -> int | None:
    """Return where the header of a safetensors file ends, whose first bytes are ``head``: 8 + N (rule F1).

    8 while there are too few bytes to know; None where N is beyond rule F2's limit, so that there
    is nothing to wait for.
    """
    if len(head) < _PREFIX:
        return _PREFIX
    length = int.from_bytes(head[:_PREFIX], "little")
    return _PREFIX + length if length <= MAX_HEADER else None


def _open_whole(reply: Reply, first_read: int, allowance: Allowance) -> _Opened:
    """Read a whole file's reply as far as its header goes, or to its end where the file is small."""
    reply.hold_back()
    head = bytearray()
    small = reply.length is not None and reply.length <= first_read
    for chunk in reply.chunks():
        head += chunk
        wanted = header_end(head)
        if not small and (wanted is None or wanted <= len(head)):
            return _Opened(bytes(head), Version.of(reply, None), has_ranges=False)
        allowance.extend((wanted or 0) + 2 * _OVERHEAD)
    return _Opened(bytes(head), Version.of(reply, len(head)), has_ranges=False)


def _body(reply: Reply, length: int) -> tuple[bytes, RemoteError | None]:
    """Return the body of a 206 of ``length`` bytes.

    Where the connection broke what came before, and why it broke.

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


_T = TypeVar("_T")

_HEAD = 64 * 2**10
_OK = 200


class Remote:
    """Reads files of web servers over kept-alive connections.

    A context manager; safe to share between threads.

    ``token`` is sent to the origin of the first address that is asked for (of `hub_folder`: its
    endpoint), and to no other. ``connections`` is how many requests are made at once,
    ``first_read`` how many bytes opening a file asks for, ``patience`` how long servers are waited
    for, ``ca_file`` certificates to trust beside the system's; ``is_public`` says which IP
    addresses are public, for rule R2. What may be asked, and how: `blobstore.io.http`.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        connections: int = 16,
        first_read: int = FIRST_READ,
        patience: Patience | None = None,
        ca_file: str | None = None,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        """Raises: UsageError when ``token`` is invalid; StorageError or NotFoundError when ``ca_file`` can't be read."""
        self.client = HttpClient(
            token=token,
            connections=connections,
            patience=patience,
            ca_file=ca_file,
            is_public=is_public,
        )
        self._first_read = first_read

    def open(self, url: str, budget: Budget | None = None) -> HttpReader:
        """Return a reader of the file at ``url``, with its header read, within ``budget``.

        Raises: as `HttpReader`.
        """
        allowance = self.client.allowance(0, budget)
        return HttpReader(self.client, url, first_read=self._first_read, allowance=allowance)

    def open_all(self, urls: Sequence[str]) -> list[HttpReader]:
        """Return readers of all ``urls``, in their order, opened as in `reading`.

        Raises: as `reading`.
        """
        with self.reading(urls, lambda reader: reader) as readers:
            return list(readers)

    @contextmanager
    def reading(
        self, urls: Sequence[str], read: Callable[[HttpReader], _T], budget: Budget | None = None
    ) -> Iterator[Iterator[_T]]:
        """Give what ``read`` makes of a reader of each of ``urls``, in their order; ``connections`` are read at once.

        The first file that fails, in whatever order, ends the others where they wait, and so does
        leaving the block. ``budget``: what they may take in all.

        Raises: UsageError when one of ``urls`` is not a web address, before any request; as
        `HttpReader` and ``read``.
        """
        for url in urls:
            self.client.start(url)  # checks it; the first one's origin gets the token
        allowances = [self.client.allowance(0, budget) for _ in urls]
        failures: list[BlobStoreError] = []

        def cancel() -> None:
            for allowance in allowances:
                allowance.cancel()

        def read_one(url: str, allowance: Allowance) -> _T:
            try:
                return read(
                    HttpReader(self.client, url, first_read=self._first_read, allowance=allowance)
                )
            except BlobStoreError as error:
                failures.append(error)
                cancel()
                raise
            finally:
                allowance.finish()

        workers = max(1, min(self.client.connections, len(urls)))
        with ThreadPoolExecutor(workers, thread_name_prefix="blobstore-remote") as pool:
            try:
                yield pool.map(read_one, urls, allowances)
            except BlobStoreError as error:
                if any(error is failure for failure in failures):  # else it is the caller's own
                    raise failures[0] from None
                raise
            finally:  # an interrupt does not wait for servers either
                cancel()
                pool.shutdown(wait=False, cancel_futures=True)

    def read_document(self, url: str, limit: int, budget: Budget | None = None) -> bytes:
        """Return all of the small file at ``url``, within ``budget``.

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1
        nothing is asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError,
        RemoteError: as `HttpClient.get`.
        """
        allowance = self.client.allowance(limit + 1 + _HEAD, budget)
        got = bytearray()
        with self.client.get(self.client.start(url), allowance, accept=(_OK,)) as (reply, _):
            if (reply.length or 0) > limit:
                raise _too_long(str(reply.address), limit)
            for chunk in reply.chunks():
                got += chunk
                if len(got) > limit:
                    raise _too_long(str(reply.address), limit)
        return bytes(got)

    def close(self) -> None:
        """Close all connections; readers can't read on."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _too_long(name: str, limit: int) -> LimitExceededError:
    return LimitExceededError(f"limit exceeded: {name} has more than {limit:,} bytes", path=name)
