"""The API as its own document describes it: requests made of the OpenAPI document.

schemathesis makes valid and invalid requests, and checks status, type and schema of each answer.
The store has a model of real weights, one with hostile names, one that is damaged, and results.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from support import PYCODE
from support.large_models import blob_of
from support.patient import serving
from support.stores import link_by_hand, manifest_path

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x00.weight"
TINY, ODD, BROKEN, DAMAGED = "tiny:int4", "odd:int4", "broken:int4", "damaged:int4"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store of whole, odd and damaged models, with results."""
    store = Store(tmp_path_factory.mktemp("served") / "store")
    blobstore.import_model(PYCODE, TINY, store=store, quant="int4")
    link_by_hand(store, ODD, {HOSTILE: blob_of([HOSTILE, "a.norm"], "a")})
    link_by_hand(store, BROKEN, {"x": blob_of(["x"], "b")})
    (blob,) = store.manifest(BROKEN).tensor_layers
    (store.root / "blobs" / blob.digest.file_name).unlink()
    manifest_path(store, DAMAGED).parent.mkdir(parents=True)
    manifest_path(store, DAMAGED).write_text("{")
    words = ["--store", str(store.root)]
    assert run(["quality", TINY, "--against", str(PYCODE), *words]) == 0
    assert run(["verify", *words]) == 3
    return store.root


def test_requests_made_of_the_document_are_answered_as_it_says(root: Path, tmp_path: Path) -> None:
    """Of a model that is there, if a query is not to be wrong."""
    values = {"name": TINY, "model": TINY, "a": TINY, "b": ODD, "tensor": "model.norm.weight"}
    lines = [f'"query.{name}" = {json.dumps(value)}' for name, value in values.items()]
    (tmp_path / "schemathesis.toml").write_text("\n".join(["[parameters]", *lines, ""]))
    document = tmp_path / "openapi.json"  # schemathesis itself waits 10 seconds for it at most
    with serving("--store", str(root)) as served:
        with urlopen(f"http://{served.host}/api/openapi.json", timeout=300) as answer:  # ours
            document.write_bytes(answer.read())
        line = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml"]
        line += ["run", str(document), "--url", f"http://{served.host}", "--max-examples", "2"]
        line += ["--seed", "1", "--workers", "2", "--no-color", "--request-timeout", "300"]
        line += ["--suppress-health-check", "all"]  # a busy machine makes examples slowly
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert found is not None, done.stdout[-3000:]
    assert int(found[1]) == int(found[2]) > 50
