"""Buckets for tests: in memory, with hooks around writes."""

from collections.abc import Callable
from uuid import uuid4

from blobstore.io.objects import Bucket, ObjectVersion, open_bucket
from blobstore.store.bucket.bucket_store import BucketStore


def memory_store(lease_s: float = 900.0) -> BucketStore:
    return BucketStore(open_bucket(f"memory://{uuid4().hex}/a/prefix"), lease_s=lease_s)


def same(store: BucketStore) -> BucketStore:
    """Return the same store as another process opens it."""
    return BucketStore(open_bucket(store.address), lease_s=store.lease_s)


def keys_of(bucket: Bucket, prefix: str = "") -> set[str]:
    return {state.key for state in bucket.objects(prefix)}


class HookedBucket(Bucket):
    """A bucket that calls ``before`` and ``after`` around each write of ``of``, with its key."""

    def __init__(self, of: Bucket | None = None) -> None:
        plain = of or memory_store().bucket
        super().__init__(plain.address, plain.store, plain.address.split("/", 3)[3])
        self.before: Callable[[str], object] = lambda _key: None
        self.after: Callable[[str], object] = lambda _key: None

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_match: ObjectVersion | None = None,
        if_absent: bool = False,
    ) -> ObjectVersion:
        """See `Bucket`."""
        self.before(key)
        version = super().put(key, data, if_match=if_match, if_absent=if_absent)
        self.after(key)
        return version
