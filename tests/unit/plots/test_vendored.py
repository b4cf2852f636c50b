"""The bundled scripts are the published files that the lock names."""

from __future__ import annotations

import hashlib
import json

import pytest
from support import ROOT

VENDOR = ROOT / "src/blobstore/web/static/vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text())
FILES = {
    row["file"]: row["sha256"] for row in [*VENDORED["packages"].values(), VENDORED["licences"]]
}


@pytest.mark.parametrize("file", FILES)
def test_bundled_files_have_their_digests(file: str) -> None:
    assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == FILES[file]


def test_versions_are_those_of_the_lock() -> None:
    locked = json.loads((ROOT / ".ci/vega/package-lock.json").read_text())["packages"]
    for name, row in VENDORED["packages"].items():
        assert locked[f"node_modules/{name}"]["version"] == row["version"]
        assert locked[f"node_modules/{name}"]["integrity"].startswith("sha512-")


def test_nothing_else_is_bundled() -> None:
    assert {path.name for path in VENDOR.iterdir()} == {*FILES, "vendored.json"}
