"""The scanner of manifests and the parser agree: in their values, and every error is the parser's.

`python tests/fuzz/test_manifest_fuzz.py 1000000` tries more.
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import pytest
from manifest_inputs import HEX, damaged
from support.corpus import Case, case_id, load

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import MAX_BLOB, Descriptor, Manifest
from blobstore.names import Digest

INPUTS = 4000
LAYER = {"mediaType": "m", "digest": f"sha256:{HEX}", "size": 5}


def outcome(read: Any) -> Any:
    """Return a manifest, as a text that shows types, or an error."""
    try:
        found = read()
    except BlobStoreError as error:
        return type(error), str(error), error.rule
    return repr(found), hash(found), found.descriptors


def is_scanned(raw: bytes) -> bool:
    """Check that both readers agree; return whether the scanner accepts the manifest."""
    scanned = Manifest._scanned(raw, "m")
    parsed = outcome(lambda: Manifest._read(raw, "m"))
    assert scanned is None or outcome(lambda: scanned) == parsed, raw
    whole = outcome(lambda: Manifest.parse(raw, "m"))
    assert isinstance(parsed[0], type) == isinstance(whole[0], type), raw
    if isinstance(parsed[0], type):
        assert whole == parsed, raw
    return scanned is not None


def agreeing(seed: str, inputs: int) -> tuple[int, int]:
    """Return how many inputs are valid, and how many the scanner accepts."""
    random = Random(seed)
    valid = scanned = 0
    for _ in range(inputs):
        raw = damaged(random)
        scanned += is_scanned(raw)
        valid += not isinstance(outcome(lambda raw=raw: Manifest.parse(raw))[0], type)
    return valid, scanned


def test_scanner_and_parser_agree_on_damaged_manifests() -> None:
    valid, scanned = agreeing("manifests", INPUTS)
    assert INPUTS / 5 < scanned <= valid < INPUTS * 4 / 5


@pytest.mark.parametrize(
    "case", [one for one in load("manifest") if not one.by_recipe], ids=case_id
)
def test_they_agree_on_the_corpus(case: Case) -> None:
    is_scanned(case.data)


def test_the_scanner_reads_what_ollama_and_blobstore_write() -> None:
    layers = tuple(
        Descriptor("m", Digest(HEX), size, source, name)
        for size, source, name in (
            (0, None, None),
            (MAX_BLOB, "a", "ä.<&>"),
            (5, None, '"\\\u2028'),
        )
    )
    manifest = Manifest(config=layers[0], layers=layers)
    scanned = Manifest._scanned(manifest.raw, "m")
    assert scanned == manifest
    assert scanned is not None
    assert [type(one.digest) for one in scanned.layers] == [Digest] * 3


@pytest.mark.parametrize(
    "layer",
    [
        {**LAYER, "size": MAX_BLOB + 1},
        {**LAYER, "size": 2**64 + 5},
        {**LAYER, "size": 5.0},
        {**LAYER, "size": True},
        {**LAYER, "size": -1},
        {**LAYER, "mediaType": "é" * 256},
        {**LAYER, "mediaType": None},
        {**LAYER, "digest": f"sha256:{HEX}0"},
        {**LAYER, "digest": f"sha256:{HEX[:-1]}A"},
        {**LAYER, "digest": f"sha512:{HEX}"},
        {**LAYER, "name": 1},
        {**LAYER, "from": []},
        {key: LAYER[key] for key in ("mediaType", "digest")},
        {key: LAYER[key] for key in ("mediaType", "size")},
        {key: LAYER[key] for key in ("digest", "size")},
        [],
        None,
    ],
    ids=repr,
)
def test_a_layer_that_is_refused(layer: object) -> None:
    raw = json.dumps({"schemaVersion": 2, "layers": [LAYER, layer]}).encode()
    assert not is_scanned(raw)
    with pytest.raises(BlobStoreError, match=r"m: layers\.1"):
        Manifest.parse(raw, "m")


@pytest.mark.parametrize(
    "text",
    [
        b'{"schemaVersion":2,"layers":[%s],"layers":[]}',
        b'{"schemaVersion":2,"layers":[],"l\\u0061yers":[%s]}',
        b'{"schemaVersion":2,"layers":[%s,]}',
        b'{"schemaVersion":2,"layers":[%s],"x":NaN}',
        b'{"schemaVersion":2,"layers":[%s],"x":{"a":1,"a":2}}',
        b'{"schemaVersion":2,"layers":[%s]} x',
        b'{"schemaVersion":2,"layers":[%s]}\0',
        b'{"schemaVersion":2,"layers":[%s],"manifests":[]}',
        b'{"schemaVersion":3,"layers":[%s]}',
        b'{"layers":[%s]}',
        b'[{"layers":[%s]}]',
        b'{"schemaVersion":2,"x":"\xff","layers":[%s]}',
        b'{"schemaVersion":2,"x":[{"layers":[%s]}]}',
    ],
)
def test_a_sound_layer_in_a_manifest_that_is_refused(text: bytes) -> None:
    raw = text % json.dumps(LAYER).encode()
    assert not is_scanned(raw)
    with pytest.raises(BlobStoreError):
        Manifest.parse(raw)


if __name__ == "__main__":
    print(agreeing(sys.argv[2] if len(sys.argv) > 2 else "long", int(sys.argv[1])))
