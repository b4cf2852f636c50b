"""`verify` finds any single bit flip in a store, and never reports a sound store.

``pytest -m long tests/faults/test_bit_flips.py`` is the long form: 20,000 flips and 200 clean runs.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint

import blobstore
from blobstore.names import ModelName
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = pytest.mark.lab
FORMS = pytest.mark.parametrize(
    ("flips", "clean"),
    [(60, 2), pytest.param(20_000, 200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
    ids=["short", "long"],
)


def small_store(folder: Path) -> Store:
    """Return a store of two models that share blobs, and a third one.

    They have tensors of three types, documents and a licence.
    """
    store = open_store(folder / "store")
    tensors = {name: array for name, array in small_tensors().items() if "embed" not in name}
    source = write_checkpoint(folder / "a", {**tensors, "odd": normal("odd", 3)})
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    blobstore.import_model(
        source, "int4", store=store, quant="int4", licenses=["MIT"], parameters=["temperature=0.5"]
    )
    blobstore.import_model(source, "mxfp8", store=store, quant="mxfp8", rules=["lm_head*=none"])
    store.copy(ModelName.parse("int4"), ModelName.parse("example.org/team/copy:tag"))
    return store


@FORMS
def test_every_flip_is_found_and_nothing_else(tmp_path: Path, flips: int, clean: int) -> None:
    chance = random.Random(20_260_809)
    store = small_store(tmp_path)
    files = sorted(
        path
        for folder in ("blobs", "manifests")
        for path in (store.root / folder).rglob("*")
        if path.is_file()
    )
    kept = {path: path.read_bytes() for path in files}
    missed = []
    for number in range(flips):
        # Half of them by the byte, and half by the file: most files are small.
        path = (
            chance.choices(files, [len(data) for data in kept.values()])[0]
            if number % 2
            else chance.choice(files)
        )
        data = bytearray(kept[path])
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        result = verify(store, jobs=1)
        digests = {blob.digest.file_name for blob in result.damaged}
        is_found = path.name in digests if path.parent.name == "blobs" else len(result.broken) == 1
        if not is_found or (path.parent.name == "blobs" and (len(digests) != 1 or result.broken)):
            missed.append((path, at, bit, result))
        path.write_bytes(kept[path])
    assert missed == []
    alarms = [result for _ in range(clean) if not (result := verify(store)).is_sound or result.odd]
    assert alarms == []
    shutil.rmtree(store.root)
