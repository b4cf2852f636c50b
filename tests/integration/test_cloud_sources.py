"""Checkpoints in moto's S3 server: read, fetched, imported; what goes wrong is a typed error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import PYCODE, PYCODE_MOE
from support.registries import moto

import blobstore
from blobstore.cli.main import run
from blobstore.errors import BlobStoreError, ConflictError, CorruptDataError, NotFoundError
from blobstore.io.objects import Bucket, open_bucket
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import FetchOptions, fetching
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
KEYS = {"access_key_id": "k", "secret_access_key": "very-secret", "region": "us-east-1"}
BUCKET = "models"
"""What `moto` makes."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto")) as address:
        yield address


@pytest.fixture
def bucket(endpoint: str, request: pytest.FixtureRequest) -> Bucket:
    prefix = request.node.name.partition("[")[0]
    return open_bucket(f"s3://{BUCKET}/{prefix}", KEYS | {"endpoint": endpoint})


def upload(bucket: Bucket, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            pieces = [path.read_bytes()]
            bucket.upload(str(path.relative_to(folder)), pieces)


@pytest.mark.parametrize("source", [PYCODE, PYCODE_MOE], ids=lambda path: path.name)
@pytest.mark.parametrize("quant", [None, "int4", "nvfp4"])
def test_blobs_are_those_of_the_folder(
    bucket: Bucket, endpoint: str, tmp_path: Path, source: Path, quant: str | None
) -> None:
    upload(bucket, source)
    store = Store(tmp_path)
    with blobstore.open_folder(
        bucket.address, bucket_options=KEYS | {"endpoint": endpoint}
    ) as folder:
        far = blobstore.import_model(folder, "far", store=store, quant=quant)
    near = blobstore.import_model(source, "near", store=store, quant=quant)
    layers = [{layer.name: layer.digest for layer in one.manifest.layers} for one in (far, near)]
    own = [one.pop("blobstore.json") for one in layers]
    assert layers[0] == layers[1]
    assert own[0] != own[1]
    with blobstore.open_model("far", store=store) as model:
        (file, *_) = json.loads(model.document("blobstore.json"))["sources"]
    assert file["version"] == bucket.head(file["name"]).version.etag


def test_commands(
    bucket: Bucket,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upload(bucket, PYCODE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    store = ["--store", str(tmp_path / "store")]
    for arguments in (
        ["inspect", bucket.address],
        ["inspect", f"{bucket.address}/model.safetensors"],
        ["plan", bucket.address, "--quant", "int8"],
        ["import", bucket.address, "m", "--quant", "int8", *store],
        ["quality", "m", "--against", bucket.address, *store],
    ):
        assert run(arguments) == 0, capsys.readouterr().err
    assert run(["import", f"s3://{BUCKET}/nothing", *store]) == 1
    assert run(["inspect", "s3://no-such-bucket/x"]) == 1
    assert "its bucket does not exist" in capsys.readouterr().err


def test_ranges_by_many_threads(bucket: Bucket, endpoint: str) -> None:
    upload(bucket, PYCODE)
    data = (PYCODE / "model.safetensors").read_bytes()
    options = KEYS | {"endpoint": endpoint}
    with blobstore.open_folder(bucket.address, bucket_options=options) as folder:
        (file,) = read_inventory(folder).files
        with fetching([file], FetchOptions()) as fetcher:

            def fetch(begin: int) -> bytes:
                buffer = bytearray(min(700_001, len(data) - begin))
                fetcher.fill(file, begin, memoryview(buffer))
                return bytes(buffer)

            with ThreadPoolExecutor(8) as pool:
                assert b"".join(pool.map(fetch, range(0, len(data), 700_001))) == data
            bucket.put("model.safetensors", b"another")
            with pytest.raises(CorruptDataError, match="changed"):
                fetch(0)


def test_conditional_writes(bucket: Bucket) -> None:
    """Sixteen writers, one name: each version is replaced once."""
    bucket.put("tag", b"0", if_absent=True)
    done, lock = [0], threading.Lock()

    def count(_: int) -> None:
        while True:
            data, version = bucket.get("tag")
            try:
                bucket.put("tag", b"%d" % (int(data) + 1), if_match=version)
            except ConflictError:
                continue
            with lock:
                done[0] += 1
            return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(16)))
    assert (bucket.get("tag")[0], done) == (b"16", [16])


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda bucket: bucket.get("missing"), NotFoundError),
        (lambda bucket: bucket.head("missing"), NotFoundError),
        (lambda bucket: bucket.copy("missing", "x"), NotFoundError),
        (lambda bucket: bucket.delete(["missing"]), None),
    ],
)
def test_what_is_missing(
    bucket: Bucket, act: Callable[[Bucket], object], kind: type[BlobStoreError] | None
) -> None:
    if kind is None:
        act(bucket)
        return
    with pytest.raises(kind) as caught:
        act(bucket)
    assert "very-secret" not in str(caught.value)


def test_the_service_is_gone() -> None:
    bucket = open_bucket("s3://b/p", KEYS | {"endpoint": "http://127.0.0.1:9"})
    with pytest.raises(BlobStoreError, match="can't read s3://b/p/x"):
        bucket.get("x")
