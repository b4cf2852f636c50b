"""Writing blobs to a bucket: each is an object that is there whole, or not at all.

A blob is never changed. It is written only if it is missing, and its bytes are known to be right
before its object appears. A large blob is written in parts, which become an object together: first
the bucket is asked for it, and two writers at once replace it by the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from blobstore import hashing
from blobstore.errors import ConflictError
from blobstore.formats.documents import Descriptor
from blobstore.io.objects import Bucket
from blobstore.io.ranges import OpenReader
from blobstore.store.bucket.object_blobs import BucketBlobs
from blobstore.store.bucket.object_keys import blob_key
from blobstore.store.ports import wrong_bytes

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


def write_blob(
    bucket: Bucket, blobs: BucketBlobs, descriptor: Descriptor, reader: OpenReader
) -> bool:
    """Write a blob whose bytes ``reader`` has, unless it is there; return whether it was not.

    An object of another size in its place is replaced. Raises: DigestMismatchError for other bytes,
    and nothing is written then.
    """
    if descriptor.size <= SMALL:
        return _write_small(bucket, blobs, descriptor, reader)
    if blobs.size(descriptor.digest) == descriptor.size:
        return False
    key, part = blob_key(descriptor.digest), max(_PART, _rounded(descriptor.size // _MOST_PARTS))
    bucket.upload(key, _checked(descriptor, reader), part=part, at_once=_AT_ONCE)
    return True


def _write_small(
    bucket: Bucket, blobs: BucketBlobs, descriptor: Descriptor, reader: OpenReader
) -> bool:
    data = reader.read(0, reader.size)
    if hashing.digests([memoryview(data)])[0].hex() != descriptor.digest.hex:
        raise wrong_bytes(descriptor, reader)
    key = blob_key(descriptor.digest)
    while True:
        try:
            bucket.put(key, data, if_absent=True)
        except ConflictError:
            found = blobs.state(descriptor.digest)
            if found is None:  # it was removed meanwhile
                continue
            if found.size == descriptor.size:
                return False
            bucket.replace(key, data, found.version)
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
