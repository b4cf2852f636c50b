"""The API as its own document describes it: thousands of requests made of the OpenAPI document.

schemathesis makes valid and invalid requests, and checks status, type and schema of each answer.
The store has a model of real weights, one with hostile names, one that is damaged, and results.
"""

from __future__ import annotations

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
TENSORS = {TINY: "model.norm.weight", ODD: HOSTILE, BROKEN: "x", DAMAGED: "x"}
"""The models, each with a tensor to ask for."""


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


def calls(host: str, folder: Path, model: str | None, examples: int) -> int:
    """Return how many requests schemathesis made, none of which showed a violation.

    ``model``: asked for wherever a model is, if that is not left to chance.
    """
    folder.mkdir()
    config = folder / "schemathesis.toml"
    config.write_text("" if model is None else _parameters(model))
    document = folder / "openapi.json"  # schemathesis itself waits 10 seconds for it at most
    with urlopen(f"http://{host}/api/openapi.json", timeout=300) as answer:  # our own server
        document.write_bytes(answer.read())
    line = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    line += [str(document), "--url", f"http://{host}"]
    options = ["--max-examples", str(examples), "--seed", "1", "--workers", "2", "--no-color"]
    options += ["--request-timeout", "300"]
    done = subprocess.run(
        [*line, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert found is not None, done.stdout[-3000:]
    assert found[1] == found[2], done.stdout[-3000:]
    return int(found[1])


def _parameters(model: str) -> str:
    values = {"name": model, "a": model, "b": TINY, "tensor": TENSORS[model]}
    lines = [f'"query.{name}" = {json.dumps(value)}' for name, value in values.items()]
    return "\n".join(["[parameters]", *lines, f'"query.model" = "{model}"', ""])


def test_requests_made_of_the_document_are_answered_as_it_says(root: Path, tmp_path: Path) -> None:
    with serving("--store", str(root)) as served:
        chance = calls(served.host, tmp_path / "chance", None, 8)
        known = calls(served.host, tmp_path / "known", TINY, 4)
    assert chance + known > 150


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_requests_are_answered_as_the_document_says(
    root: Path, tmp_path: Path
) -> None:
    with serving("--store", str(root)) as served:
        total = calls(served.host, tmp_path / "chance", None, 560)
        for number, model in enumerate(TENSORS):
            total += calls(served.host, tmp_path / f"known{number}", model, 60)
    assert total >= 5000
