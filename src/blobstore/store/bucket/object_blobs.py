"""Blobs in a bucket: objects by digest, read in ranges; and the keys of all objects.

An object under a blob's key is not trusted: any user with write permission could have put it
there. Its size is checked when it is opened, and its bytes by everything that keeps them.

A blob is never changed. It is written only if it is missing, and its bytes are known to be right
before its object appears. A large blob is written in parts, which become an object together: first
the bucket is asked for it, and two writers at once replace it by the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

from blobstore import hashing
from blobstore.errors import BlobStoreError, ConflictError, NotFoundError, ShortReadError
from blobstore.formats.documents import Descriptor
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget
from blobstore.io.objects import Bucket, ObjectState
from blobstore.io.ranges import OpenReader, in_buffer
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Blobs, blob_not_found, check_blob_size, unique, wrong_bytes

BLOBS = "blobs/"
MANIFESTS = "manifests/"
PRIVATE = ".blobstore/"
LEASES = f"{PRIVATE}leases/"
MADE = f"{PRIVATE}made/"
PROBES = f"{PRIVATE}probes/"
SIGNATURES = f"{PRIVATE}signatures/"
SWEEP = f"{PRIVATE}sweep"

_PLAIN = re.compile(r"[0-9A-Za-z]{1,128}", re.ASCII)
REQUESTS = 16
"""Requests at once for many small objects."""
_HEAD = 4096
"""Bytes in which the headers of most blobs end."""
SMALL = 4 * 2**20
"""Bytes of a blob that is written in one request."""
_PART = 8 * 2**20
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of one object (Amazon S3 User Guide, "Multipart upload limits")."""
_AT_ONCE = 4
"""Parts of one blob at once."""
LARGE_AT_ONCE = 4
"""Blobs in parts at once. Together they hold 160 MiB."""
_PIECE = 2**20


def blob_key(digest: Digest) -> str:
    """Return the key of a blob."""
    return BLOBS + digest.file_name


def manifest_key(name: ModelName) -> str:
    """Return the key of a model's manifest."""
    return MANIFESTS + "/".join(name.path_parts)


def made_key(key: str) -> str:
    """Return the key of the note about the blob that was made for ``key``."""
    return MADE + (key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest())


def digest_in(key: str) -> Digest | None:
    """Return the digest of the blob with a key, None if it is not the key of a blob."""
    return Digest.from_file_name(key.removeprefix(BLOBS)) if key.startswith(BLOBS) else None


def model_of(key: str) -> ModelName | None:
    """Return the name of the model whose manifest has a key, None if it is not that of a model."""
    if not key.startswith(MANIFESTS):
        return None
    return ModelName.of_path(key.removeprefix(MANIFESTS).split("/"))


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

    def write(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        """Write a blob whose bytes ``reader`` has, unless it is there; return whether it was not.

        An object of another size in its place is replaced. Raises: DigestMismatchError for other
        bytes, and nothing is written then.
        """
        if descriptor.size <= SMALL:
            return self._write_small(descriptor, reader)
        if self.size(descriptor.digest) == descriptor.size:
            return False
        part = max(_PART, _rounded(descriptor.size // _MOST_PARTS))
        pieces = _checked(descriptor, reader)
        self._bucket.upload(blob_key(descriptor.digest), pieces, part=part, at_once=_AT_ONCE)
        return True

    def _write_small(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        data = reader.read(0, reader.size)
        if hashing.digests([memoryview(data)])[0].hex() != descriptor.digest.hex:
            raise wrong_bytes(descriptor, reader)
        key = blob_key(descriptor.digest)
        while True:
            try:
                self._bucket.put(key, data, if_absent=True)
            except ConflictError:
                found = self.state(descriptor.digest)
                if found is None:  # it was removed meanwhile
                    continue
                if found.size == descriptor.size:
                    return False
                self._bucket.replace(key, data, found.version)
            return True


def _checked(descriptor: Descriptor, reader: OpenReader) -> Iterator[bytes]:
    """Yield all bytes. Raises: DigestMismatchError behind the last of other bytes."""
    stream = hashing.stream()
    for piece in reader.pieces(memoryview(bytearray(_PIECE))):
        data = bytes(piece)
        hashing.update_all([stream], [memoryview(data)])
        yield data
    if stream.digest().hex() != descriptor.digest.hex:
        raise wrong_bytes(descriptor, reader)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 2**20) * 2**20
