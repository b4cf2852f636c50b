"""A home in a bucket of moto's S3 and of azurite does what `StoreTests` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import pytest
from support.cloud_services import SERVICES, CloudBucket

from blobstore.errors import DigestMismatchError, UsageError
from blobstore.io.objects import open_bucket
from blobstore.io.ranges import BytesReader
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.care.verify import verify
from blobstore.store.ports import Home
from blobstore.testing import StoreTests
from blobstore.testing.blobs import M, commit, data_of, descriptor_of, manifest_of

pytestmark = pytest.mark.lab


class CloudTests(StoreTests):
    """Each test has a prefix of its own in one bucket."""

    service: ClassVar[str]
    cloud: ClassVar[CloudBucket]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with SERVICES[cls.service](tmp_path_factory.mktemp("cloud")) as cls.cloud:
            yield

    def new_home(self, folder: Path) -> BucketStore:
        return self.opened(f"{self.cloud.address}/{uuid4().hex}/a/prefix")

    def other_reader(self, home: Home) -> BucketStore:
        return self.opened(home.address)

    def test_a_blob_in_parts(self, home: BucketStore) -> None:
        data = data_of(20_000_000)
        with home.session() as session:
            session.add(descriptor_of(data), BytesReader(data))
            wrong = replace(descriptor_of(b"other"), size=len(data))
            with pytest.raises(DigestMismatchError):
                session.add(wrong, BytesReader(data))
            session.publish(M, manifest_of(data))
        assert home.blobs.size(wrong.digest) is None
        assert verify(self.opened(home.address)).nbytes == len(data)

    def opened(self, address: str) -> BucketStore:
        return BucketStore(open_bucket(address, self.cloud.options))


class TestS3(CloudTests):
    service = "s3"


class TestAzure(CloudTests):
    service = "azure"


@pytest.mark.parametrize("key", ["blobs//x", "manifests/../x"])
def test_a_key_that_is_not_a_path_is_named(key: str, tmp_path: Path) -> None:
    with SERVICES["s3"](tmp_path / "s3") as cloud:
        store = BucketStore(open_bucket(f"{cloud.address}/p", cloud.options))
        commit(store, "m", b"one")
        put_any_key(cloud, f"p/{key}")
        with pytest.raises(UsageError, match=f"the invalid key 'p/{key}'"):
            list(store.bucket.objects())


def put_any_key(cloud: CloudBucket, key: str) -> None:
    """Write an object whose key obstore refuses."""
    import boto3  # type: ignore[import-untyped]

    client = boto3.client(
        "s3",
        endpoint_url=cloud.options["endpoint"],
        aws_access_key_id=cloud.options["access_key_id"],
        aws_secret_access_key=cloud.options["secret_access_key"],
        region_name=cloud.options["region"],
    )
    client.put_object(Bucket="models", Key=key, Body=b"?")
