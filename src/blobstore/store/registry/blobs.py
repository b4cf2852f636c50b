"""Blobs of a registry: where they are, and how they come from there and go there.

A registry keeps the blobs of each repository apart. A blob that another repository of the same
registry has can be mounted from there, without its bytes.

*From there.* The server's bytes count only when their digest is right, which the session that takes
them checks. So a stream that breaks goes on where it broke, whatever the server says of the file's
version.

*There* (specification, "Pushing blobs"). A small blob is sent in one PUT, a large one in PATCHes of
a chunk each. After a failure the registry is asked how much it has, and the upload goes on from
there. An upload that the registry has forgotten begins again, as often as the policy allows. Bytes
are hashed as they are sent: the last ones leave only if the digest is right.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from urllib.parse import urlencode

from blobstore import hashing
from blobstore.errors import NotFoundError, RemoteError, ShortReadError
from blobstore.formats.documents import Descriptor
from blobstore.io.budget import RequestLimits
from blobstore.io.http.client import Body, Fields, Message, Reply
from blobstore.io.http.remote_files import check_part
from blobstore.io.http.web_addresses import WebAddress
from blobstore.io.ranges import OpenReader, in_buffer
from blobstore.names import Digest
from blobstore.store.ports import (
    Blobs,
    blob_not_found,
    check_blob_size,
    unique,
    wrong_bytes,
)
from blobstore.store.registry.api import (
    ACCEPTED,
    CREATED,
    NO_CONTENT,
    NOT_FOUND,
    OK,
    PARTIAL,
    Ask,
    RegistryApi,
)
from blobstore.store.registry.authorization import Scope

CHUNK = 64 * 2**20
"""Bytes of one PATCH, and of the largest blob that is sent in one PUT."""
_PIECE = 2**18
_PROGRESS = 2**20
"""Bytes after which a broken stream counts as a new one."""
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)
_OCTETS = ("Content-Type", "application/octet-stream")
_DIGEST = "docker-content-digest"


class Places:
    """Which repositories have which blobs, as far as it is known. Safe to share between threads.

    ``others`` gives the repositories that may have a blob besides those that are noted.
    """

    def __init__(self, others: Callable[[Digest], Iterable[str]] = lambda _: ()) -> None:
        self._others = others
        self._known: dict[Digest, dict[str, int]] = {}
        self._mutex = threading.Lock()

    def note(self, repository: str, blobs: Iterable[Descriptor]) -> None:
        """Note that the repository has these blobs."""
        with self._mutex:
            for blob in blobs:
                self._known.setdefault(blob.digest, {})[repository] = blob.size

    def known(self, digest: Digest) -> dict[str, int]:
        """Return the repositories that are known to have a blob, and its size there."""
        with self._mutex:
            return dict(self._known.get(digest, {}))

    def candidates(self, digest: Digest, repository: str) -> list[str]:
        """Return the other repositories that the blob may be mounted from."""
        every = dict.fromkeys([*self.known(digest), *self._others(digest)])
        return [other for other in every if other != repository]


class RegistryBlobs(Blobs):
    """The blobs of a registry, in the repositories that are known to have them. See `Blobs`.

    ``all_named`` gives the blobs that the registry's manifests name.
    """

    def __init__(
        self, api: RegistryApi, places: Places, all_named: Callable[[], Iterable[Descriptor]]
    ) -> None:
        self._api = api
        self._places = places
        self._all_named = all_named

    def open(self, descriptor: Descriptor) -> BlobReader:
        """See `Blobs`: no request is made before the first read."""
        sizes = self._places.known(descriptor.digest)
        if not sizes:
            raise blob_not_found(descriptor.digest, str(self._api.root))
        fitting = [place for place, size in sizes.items() if size == descriptor.size]
        if not fitting:
            check_blob_size(descriptor, next(iter(sizes.values())), str(self._api.root))
        return BlobReader(self._api, fitting[0], descriptor)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`: those that their known repositories no longer have."""
        wanted = unique(descriptors)

        def is_there(blob: Descriptor) -> bool:
            places = self._places.known(blob.digest)
            return any(Uploads(self._api, one).size(blob.digest) == blob.size for one in places)

        there = self._api.at_once(wanted, is_there)
        return [blob for blob, is_known in zip(wanted, there, strict=True) if not is_known]

    def digests(self) -> set[str]:
        """See `Blobs`: those that the registry's manifests name. It lists no others."""
        return {blob.digest.hex for blob in self._all_named()}


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

        Raises: NotFoundError; RemoteError, after twice as many attempts without progress as the
        policy allows.
        """
        at, attempt = begin, 0
        policy = self._api.client.retry_policy
        patient = replace(policy, attempts=2 * policy.attempts)  # to begin a blob anew costs more
        limits = RequestLimits(patient, end - begin)
        while at < end:
            start = at
            failure = RemoteError(
                f"{self.name}: its server ends at byte {at:,} of {end:,}", path=self.name
            )
            try:
                for chunk in self._attempt(at, end):
                    at += len(chunk)
                    yield chunk
            except NotFoundError:
                raise blob_not_found(self._digest, self.name) from None
            except RemoteError as error:
                if not error.temporary:
                    raise
                failure = error
            if at < end:
                attempt = 0 if at - start >= _PROGRESS else attempt
                self._api.client.pause(attempt, limits, failure)
                attempt += 1

    def _attempt(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from ``begin`` on, as many as one reply brings."""
        fields: Fields = (("Range", f"bytes={begin}-{end - 1}"),)
        if (begin, end) == (0, self.size):
            fields = ()
        ask = Ask(
            self._scope, Message("GET", fields), (OK, PARTIAL), nbytes=self.size, retries=False
        )
        with self._api.request(self._address, ask) as reply:
            before, nbytes = self._place(reply, begin, end)
            for chunk in reply.body(nbytes):
                wanted = chunk[before : before + end - begin]
                before = max(0, before - len(chunk))
                begin += len(wanted)
                yield wanted
                if begin == end < self.size:
                    return

    def _place(self, reply: Reply, begin: int, end: int) -> tuple[int, int]:
        """Return how many bytes of a reply's body come before ``begin``, and how many it has.

        A server may answer a request for a range with the whole blob (RFC 9110 section 14.2).
        """
        if reply.status == PARTIAL:
            stop, _ = check_part(reply, begin, end)
            return 0, stop - begin
        if reply.length not in (None, self.size):
            raise reply.refuse(f"has {reply.length:,} bytes, and the manifest says {self.size:,}")
        return begin, self.size


class Uploads:
    """Sends blobs to a repository. Safe to share between threads."""

    def __init__(self, api: RegistryApi, repository: str, *, chunk: int = CHUNK) -> None:
        self._api = api
        self._repository = repository
        self._scope = Scope(repository, ("pull", "push"))
        self._chunk = chunk

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob of the repository, None if it is missing.

        Raises: RemoteError, also if the registry does not say the size.
        """
        address = self._api.address(self._repository, "blobs", str(digest))
        ask = Ask(Scope(self._repository), Message("HEAD"), (OK, NOT_FOUND))
        with self._api.request(address, ask) as reply:
            if reply.status == NOT_FOUND:
                return None
            if reply.length is None:
                raise reply.refuse("does not say the size of a blob")
            return reply.length

    def mount(self, digest: Digest, source: str) -> bool:
        """Mount a blob of another repository; return False if the registry does not do that.

        It begins an upload instead then, which it forgets after a while.
        """
        query = urlencode({"mount": str(digest), "from": source})
        with self._post(replace(self._scope, mounted=(source,)), query) as reply:
            return reply.status == CREATED

    def send(self, descriptor: Descriptor, reader: OpenReader) -> None:
        """Send a blob.

        Raises: DigestMismatchError if the bytes are not those of the digest; as ``reader``;
        RemoteError.
        """
        limits = self._api.client.limits(0, sent=2 * descriptor.size)
        for attempt in count():
            with self._post(self._scope) as reply:
                location = self._location(reply)
            try:
                self._send_to(location, _Sent(descriptor, reader))
            except (NotFoundError, RemoteError) as error:
                # An upload that the registry has forgotten (404) begins again, too. It may have
                # taken a part of the bytes, so all are sent.
                if isinstance(error, RemoteError) and not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
            else:
                return

    def _post(self, scope: Scope, query: str = "") -> AbstractContextManager[Reply]:
        address = self._api.address(self._repository, "blobs", "uploads", "", query=query)
        ask = Ask(scope, Message("POST", (), Body.of(b"")), (ACCEPTED, CREATED))
        return self._api.request(address, ask)

    def _send_to(self, location: WebAddress, sent: _Sent) -> None:
        at, size, attempt = 0, sent.descriptor.size, 0
        if size <= self._chunk:
            self._complete(sent, location, sent.body(0, size))
            return
        limits = self._api.client.limits(0, sent=size)
        while at < size:
            try:
                location, has = self._patch(sent, location, at, min(at + self._chunk, size))
            except RemoteError as error:
                if not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
                location, has = self._state(sent, location)
            attempt = 0 if has > at else attempt + 1
            at = has
        self._complete(sent, location, Body.of(b""))

    def _complete(self, sent: _Sent, location: WebAddress, body: Body) -> None:
        digest = sent.descriptor.digest
        ask = self._ask("PUT", (CREATED,), (_OCTETS,), body)
        with self._api.request(location.with_query(digest=str(digest)), ask) as reply:
            said = reply.field(_DIGEST)
            if said not in (None, str(digest)):
                raise reply.refuse(f"says that {digest} has the digest {said[:80]!r}")

    def _patch(
        self, sent: _Sent, location: WebAddress, begin: int, end: int
    ) -> tuple[WebAddress, int]:
        """Send ``[begin, end)``; return where the upload goes on, and how much there is now."""
        fields = (_OCTETS, ("Content-Range", f"{begin}-{end - 1}"))
        ask = self._ask("PATCH", (ACCEPTED,), fields, sent.body(begin, end))
        with self._api.request(location, ask) as reply:
            has = _received(reply)
            if not begin < has <= end:
                raise reply.refuse(f"has {has:,} bytes after {end:,} were sent")
            return self._location(reply), has

    def _state(self, sent: _Sent, location: WebAddress) -> tuple[WebAddress, int]:
        """Return where an upload goes on, and how much of it the registry has."""
        with self._api.request(location, self._ask("GET", (NO_CONTENT,), (), None)) as reply:
            has = _received(reply)
            if has > sent.hashed:
                raise reply.refuse(f"has {has:,} bytes, and {sent.hashed:,} were sent")
            return self._location(reply), has

    def _ask(self, method: str, accept: tuple[int, ...], fields: Fields, body: Body | None) -> Ask:
        message = Message(method, fields, body)
        return Ask(self._scope, message, accept, retries=body is None)

    def _location(self, reply: Reply) -> WebAddress:
        """Return where the next request of an upload goes.

        Raises: RemoteError (rule R2) unless that is an address of the registry.
        """
        location = reply.field("location")
        if location is None:
            raise reply.refuse("answers without a Location")
        there = reply.address.join(location)
        if there.origin != self._api.root.origin:
            raise reply.address.refuse(f"continues an upload at another server, {there}")
        return there


class _Sent:
    """A blob as it is sent: its first ``hashed`` bytes were, in order, and may be sent again."""

    def __init__(self, descriptor: Descriptor, reader: OpenReader) -> None:
        self.descriptor = descriptor
        self.hashed = 0
        self._reader = reader
        self._stream = hashing.stream()

    def body(self, begin: int, end: int) -> Body:
        return Body(end - begin, lambda: self._pieces(begin, end))

    def _pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes. Raises: DigestMismatchError before the last ones, if they are wrong."""
        for start in range(begin, end, _PIECE):
            data = self._reader.read(start, min(_PIECE, end - start))
            if start + len(data) > self.hashed:
                self._stream.update(memoryview(data)[self.hashed - start :])
                self.hashed = start + len(data)
            is_last = self.hashed == self.descriptor.size
            if is_last and self._stream.digest() != bytes.fromhex(self.descriptor.digest.hex):
                raise wrong_bytes(self.descriptor, self._reader)
            yield data


def _received(reply: Reply) -> int:
    """Return how many bytes of an upload a registry has, by its ``Range``."""
    text = reply.field("range")
    match = _RANGE.fullmatch(text or "")
    if match is None:
        raise reply.refuse(f"answers an upload with the Range {(text or 'none')[:60]!r}")
    # docker-registry answers 0-0 for an upload without any bytes.
    return int(match[1]) + 1 if int(match[1]) else 0
