"""The blobs of a bucket, through a cache on the disk.

A blob that the cache has is a file. Of any other, a few bytes (a header) are read from the bucket,
and everything else brings the whole blob into the cache: mapping it, or reading more of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor
from blobstore.io.objects import Bucket
from blobstore.io.ranges import FileReader, Identity, OpenReader
from blobstore.store.bucket.blob_cache import BlobCache
from blobstore.store.bucket.object_blobs import BucketBlobs

_ATTEMPTS = 5
_FEW = 2**16
"""Bytes of a blob that are read from the bucket."""


class CachedBlobs(BucketBlobs):
    """The blobs of a bucket, of which ``cache`` keeps some. See `Blobs`."""

    def __init__(self, bucket: Bucket, named: Callable[[], set[str]], cache: BlobCache) -> None:
        super().__init__(bucket, named)
        self._cache = cache
        self._far = BucketBlobs(bucket, named)

    def open(self, descriptor: Descriptor) -> OpenReader:
        found = self._cache.find(descriptor)
        if found is not None:
            return found
        far = self._far.open(descriptor)
        return CachedReader(descriptor, far, self._cache, self._far)

    def bring(self, descriptors: Iterable[Descriptor]) -> None:
        """Bring blobs into the cache, in their order. Raises: as `BlobCache.bring`."""
        self._cache.bring(descriptors, self._far)


class CachedReader(OpenReader):
    """A blob that is not in the cache yet. Safe to share between threads."""

    def __init__(
        self, descriptor: Descriptor, far: OpenReader, cache: BlobCache, source: BucketBlobs
    ) -> None:
        self.size = descriptor.size
        self.name = str(cache.store.blobs.path / descriptor.digest.file_name)
        self._descriptor = descriptor
        self._far = far
        self._cache = cache
        self._source = source
        self._mutex = threading.Lock()
        self._file: FileReader | None = None

    @property
    def identity(self) -> Identity:  # type: ignore[override]  # a file's is known when it is there
        """The identity of its file, which is brought for that."""
        return self._near().identity

    def _near(self) -> FileReader:
        """Return its file, which is fetched first. Raises: as `BlobCache.bring`."""
        with self._mutex:
            for _ in range(_ATTEMPTS):
                if self._file is not None:
                    return self._file
                self._cache.bring([self._descriptor], self._source)
                self._file = self._cache.find(self._descriptor)
        message = f"{self.name} can't be kept in the cache: other processes remove it at once"
        raise StorageError(message, path=self.name, blob=str(self._descriptor.digest))

    def fileno(self) -> int | None:
        return self._near().fileno()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        is_near = self._file is not None or (len(buffer) > _FEW or self.size <= _FEW)
        (self._near() if is_near else self._far).readinto(offset, buffer)

    def read(self, offset: int, length: int) -> bytes:
        is_near = self._file is not None or length > _FEW or self.size <= _FEW
        return (self._near() if is_near else self._far).read(offset, length)

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        return self._near().pieces(buffer, begin)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
