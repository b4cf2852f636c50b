"""A store in a bucket, served: a registry's clients, the API, and a bucket that goes away."""

import json
import os
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from integration.cloud_services import moto_s3
from integration.shared_models import commit_tensors, same
from support.patient import serving

from blobstore import open_store, pull
from blobstore.io.objects import open_bucket
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.local.store import Store
from blobstore.store.transfer import transfer

pytestmark = pytest.mark.lab


def get(host: str, target: str, **fields: str) -> tuple[int, bytes]:
    with closing(HTTPConnection(host, timeout=600)) as connection:
        connection.request("GET", target, headers=fields)
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_models_of_a_bucket_that_loses_a_blob_and_goes_away(store: Store, tmp_path: Path) -> None:
    blob = commit_tensors(store, "m:int4", (100, 3000)).layers[1]
    path = store.root / "blobs" / blob.digest.file_name
    target = f"/v2/library/m/blobs/{blob.digest}"
    with ExitStack() as running:
        with moto_s3(tmp_path / "s3") as bucket:
            home = BucketStore(open_bucket(f"{bucket.address}/store", bucket.options))
            transfer("m:int4", store, home)
            place = ("--store", f"{bucket.address}/store", "--cache", str(tmp_path / "cache"))
            variables = {**os.environ, **bucket.environment}
            host = running.enter_context(serving(*place, environment=variables)).host
            bucket.store().delete(f"store/blobs/{path.name}")
            assert get(host, target)[0] == 404
            assert get(host, "/api/tensors?model=m:int4")[0] == 409
            bucket.store().put(f"store/blobs/{path.name}", path)
            assert get(host, target) == (200, path.read_bytes())
            assert get(host, target, range="bytes=1-5") == (206, path.read_bytes()[1:6])
            assert get(host, "/api/tensors?model=m:int4")[0] == 200
            pulled = open_store(tmp_path / "pulled")
            pull(f"{host}/library/m:int4", pulled, name="m:int4")
            assert same(store, pulled, "m:int4")
        status, body = get(host, "/api/models")
        assert (status, "error" in json.loads(body)) == (502, True)
        status, body = get(host, "/v2/library/m/manifests/int4")
        assert (status, json.loads(body)["errors"][0]["code"]) == (503, "UNAVAILABLE")
