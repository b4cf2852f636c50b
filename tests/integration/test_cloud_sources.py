"""Checkpoints in moto's S3 server: commands, conditional writes, a replaced object.

Marked `lab`. Imports: test_far_imports.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import normal, write_checkpoint
from support.cloud_services import CloudBucket, s3

import blobstore
from blobstore.cli.main import run
from blobstore.errors import ConflictError, CorruptDataError, NotFoundError
from blobstore.io.objects import Bucket, open_bucket
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import FetchOptions, fetching

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudBucket]:
    """A bucket with a checkpoint."""
    source = tmp_path_factory.mktemp("source") / "m"
    write_checkpoint(source, {"model.a.weight": normal("a", 64, 128)})
    with s3(tmp_path_factory.mktemp("moto")) as running:
        running.upload(source, "tiny")
        yield running


@pytest.fixture
def bucket(cloud: CloudBucket) -> Bucket:
    return open_bucket(f"{cloud.address}/tiny", cloud.options)


def test_commands(
    cloud: CloudBucket,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    store = ["--store", str(tmp_path / "store")]
    for arguments in (
        ["inspect", f"{bucket.address}/model.safetensors"],
        ["plan", bucket.address, "--quant", "int8"],
        ["import", bucket.address, "m", "--quant", "int8", *store],
        ["quality", "m", "--against", bucket.address, *store],
    ):
        assert run(arguments) == 0, capsys.readouterr().err
    assert run(["import", f"{cloud.address}/nothing", *store]) == 1
    assert run(["inspect", "s3://no-such-bucket/x"]) == 1
    assert "bucket" in capsys.readouterr().err


def test_what_is_missing(bucket: Bucket) -> None:
    for act in (bucket.get, bucket.head, lambda key: bucket.copy(key, "x")):
        with pytest.raises(NotFoundError) as caught:
            act("missing")
        assert "secret" not in str(caught.value)
    bucket.delete(["missing"])


def test_conditional_writes(bucket: Bucket) -> None:
    """Many writers, one name: each version is replaced once."""
    bucket.put("tag", b"0", if_absent=True)

    def count(_: int) -> None:
        while True:
            data, version = bucket.get("tag")
            try:
                bucket.put("tag", b"%d" % (int(data) + 1), if_match=version)
            except ConflictError:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(8)))
    assert bucket.get("tag")[0] == b"8"


def test_a_replaced_object_is_noticed(cloud: CloudBucket, bucket: Bucket) -> None:
    with blobstore.open_folder(bucket.address, bucket_options=cloud.options) as folder:
        (file,) = read_inventory(folder).files
        with fetching([file], FetchOptions()) as fetcher:
            bucket.put("model.safetensors", b"another")
            with pytest.raises(CorruptDataError):
                fetcher.fill(file, 0, memoryview(bytearray(10)))
