"""Checkpoints in buckets, in a store in memory: read, fetched and imported as from a disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from support import PYCODE

import blobstore
from blobstore.errors import CorruptDataError, NotFoundError, RemoteError
from blobstore.io.objects import Bucket, open_bucket
from blobstore.source.folders import BucketFolder, LocalFolder
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import FetchOptions, fetching
from blobstore.store.local.store import Store

M = "m"


@pytest.fixture
def bucket() -> Bucket:
    """A bucket with a checkpoint, and something in a folder of it."""
    made = open_bucket(f"memory://{uuid4()}/models/tiny")
    for path in sorted(PYCODE.iterdir()):
        made.put(path.name, path.read_bytes())
    made.put("1_Pooling/config.json", b"{}")
    return made


def recorded_file(store: Store, name: str) -> dict[str, object]:
    with blobstore.open_model(name, store=store) as model:
        document = json.loads(model.document("blobstore.json"))
    file: dict[str, object] = document["sources"][0]
    return file


def test_its_inventory_is_that_of_the_folder(bucket: Bucket) -> None:
    far, near = read_inventory(BucketFolder(bucket)), read_inventory(LocalFolder(PYCODE))
    assert far.documents == near.documents
    assert far.tensors.keys() == near.tensors.keys()
    assert [entry.name for entry in far.folder.scan("1_Pooling/")] == ["config.json"]
    assert (far.folder.stem, far.folder.key) == ("tiny", bucket.address)


def test_an_import_makes_the_same_blobs_and_records_versions(
    bucket: Bucket, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    far = blobstore.import_model(BucketFolder(bucket), "far", store=store, quant="int4")
    near = blobstore.import_model(PYCODE, "near", store=store, quant="int4")
    layers = [{layer.name: layer.digest for layer in one.manifest.layers} for one in (far, near)]
    assert layers[0].pop("blobstore.json") != layers[1].pop("blobstore.json")
    layers[0].pop("1_Pooling/config.json")
    assert layers[0] == layers[1]
    recorded = [recorded_file(store, name) for name in ("far", "near")]
    assert recorded[0].pop("version") == bucket.head("model.safetensors").version.etag
    assert recorded[0] == recorded[1]


def test_a_file_in_it_may_be_named(bucket: Bucket) -> None:
    folder = BucketFolder(open_bucket(f"{bucket.address}/model.safetensors"))
    inventory = read_inventory(folder)
    assert inventory.path == bucket.place("model.safetensors")
    assert BucketFolder(open_bucket(f"memory://{uuid4()}")).as_file() is None


def test_fetching(bucket: Bucket) -> None:
    data = (PYCODE / "model.safetensors").read_bytes()
    folder = BucketFolder(bucket)
    (file,) = read_inventory(folder).files
    buffer = bytearray(1_500_000)
    with fetching([file], FetchOptions(connections=3, limit_rate=10**9)) as fetcher:
        assert fetcher.at_once == 3
        fetcher.fill(file, 1000, memoryview(buffer))
        assert bytes(buffer) == data[1000:1_501_000]
        bucket.put("model.safetensors", data[:-1] + b"x")
        with pytest.raises(CorruptDataError, match="changed while"):
            fetcher.fill(file, 0, memoryview(buffer))
        with pytest.raises(NotFoundError):
            fetcher.fill(replace(file, name="missing"), 0, memoryview(buffer))
        fetcher.cancel()
        with pytest.raises(RemoteError, match="cancelled"):
            fetcher.fill(file, 0, memoryview(buffer))


def test_a_file_that_changes_after_the_plan_ends_the_import(bucket: Bucket, tmp_path: Path) -> None:
    store = Store(tmp_path)
    plan = blobstore.plan_import(BucketFolder(bucket))
    data = (PYCODE / "model.safetensors").read_bytes()
    bucket.put("model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match="changed"):
        blobstore.run_plan(plan, M, store)
    assert list(store.models()) == []
