"""Uploads: blobs sent to one repository (specification, "Pushing blobs").

A small blob is sent in one PUT, a large one in PATCHes of a chunk each. After a failure the
registry is asked how much it has, and the upload goes on from there. An upload that the registry
has forgotten begins again, as often as the policy allows. Bytes are hashed as they are sent: the
last ones leave only if the digest is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from urllib.parse import urlencode

from blobstore import hashing
from blobstore.errors import NotFoundError, RemoteError
from blobstore.formats.documents import Descriptor
from blobstore.io.http.messages import Body, Fields, Message, Reply
from blobstore.io.http.web_addresses import WebAddress
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest
from blobstore.store.ports import wrong_bytes
from blobstore.store.registry.api import (
    ACCEPTED,
    CREATED,
    NO_CONTENT,
    NOT_FOUND,
    OK,
    Ask,
    RegistryApi,
)
from blobstore.store.registry.tokens import Scope

CHUNK = 64 * 2**20
"""Bytes of one PATCH, and of the largest blob that is sent in one PUT."""
_PIECE = 2**18
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)
_OCTETS = ("Content-Type", "application/octet-stream")
_DIGEST = "docker-content-digest"


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
        """Mount a blob of another repository; return False if the registry does not do that."""
        query = urlencode({"mount": str(digest), "from": source})
        ask = replace(self._post(), scope=replace(self._scope, mounted=(source,)))
        with self._api.request(self._begin_address(query), ask) as reply:
            if reply.status == CREATED:
                return True
            location = self._location(reply)  # it has begun an upload instead
        self._cancel(location)
        return False

    def send(self, descriptor: Descriptor, reader: OpenReader) -> None:
        """Send a blob.

        Raises: DigestMismatchError if the bytes are not those of the digest; as ``reader``;
        RemoteError.
        """
        send = self._whole if descriptor.size <= self._chunk else self._in_chunks
        limits = self._api.client.limits(0, sent=2 * descriptor.size)
        for attempt in count():
            location = self._begin()
            try:
                send(_Sent(descriptor, reader), location)
            except (NotFoundError, RemoteError) as error:
                # An upload that the registry has forgotten (404) begins again, too. It may have
                # taken a part of the bytes, so all are sent.
                if isinstance(error, RemoteError) and not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
            else:
                return

    def _begin(self) -> WebAddress:
        with self._api.request(self._begin_address(""), self._post()) as reply:
            return self._location(reply)

    def _begin_address(self, query: str) -> WebAddress:
        return self._api.address(self._repository, "blobs", "uploads", "", query=query)

    def _post(self) -> Ask:
        return Ask(self._scope, Message("POST", (), Body.of(b"")), (ACCEPTED, CREATED))

    def _whole(self, sent: _Sent, location: WebAddress) -> None:
        self._complete(sent, location, sent.body(0, sent.descriptor.size))

    def _complete(self, sent: _Sent, location: WebAddress, body: Body) -> None:
        digest = sent.descriptor.digest
        address = location.with_query(digest=str(digest))
        ask = self._ask("PUT", (CREATED,), (_OCTETS,), body)
        with self._api.request(address, ask) as reply:
            said = reply.field(_DIGEST)
            if said not in (None, str(digest)):
                raise reply.refuse(f"says that {digest} has the digest {said[:80]!r}")

    def _in_chunks(self, sent: _Sent, location: WebAddress) -> None:
        at, size, attempt = 0, sent.descriptor.size, 0
        limits = self._api.client.limits(0, sent=size)
        while at < size:
            end = min(at + self._chunk, size)
            try:
                location, has = self._patch(sent, location, at, end)
            except RemoteError as error:
                if not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
                location, has = self._state(location, end)
            attempt = 0 if has > at else attempt + 1
            at = has
        self._complete(sent, location, Body.of(b""))

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

    def _state(self, location: WebAddress, most: int) -> tuple[WebAddress, int]:
        """Return where an upload goes on, and how much of it the registry has."""
        with self._api.request(location, self._ask("GET", (NO_CONTENT,), (), None)) as reply:
            has = _received(reply)
            if has > most:
                raise reply.refuse(f"has {has:,} bytes, and {most:,} were sent")
            return self._location(reply), has

    def _cancel(self, location: WebAddress) -> None:
        """Ask the registry to forget an upload. If it refuses, the upload expires there later.

        docker-registry requires the right to delete for it, which a user with the right to push may
        lack
        (distribution/distribution@0d6b721d registry/handlers/app.go `appendAccessRecords`).
        """
        accept = (NO_CONTENT, ACCEPTED, OK, NOT_FOUND, 405)
        ask = self._ask("DELETE", accept, (), None)
        ask = replace(ask, scope=replace(self._scope, actions=("delete",)))
        with suppress(RemoteError), self._api.request(location, ask):
            pass

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
    """A blob as it is sent: its bytes are hashed in order, also if some are sent again."""

    def __init__(self, descriptor: Descriptor, reader: OpenReader) -> None:
        self.descriptor = descriptor
        self._reader = reader
        self._stream = hashing.stream()
        self._hashed = 0

    def body(self, begin: int, end: int) -> Body:
        return Body(end - begin, lambda: self._pieces(begin, end))

    def _pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes. Raises: DigestMismatchError before the last ones, if they are wrong."""
        self._hash_to(begin)
        for start in range(begin, end, _PIECE):
            data = self._reader.read(start, min(_PIECE, end - start))
            self._hash(start, data)
            is_last = self._hashed == self.descriptor.size
            if is_last and self._stream.digest() != bytes.fromhex(self.descriptor.digest.hex):
                raise wrong_bytes(self.descriptor, self._reader)
            yield data

    def _hash_to(self, end: int) -> None:
        for start in range(self._hashed, end, _PIECE):
            self._hash(start, self._reader.read(start, min(_PIECE, end - start)))

    def _hash(self, start: int, data: bytes) -> None:
        if start + len(data) > self._hashed:
            self._stream.update(memoryview(data)[self._hashed - start :])
            self._hashed = start + len(data)


def _received(reply: Reply) -> int:
    """Return how many bytes of an upload a registry has, by its ``Range``."""
    text = reply.field("range")
    match = _RANGE.fullmatch(text or "")
    if match is None:
        raise reply.refuse(f"answers an upload with the Range {(text or 'none')[:60]!r}")
    # docker-registry answers 0-0 for an upload without any bytes.
    return int(match[1]) + 1 if int(match[1]) else 0
