"""Buckets for tests: in memory, with faults, and with objects of other programs."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from blobstore.formats.strictjson import encode
from blobstore.io.objects import Bucket, ObjectVersion, open_bucket
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.objects import LEASES


def memory_bucket() -> Bucket:
    """Return a new bucket in memory."""
    return open_bucket(f"memory://{uuid4().hex}/a/prefix")


def memory_store(lease_s: float = 900.0) -> BucketStore:
    """Return a store in a new bucket in memory."""
    return BucketStore(memory_bucket(), lease_s=lease_s)


def same(store: BucketStore) -> BucketStore:
    """Return the same store as another process opens it."""
    return BucketStore(open_bucket(store.address), lease_s=store.lease_s)


def keys_of(bucket: Bucket, prefix: str = "") -> set[str]:
    """Return the keys of all objects under a folder."""
    return {state.key for state in bucket.objects(prefix)}


def put_lease(bucket: Bucket, name: str, *, lease_s: float) -> str:
    """Write the lease of a session that is not there any more; return its key."""
    said = {"holder": "another machine", "lease_s": lease_s, "began": 0}
    bucket.put(LEASES + name, encode(said))
    return LEASES + name


class HookedBucket(Bucket):
    """A bucket in memory that calls ``before`` and ``after`` around each write, with its key.

    ``of``: the bucket that it is, by default a new one.
    """

    def __init__(self, of: Bucket | None = None) -> None:
        plain = of or memory_bucket()
        super().__init__(plain.address, plain.store, "a/prefix")
        self.before: Callable[[str], None] = lambda _key: None
        self.after: Callable[[str], None] = lambda _key: None

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


class CarelessBucket(HookedBucket):
    """A bucket whose service ignores the conditions of writes, as old servers do."""

    def __init__(self, *, checks_absence: bool = False) -> None:
        super().__init__()
        self._checks_absence = checks_absence

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_match: ObjectVersion | None = None,
        if_absent: bool = False,
    ) -> ObjectVersion:
        """See `Bucket`."""
        return super().put(key, data, if_absent=if_absent and self._checks_absence)
