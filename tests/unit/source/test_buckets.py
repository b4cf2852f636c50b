"""Checkpoints in buckets, in a store in memory: read, fetched and imported as from a disk."""

import json
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from support.checkpoints import write_checkpoint
from support.layouts import files_of, write

import blobstore
from blobstore.errors import CorruptDataError, NotFoundError, RemoteError
from blobstore.io.objects import Bucket, open_bucket
from blobstore.source.folders import BucketFolder, LocalFolder
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import FetchOptions, RateLimit, open_fetcher
from blobstore.store.local.store import Store


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(write_checkpoint(tmp_path / "tiny"), {"1_Pooling/config.json": "{}"})


@pytest.fixture
def bucket(checkpoint: Path) -> Bucket:
    made = open_bucket(f"memory://{uuid4()}/models/tiny")
    for name, data in files_of(checkpoint).items():
        made.put(name, data)
    return made


def test_its_inventory_is_that_of_the_folder(bucket: Bucket, checkpoint: Path) -> None:
    far, near = read_inventory(BucketFolder(bucket)), read_inventory(LocalFolder(checkpoint))
    assert far.documents == near.documents
    assert far.tensors.keys() == near.tensors.keys()
    assert [entry.name for entry in far.folder.scan("1_Pooling/")] == ["config.json"]
    assert (far.folder.stem, far.folder.key) == ("tiny", bucket.address)


def test_an_import_records_versions(bucket: Bucket, checkpoint: Path, tmp_path: Path) -> None:
    store, layers, recorded = Store(tmp_path / "store"), [], []
    for name, source in (("far", BucketFolder(bucket)), ("near", LocalFolder(checkpoint))):
        made = blobstore.import_model(source, name, store=store, quant="int4")
        layers.append({layer.name: layer.digest for layer in made.manifest.layers})
        with blobstore.open_model(name, store=store) as model:
            recorded += json.loads(model.document("blobstore.json"))["sources"]
    assert layers[0].pop("blobstore.json") != layers[1].pop("blobstore.json")
    assert layers[0] == layers[1]
    assert recorded[0].pop("version") == bucket.head("model.safetensors").version.etag
    assert recorded[0] == recorded[1]


def test_a_file_that_changes_after_the_plan_ends_the_import(bucket: Bucket, store: Store) -> None:
    plan = blobstore.plan_import(BucketFolder(bucket))
    data = bucket.get("model.safetensors")[0]
    bucket.put("model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match="changed"):
        blobstore.run_plan(plan, "m", store)
    assert list(store.models()) == []


def test_fetching(bucket: Bucket) -> None:
    data = bucket.get("model.safetensors")[0]
    (file,) = read_inventory(BucketFolder(bucket)).files
    buffer = bytearray(len(data) - 1000)
    with open_fetcher([file], FetchOptions(connections=3, limit_rate=10**9)) as fetcher:
        assert fetcher.at_once == 3
        fetcher.fill(file, 1000, memoryview(buffer))
        assert bytes(buffer) == data[1000:]
        bucket.put("model.safetensors", data[:-1] + b"x")
        with pytest.raises(CorruptDataError, match="changed while"):
            fetcher.fill(file, 0, memoryview(buffer))
        with pytest.raises(NotFoundError):
            fetcher.fill(replace(file, name="missing"), 0, memoryview(buffer))
        fetcher.stop.set()
        with pytest.raises(RemoteError, match="cancelled"):
            fetcher.fill(file, 0, memoryview(buffer))


def test_bytes_come_no_faster_than_the_limit() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    limit = RateLimit(1_000_000, clock=lambda: now[0], wait=wait)
    for _ in range(100):
        limit.take(100_000)
    assert 9.7 <= now[0] <= 10.01
    now[0] += 100  # a time without transfers is not saved for later
    for _ in range(100):
        limit.take(100_000)
    assert 119.4 <= now[0] <= 120.02
