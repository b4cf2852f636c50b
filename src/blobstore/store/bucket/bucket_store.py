"""BucketStore: the models of a bucket as a home.

No lock exists in a bucket. Blobs never change, a tag moves by a conditional write, and sessions and
clean-ups wait for each other's leases (leases.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from blobstore.errors import BlobStoreError, UsageError
from blobstore.formats.documents import Descriptor
from blobstore.io.objects import Bucket, open_bucket
from blobstore.names import ModelName
from blobstore.store.bucket.blob_cache import CACHE_NBYTES, BlobCache, CachedBlobs
from blobstore.store.bucket.bucket_session import BucketSession
from blobstore.store.bucket.leases import LEASE_S, LONGEST_LEASE_S, open_lease, require_conditions
from blobstore.store.bucket.object_blobs import BucketBlobs
from blobstore.store.bucket.object_manifests import BucketManifests, BucketSignatures
from blobstore.store.ports import Care, Home, Removal, unique

_Name = str | ModelName


class BucketStore(Home):
    """A home in a bucket. Safe to share between threads.

    ``lease_s``: seconds for which a session's lease counts after each renewal. ``wait_s``: how long
    a session waits for a clean-up (None: as long as one may take), and a clean-up for sessions.
    ``cache``: where blobs are kept that are opened. Without it they are read into memory.
    """

    blobs: BucketBlobs
    manifests: BucketManifests
    signatures: BucketSignatures

    def __init__(
        self,
        bucket: Bucket,
        *,
        cache: BlobCache | None = None,
        lease_s: float = LEASE_S,
        wait_s: float | None = None,
    ) -> None:
        """Raises: UsageError for a lease that is longer than an hour."""
        if not 0 < lease_s <= LONGEST_LEASE_S:
            raise UsageError(f"invalid lease: {lease_s!r} seconds", hint="At most 3600.")
        self.address = bucket.address
        self.bucket = bucket
        self.lease_s = lease_s
        self.manifests = BucketManifests(bucket)
        self.blobs = _blobs(bucket, self.manifests, cache)
        self.summaries = None if cache is None else cache.summaries
        self.has_cache = cache is not None
        self.signatures = BucketSignatures(bucket)
        self.wait_s = wait_s
        self._mutex = threading.Lock()
        self._has_conditions = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another machine without the cache, a folder of this one."""
        return partial(type(self), lease_s=self.lease_s, wait_s=self.wait_s), (self.bucket,)

    def find(self, name: _Name) -> ModelName:
        found = self.manifests.spelled(ModelName.of(name))
        if not self.manifests.has(found):
            self.manifests.text(found)  # raises the error of a missing one
        return found

    @contextmanager
    def session(
        self,
        source: str = "",  # noqa: ARG002  # notes of what was made are the bucket's
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> Iterator[BucketSession]:
        """See `Home`. Raises: StorageError for a bucket without conditional writes."""
        self.require_conditions()
        lease = open_lease(self.bucket, self.lease_s, self.wait_s)
        session = BucketSession(self.bucket, self.blobs, self.manifests, lease, self.wait_s)
        try:
            yield session
        finally:
            session.close()

    def require_conditions(self) -> None:
        """Raise StorageError for a bucket that ignores conditional writes; it is asked once."""
        with self._mutex:
            if not self._has_conditions:
                require_conditions(self.bucket)
                self._has_conditions = True

    def prefetch(self, descriptors: Iterable[Descriptor]) -> None:
        """Bring blobs into the cache, in their order; without a cache, do nothing.

        Raises: as `BlobCache.bring`.
        """
        if isinstance(self.blobs, CachedBlobs):
            self.blobs.bring(descriptors)

    def care(self) -> Care:
        from blobstore.store.bucket.care import BucketCare

        plain = BucketStore(self.bucket)
        return BucketCare(
            plain, self.bucket, plain.blobs, plain.manifests, self.lease_s, self.wait_s
        )

    def remove(self, name: _Name) -> Removal:
        """See `Home`: the tag goes, and `prune` removes blobs that no model needs."""
        found = self.find(name)
        try:
            blobs = self.manifests.read(found).descriptors
        except BlobStoreError:
            blobs = ()  # a manifest that can't be read can still be removed
        self.manifests.remove(found)
        return Removal((), tuple(unique(blobs)), "prune removes them, if no other model needs them")


def _blobs(bucket: Bucket, manifests: BucketManifests, cache: BlobCache | None) -> BucketBlobs:
    def named() -> set[str]:
        return manifests.references().needed()

    return BucketBlobs(bucket, named) if cache is None else CachedBlobs(bucket, named, cache)


def open_bucket_store(
    address: str,
    options: Mapping[str, str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = CACHE_NBYTES,
) -> BucketStore:
    """Return the store at ``s3://BUCKET/PREFIX``, ``gs://…`` or ``az://…``; no server is asked yet.

    ``options``: those of `open_bucket`. ``cache``: a folder for the blobs of opened models, which
    holds up to ``cache_size`` bytes.

    Raises: as `open_bucket`; UsageError for a folder that is not a cache.
    """
    kept = None if cache is None else BlobCache(cache, cache_size)
    return BucketStore(open_bucket(address, options), cache=kept)
