"""Shards without an index: their own names say how many there must be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import safetensors_bytes, small_tensors

from blobstore.errors import NotFoundError
from blobstore.source.inventory import read_inventory


def write_shards(folder: Path, *names: str) -> Path:
    tensors = list(small_tensors().items())
    for position, name in enumerate(names):
        (folder / name).write_bytes(safetensors_bytes(dict(tensors[position :: len(names)])))
    return folder


def test_complete_shards_are_one_checkpoint(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    inventory = read_inventory(write_shards(tmp_path, *names))
    assert [file.name for file in inventory.files] == names
    assert inventory.tensors.keys() == small_tensors().keys()


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_shard_is_named(tmp_path: Path, missing: int) -> None:
    names = [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3) if number != missing
    ]
    with pytest.raises(NotFoundError, match=f"model-0000{missing}-of-00003.safetensors is missing"):
        read_inventory(write_shards(tmp_path, *names))


def test_a_claimed_million_shards_cost_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="model-000002-of-999999"):
        read_inventory(write_shards(tmp_path, "model-000001-of-999999.safetensors"))
