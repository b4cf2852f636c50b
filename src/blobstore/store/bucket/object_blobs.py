"""Blobs in a bucket: objects by digest, read in ranges.

An object under a blob's key is not trusted: any user with write permission could have put it
there. Its size is checked when it is opened, and its bytes by everything that keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

from blobstore.errors import BlobStoreError, NotFoundError, ShortReadError
from blobstore.formats.documents import Descriptor
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget
from blobstore.io.objects import Bucket, ObjectState
from blobstore.io.ranges import OpenReader, in_buffer
from blobstore.io.workers import results_of
from blobstore.names import Digest
from blobstore.store.bucket.object_keys import BLOBS, blob_key, digest_in
from blobstore.store.ports import (
    Blobs,
    blob_not_found,
    check_blob_size,
    unique,
)

REQUESTS = 16
"""Requests at once for many small objects."""
_HEAD = 4096
"""Bytes in which the headers of most blobs end."""


class ObjectReader(OpenReader):
    """A blob of a bucket. Safe to share between threads."""

    identity = None
    is_remote = True

    def __init__(self, bucket: Bucket, descriptor: Descriptor) -> None:
        self._bucket = bucket
        self._key = blob_key(descriptor.digest)
        self.name = bucket.place(self._key)
        self.size = descriptor.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`: one request."""
        if offset + len(buffer) > self.size:
            message = f"{self.name} ends before byte {offset + len(buffer):,}: it has {self.size:,}"
            raise ShortReadError(message, path=self.name)
        if buffer:
            self._bucket.get_into(self._key, offset, buffer)

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`: one request."""
        # The size is checked first: a manifest may say any number.
        data = bytearray(min(length, max(0, self.size - offset)))
        if len(data) < length:
            data = bytearray(0)
            message = f"{self.name} ends before byte {offset + length:,}: it has {self.size:,}"
            raise ShortReadError(message, path=self.name)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        """See `OpenReader`: one request, unless the connection breaks."""
        with closing(self._bucket.stream(self._key, begin, self.size)) as chunks:
            yield from in_buffer(chunks, buffer)


class BucketBlobs(Blobs):
    """The blobs of a bucket. See `Blobs`.

    ``named``: returns the blobs that the bucket's manifests name, in hex digits.
    """

    def __init__(self, bucket: Bucket, named: Callable[[], set[str]]) -> None:
        self._bucket = bucket
        self._named = named

    def open(self, descriptor: Descriptor) -> OpenReader:
        """See `Blobs`: the server is asked for the blob's size."""
        size = self.size(descriptor.digest)
        place = self._bucket.place(blob_key(descriptor.digest))
        if size is None:
            raise blob_not_found(descriptor.digest, place)
        check_blob_size(descriptor, size, place)
        return ObjectReader(self._bucket, descriptor)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> list[Header | None]:
        """See `Blobs`: several at once."""

        def header(descriptor: Descriptor) -> Header | None:
            try:
                with self.open(descriptor) as reader:
                    return header_of(reader, budget, first_nbytes=min(_HEAD, reader.size))
            except BlobStoreError:
                return None  # it is read again, which raises the error

        return results_of(list(descriptors), header, REQUESTS, name="headers")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`: a request for each."""
        wanted = unique(descriptors)
        sizes = self.sizes([blob.digest for blob in wanted])
        return [blob for blob in wanted if sizes[blob.digest] != blob.size]

    def digests(self) -> set[str]:
        """See `Blobs`: those that manifests name. Sessions write the others, before a manifest."""
        named = self._named()
        return named & {digest.hex for digest in self.listing()} if named else named

    def size(self, digest: Digest) -> int | None:
        """Return the size of the object of a blob, None if it is missing."""
        state = self.state(digest)
        return None if state is None else state.size

    def state(self, digest: Digest) -> ObjectState | None:
        """Return the state of the object of a blob, None if it is missing."""
        try:
            return self._bucket.head(blob_key(digest))
        except NotFoundError:
            return None

    def sizes(self, digests: Iterable[Digest]) -> dict[Digest, int | None]:
        """Return the size of each blob's object, None for one that is missing."""
        asked = list(dict.fromkeys(digests))
        found = results_of(asked, self.size, REQUESTS, name="sizes")
        return dict(zip(asked, found, strict=True))

    def listing(self) -> dict[Digest, ObjectState]:
        """Return the objects of all blobs. Other objects beside them are left out."""
        found = ((digest_in(state.key), state) for state in self._bucket.objects(BLOBS))
        return {digest: state for digest, state in found if digest is not None}
