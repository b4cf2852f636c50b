"""Object storage for all tests of a process; each has its own keys in the bucket."""

from collections.abc import Iterator

import pytest
from integration.cloud_services import CloudBucket, azurite, moto_s3


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudBucket]:
    with moto_s3(tmp_path_factory.mktemp("s3")) as bucket:
        yield bucket


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudBucket]:
    with azurite(tmp_path_factory.mktemp("azure")) as bucket:
        yield bucket
