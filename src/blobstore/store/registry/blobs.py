"""Blobs of a registry: where they are, and how they come from there and go there.

A registry keeps the blobs of each repository apart. A blob that another repository of the same
registry has can be mounted from there, without its bytes.

*From there.* The server's bytes count only when their digest is right, which the session that takes
them checks. So a stream that breaks goes on where it broke, whatever the server says of the file's
version.

*There* (specification, "Pushing blobs"). A blob is sent in one PUT, and after a failure as a whole
again, as often as the policy allows. Bytes are hashed as they are sent: the last ones leave only if
the digest is right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from urllib.parse import urlencode

from blobstore import hashing
from blobstore.errors import NotFoundError, RemoteError
from blobstore.formats.documents import Descriptor
from blobstore.io.budget import RequestLimits
from blobstore.io.http.client import Body, Fields, Reply, Request
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
    NOT_FOUND,
    OK,
    PARTIAL,
    RegistryApi,
)
from blobstore.store.registry.authorization import Scope

_PIECE = 2**18
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
        self._check(offset, length)
        return b"".join(self._stream(offset, offset + length))

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        """See `OpenReader`: one request, unless the connection breaks."""
        return in_buffer(self._stream(begin, self.size), buffer)

    def _stream(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)``.

        Raises: NotFoundError; RemoteError, after twice as many attempts without progress as the
        policy allows.
        """
        client = self._api.client
        policy = client.retry_policy
        patient = replace(policy, attempts=2 * policy.attempts)  # to begin a blob anew costs more
        limits = RequestLimits(patient, end - begin)

        def attempt(at: int) -> Iterator[bytes]:
            return self._attempt(at, end)

        try:
            yield from client.resumed(attempt, begin, end, limits, self.name)
        except NotFoundError:
            raise blob_not_found(self._digest, self.name) from None

    def _attempt(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from ``begin`` on, as many as one reply brings."""
        fields: Fields = (("Range", f"bytes={begin}-{end - 1}"),)
        if (begin, end) == (0, self.size):
            fields = ()
        request = Request("GET", (OK, PARTIAL), fields, retries=False)
        with self._api.request(self._address, self._scope, request, self.size) as reply:
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

    def __init__(self, api: RegistryApi, repository: str) -> None:
        self._api = api
        self._repository = repository
        self._scope = Scope(repository, ("pull", "push"))

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob of the repository, None if it is missing.

        Raises: RemoteError, also if the registry does not say the size.
        """
        address = self._api.address(self._repository, "blobs", str(digest))
        request = Request("HEAD", (OK, NOT_FOUND))
        with self._api.request(address, Scope(self._repository), request) as reply:
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
                location = self._api.joined(reply, reply.field("location"))
            try:
                self._put(location, descriptor, reader)
            except (NotFoundError, RemoteError) as error:
                # The registry may have taken a part of the bytes, or forgotten the upload (404).
                if isinstance(error, RemoteError) and not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
            else:
                return

    def _post(self, scope: Scope, query: str = "") -> AbstractContextManager[Reply]:
        address = self._api.address(self._repository, "blobs", "uploads", "", query=query)
        return self._api.request(
            address, scope, Request("POST", (ACCEPTED, CREATED), body=Body.of(b""))
        )

    def _put(self, location: WebAddress, descriptor: Descriptor, reader: OpenReader) -> None:
        digest = str(descriptor.digest)
        body = Body(descriptor.size, partial(_checked_pieces, descriptor, reader))
        fields = (("Content-Type", "application/octet-stream"),)
        request = Request("PUT", (CREATED,), fields, body, retries=False)
        with self._api.request(location.with_query(digest=digest), self._scope, request) as reply:
            said = reply.field(_DIGEST)
            if said not in (None, digest):
                raise reply.refuse(f"says that {digest} has the digest {said[:80]!r}")


def _checked_pieces(descriptor: Descriptor, reader: OpenReader) -> Iterator[bytes]:
    """Yield the bytes. Raises: DigestMismatchError before the last ones, if they are wrong."""
    stream = hashing.stream()
    for start in range(0, descriptor.size, _PIECE):
        data = reader.read(start, min(_PIECE, descriptor.size - start))
        stream.update(data)
        is_last = start + len(data) == descriptor.size
        if is_last and stream.digest() != bytes.fromhex(descriptor.digest.hex):
            raise wrong_bytes(descriptor, reader)
        yield data
