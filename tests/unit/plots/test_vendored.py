"""The bundled scripts are those that their list names."""

import hashlib
import json

from support import ROOT

VENDOR = ROOT / "src/blobstore/web/static/vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text())
FILES = {
    row["file"]: row["sha256"] for row in [*VENDORED["packages"].values(), VENDORED["licences"]]
}


def test_bundled_files_have_their_digests_and_are_all() -> None:
    found = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
    del found["vendored.json"]
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == FILES
