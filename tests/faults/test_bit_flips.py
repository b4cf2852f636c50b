"""`verify` finds any single bit flip in a store, and never reports a sound store."""

import random
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint

import blobstore
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    ("flips", "clean"),
    [(60, 2), pytest.param(20_000, 200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
    ids=["short", "long"],
)
def test_exactly_the_flips_are_found(store: Store, tmp_path: Path, flips: int, clean: int) -> None:
    source = write_checkpoint(tmp_path, {**small_tensors(), "odd": normal("odd", 3)})
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    blobstore.import_model(source, "int4", store=store, quant="int4", licenses=["MIT"])
    blobstore.import_model(source, "mxfp8", store=store, quant="mxfp8", rules=["lm_head*=none"])
    blobs = sorted(store.blobs.path.iterdir())
    manifests = sorted(path for path in store.manifests.path.rglob("*") if path.is_file())
    kept = {path: path.read_bytes() for path in (*blobs, *manifests)}
    sizes, chance, missed = [len(data) for data in kept.values()], random.Random(20_260_809), []
    for number in range(flips):
        # Half of them by the byte, and half by the file: most files are small.
        path = chance.choices(list(kept), sizes if number % 2 else None)[0]
        data = bytearray(kept[path])
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        result = verify(store, jobs=1)
        names = [blob.digest.file_name for blob in result.damaged]
        is_blob = path in blobs  # a manifest may then name a blob of another size, too
        if len(result.broken) != (not is_blob) or (is_blob and names != [path.name]):
            missed.append((path, at, bit, result))
        path.write_bytes(kept[path])
    assert missed == []
    alarms = [result for _ in range(clean) if not (result := verify(store)).is_sound or result.odd]
    assert alarms == []
