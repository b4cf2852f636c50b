"""A store in a bucket, served: a registry's clients, the API, and a bucket that goes away."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support import PYCODE
from support.cloud_services import s3
from support.patient import serving
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


@pytest.fixture
def local(store: Store) -> Store:
    blobstore.import_model(PYCODE, NAME, store=store, quant="int4")
    return store


def get(host: str, target: str, **fields: str) -> tuple[int, bytes]:
    connection = HTTPConnection(host, timeout=600)
    try:
        connection.request("GET", target, headers=fields)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_models_of_a_bucket_that_loses_a_blob_and_goes_away(local: Store, tmp_path: Path) -> None:
    manifest = local.manifest(NAME)
    blob = manifest.tensor_layers[0]
    path = local.root / "blobs" / blob.digest.file_name
    with ExitStack() as running:
        with s3(tmp_path / "s3") as bucket:
            home = BucketStore(open_bucket(f"{bucket.address}/store", bucket.options))
            transfer(NAME, local, home)
            place = ("--store", f"{bucket.address}/store", "--cache", str(tmp_path / "cache"))
            variables = {**os.environ, **bucket.environment}
            host = running.enter_context(serving(*place, environment=variables)).host
            bucket.store().delete(f"store/blobs/{path.name}")
            assert get(host, f"{BLOBS}{blob.digest}")[0] == 404
            assert get(host, f"/api/tensors?model={NAME}")[0] == 409
            bucket.store().put(f"store/blobs/{path.name}", path)
            assert get(host, f"{BLOBS}{blob.digest}") == (200, path.read_bytes())
            found = get(host, f"{BLOBS}{blob.digest}", range="bytes=1-5")
            assert found == (206, path.read_bytes()[1:6])
            assert get(host, f"/api/tensors?model={NAME}")[0] == 200
            pulled = blobstore.open_store(tmp_path / "pulled")
            pull(f"{host}/library/{NAME}", pulled, name=NAME)
            assert pulled.manifest(NAME).raw == manifest.raw
            source = f"docker://{host}/library/{NAME}"
            skopeo("copy", "--src-tls-verify=false", source, f"oci:{tmp_path / 'oci'}:x")
        status, body = get(host, "/api/models")
        assert (status, "error" in json.loads(body)) == (502, True)
        status, body = get(host, f"/v2/library/{NAME.replace(':', '/manifests/')}")
        assert (status, json.loads(body)["errors"][0]["code"]) == (503, "UNAVAILABLE")
