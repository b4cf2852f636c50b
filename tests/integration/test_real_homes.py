"""Homes at real servers do what `StoreTests` says: docker-registry, moto's S3, azurite.

Fewer tests of it than for the servers in memory (tests/contract): those that a server's answers
decide.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import pytest
from integration.cloud_services import CloudBucket
from support.registries import registry

from blobstore.errors import DigestMismatchError, UsageError
from blobstore.io.http.client import HttpClient
from blobstore.io.objects import open_bucket
from blobstore.io.ranges import BytesReader
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.ports import Home
from blobstore.store.registry.store import RegistryStore
from blobstore.testing import StoreTests
from blobstore.testing.blobs import M, blobs_of, data_of, descriptor_of, manifest_of

pytestmark = pytest.mark.lab

CHOSEN = {
    *("test_models_and_blobs", "test_all_kinds_of_names", "test_headers_are_those_of_the_blobs"),
    *("test_a_manifest_of_missing_blobs_is_refused", "test_case_tells_no_models_apart"),
    *("test_no_update_is_lost", "test_a_removed_model_is_gone"),
    *("test_transfer_brings_what_is_missing", "test_transfer_brings_signatures"),
}


class ChosenTests(StoreTests):
    """Those of the tests that are run at real servers."""


assert set(dir(StoreTests)) >= CHOSEN
for _name in {name for name in dir(StoreTests) if name.startswith("test_")} - CHOSEN:
    setattr(ChosenTests, _name, None)


class TestDockerRegistry(ChosenTests):
    """A new one for each test: it starts in 20 ms."""

    names = ("m", "m:tag", "ns/m:tag", "n:Tag")
    spellings = ("qwen:Q4", "qwen:q4", "qwen:Q4")
    checks_manifests = True
    address: str
    client: HttpClient

    @pytest.fixture(autouse=True)
    def _registry(self, tmp_path: Path) -> Iterator[None]:
        with registry(tmp_path / "registry") as server, HttpClient() as self.client:
            self.address = server.url
            yield

    def new_home(self, folder: Path) -> RegistryStore:
        return RegistryStore("registry.ollama.ai", self.client, address=self.address)


class CloudTests(ChosenTests):
    """Each test has a prefix of its own in one bucket."""

    service: ClassVar[str]
    cloud: ClassVar[CloudBucket]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, request: pytest.FixtureRequest) -> None:
        cls.cloud = request.getfixturevalue(cls.service)

    def new_home(self, folder: Path) -> BucketStore:
        return self.opened(f"{self.cloud.address}/{uuid4().hex}/a/prefix")

    def other_reader(self, home: Home) -> BucketStore:
        return self.opened(home.address)

    def opened(self, address: str) -> BucketStore:
        return BucketStore(open_bucket(address, self.cloud.options))

    def test_a_blob_in_parts(self, home: BucketStore) -> None:
        data = data_of(20_000_000)
        with home.session() as session:
            session.add(descriptor_of(data), BytesReader(data))
            wrong = replace(descriptor_of(b"other"), size=len(data))
            with pytest.raises(DigestMismatchError):
                session.add(wrong, BytesReader(data))
            session.publish(M, manifest_of(data))
        assert home.blobs.size(wrong.digest) is None
        assert blobs_of(self.opened(home.address), "m") == [data]


class TestS3(CloudTests):
    service = "s3"

    def test_a_key_that_is_not_a_path_is_named(self, home: BucketStore) -> None:
        """Obstore refuses such keys, so another client writes it."""
        import boto3  # type: ignore[import-untyped]

        names = {"endpoint": "endpoint_url", "region": "region_name"}
        names |= {key: f"aws_{key}" for key in ("access_key_id", "secret_access_key")}
        keys = {names[key]: value for key, value in self.cloud.options.items()}
        key = f"{home.address.removeprefix(f'{self.cloud.address}/')}/blobs//x"
        boto3.client("s3", **keys).put_object(Bucket="models", Key=key, Body=b"?")
        with pytest.raises(UsageError, match=f"the invalid key '{key}'"):
            list(home.bucket.objects())


class TestAzure(CloudTests):
    service = "azure"
