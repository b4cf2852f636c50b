"""A store in a bucket, served: a registry's clients, the API, and a bucket that goes away."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support import PYCODE
from support.cloud_services import CloudBucket, s3
from support.patient import patient
from support.registries import skopeo

import blobstore
from blobstore import pull
from blobstore.io.objects import open_bucket
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.local.store import Store
from blobstore.store.transfer import transfer

pytestmark = pytest.mark.lab
NAME = "pycode-5m:int4"
BLOBS = "/v2/library/pycode-5m/blobs/"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = blobstore.open_store(tmp_path_factory.mktemp("local") / "store")
    blobstore.import_model(PYCODE, NAME, store=store, quant="int4")
    return store


@contextmanager
def serving(bucket: CloudBucket, folder: Path) -> Iterator[str]:
    """Serve the store in a bucket, with a cache in the folder; give host and port."""
    place = ["--store", f"{bucket.address}/store", "--cache", str(folder / "cache")]
    line = patient("serve", "--port", "0", *place)
    variables = {**os.environ, **bucket.environment}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().rstrip("/\n").rpartition("/")[2]
        finally:
            process.terminate()


def fill(bucket: CloudBucket, local: Store) -> None:
    transfer(NAME, local, BucketStore(open_bucket(f"{bucket.address}/store", bucket.options)))


def get(host: str, target: str, **fields: str) -> tuple[int, bytes]:
    connection = HTTPConnection(host, timeout=600)
    try:
        connection.request("GET", target, headers=fields)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_models_of_a_bucket_are_pulled(local: Store, tmp_path: Path) -> None:
    with s3(tmp_path / "s3") as bucket:
        fill(bucket, local)
        with serving(bucket, tmp_path) as host:
            pulled = blobstore.open_store(tmp_path / "pulled")
            pull(f"{host}/library/{NAME}", pulled, name=NAME)
            assert pulled.manifest(NAME).raw == local.manifest(NAME).raw
            source = f"docker://{host}/library/{NAME}"
            skopeo("copy", "--src-tls-verify=false", source, f"oci:{tmp_path / 'oci'}:x")
            for blob in local.manifest(NAME).descriptors:
                status, data = get(host, f"{BLOBS}{blob.digest}")
                assert (status, hashlib.sha256(data).hexdigest()) == (200, blob.digest.hex)
                status, part = get(host, f"{BLOBS}{blob.digest}", range="bytes=1-5")
                assert (status, part) == (206, data[1:6])
            status, page = get(host, f"/api/tensors?model={NAME}")
            assert (status, len(json.loads(page)["names"])) == (200, 47)


def test_a_blob_that_the_bucket_lost_and_got_back(local: Store, tmp_path: Path) -> None:
    blob = local.manifest(NAME).tensor_layers[0]
    path = local.root / "blobs" / blob.digest.file_name
    with s3(tmp_path / "s3") as bucket:
        fill(bucket, local)
        bucket.store().delete(f"store/blobs/{path.name}")
        with serving(bucket, tmp_path) as host:
            assert get(host, f"{BLOBS}{blob.digest}")[0] == 404
            assert get(host, f"/api/tensors?model={NAME}")[0] == 409
            bucket.store().put(f"store/blobs/{path.name}", path)
            assert get(host, f"{BLOBS}{blob.digest}") == (200, path.read_bytes())
            assert get(host, f"/api/tensors?model={NAME}")[0] == 200


def test_a_bucket_that_does_not_answer_is_an_error(local: Store, tmp_path: Path) -> None:
    with ExitStack() as running:
        with s3(tmp_path / "s3") as bucket:
            fill(bucket, local)
            host = running.enter_context(serving(bucket, tmp_path))
            assert get(host, f"/v2/library/{NAME.replace(':', '/manifests/')}")[0] == 200
        status, body = get(host, "/api/models")
        assert (status, "error" in json.loads(body)) == (502, True)
        status, body = get(host, f"/v2/library/{NAME.replace(':', '/manifests/')}")
        assert (status, json.loads(body)["errors"][0]["code"]) == (503, "UNAVAILABLE")
