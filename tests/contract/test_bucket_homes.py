"""A home in a bucket does what `StoreTests` says."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from blobstore.io.objects import open_bucket
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.ports import Home
from blobstore.testing import StoreTests


class TestBucket(StoreTests):
    """A bucket in memory."""

    names = (
        "m",
        "m:tag",
        "ns/m:tag",
        "host.example/ns/m:tag",
        "host.example:5000/ns/m:tag",
    )

    def new_home(self, folder: Path) -> BucketStore:
        return BucketStore(open_bucket(f"memory://{uuid4().hex}/a/prefix"))

    def other_reader(self, home: Home) -> BucketStore:
        return BucketStore(open_bucket(home.address))
