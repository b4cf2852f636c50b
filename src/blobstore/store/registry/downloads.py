"""Blobs of a registry, read in one stream or in ranges.

The server's bytes count only when their digest is right, which the session that takes them checks.
So a stream that breaks goes on where it broke, whatever the server says of the file's version.
"""

from __future__ import annotations

from collections.abc import Iterator

from blobstore.errors import NotFoundError, RemoteError, ShortReadError
from blobstore.formats.documents import Descriptor
from blobstore.io.http.messages import Fields, Message, Reply, check_part
from blobstore.io.ranges import OpenReader, in_buffer
from blobstore.store.ports import blob_not_found
from blobstore.store.registry.api import OK, PARTIAL, Ask, RegistryApi
from blobstore.store.registry.tokens import Scope

_PROGRESS = 2**20
"""Bytes after which a broken stream counts as a new one."""


class BlobReader(OpenReader):
    """A blob of a repository. Safe to share between threads."""

    identity = None
    is_remote = True

    def __init__(self, api: RegistryApi, repository: str, descriptor: Descriptor) -> None:
        self._api = api
        self._scope = Scope(repository)
        self._address = api.address(repository, "blobs", str(descriptor.digest))
        self._digest = descriptor.digest
        self.name = str(self._address)
        self.size = descriptor.size

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`: one request."""
        end = offset + length
        if end > self.size:
            message = f"{self.name} ends before byte {end:,}: it has {self.size:,}"
            raise ShortReadError(message, path=self.name)
        return b"".join(self._stream(offset, end))

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        """See `OpenReader`: one request, unless the connection breaks."""
        return in_buffer(self._stream(begin, self.size), buffer)

    def _stream(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)``.

        Raises: NotFoundError; RemoteError, after as many attempts without progress as the policy
        allows.
        """
        at, attempt = begin, 0
        limits = self._api.client.limits(end - begin)
        while at < end:
            started = at
            try:
                for chunk in self._attempt(at, end):
                    wanted = chunk[: end - at]
                    at += len(wanted)
                    yield wanted
                    if at == end < self.size:
                        return
                failure = RemoteError(
                    f"{self.name}: its server ends at byte {at:,} of {end:,}", path=self.name
                )
            except _BrokenError as error:
                failure = error.cause
            if at < end:
                attempt = 0 if at - started >= _PROGRESS else attempt + 1
                self._api.client.pause(attempt, limits, failure)

    def _attempt(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of one reply from ``begin`` on. Raises: _BrokenError if it breaks off."""
        is_whole = (begin, end) == (0, self.size)
        fields: Fields = () if is_whole else (("Range", f"bytes={begin}-{end - 1}"),)
        ask = Ask(self._scope, Message("GET", fields), (OK, PARTIAL), nbytes=self.size)
        try:
            with self._api.request(self._address, ask) as reply:
                before, left = self._place(reply, begin, end)
                for chunk in _chunks(reply):
                    wanted = chunk[before:]
                    before = max(0, before - len(chunk))
                    left -= len(wanted)
                    if left < 0:
                        raise reply.refuse("sends more bytes than it said, or the blob has")
                    yield wanted
        except NotFoundError:
            raise blob_not_found(self._digest, self.name) from None

    def _place(self, reply: Reply, begin: int, end: int) -> tuple[int, int]:
        """Return how many bytes of a reply's body come before ``begin``, and how many from there.

        A server may answer a request for a range with the whole blob (RFC 9110 section 14.2).
        """
        if reply.status == PARTIAL:
            stop, _ = check_part(reply, begin, end)
            return 0, stop - begin
        if reply.length not in (None, self.size):
            raise reply.refuse(f"has {reply.length:,} bytes, and the manifest says {self.size:,}")
        return begin, self.size - begin


class _BrokenError(Exception):
    """A body broke off."""

    def __init__(self, cause: RemoteError) -> None:
        super().__init__(cause)
        self.cause = cause


def _chunks(reply: Reply) -> Iterator[bytes]:
    try:
        yield from reply.chunks()
    except RemoteError as error:
        raise _BrokenError(error) from error
