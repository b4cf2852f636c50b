"""Every index of shards of the corpus gets its verdict, by the public reader."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.corpus import (
    accepted,
    find,
    index_tensor,
    refusal,
    rejected,
    write_index_folder,
)

from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.source.inventory import read_inventory


def test_indexes_to_accept(tmp_path: Path) -> None:
    for case in accepted("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        inventory = read_inventory(folder)
        assert {tensor.file.name: name for name, tensor in inventory.tensors.items()} == shards
        assert list(inventory.tensors) == sorted(shards.values())
        for name, tensor in inventory.tensors.items():
            values = index_tensor(name, len(shards))
            data = Path(tensor.file.path).read_bytes()[
                tensor.offset : tensor.offset + tensor.nbytes
            ]
            assert (tensor.dtype.value, tensor.shape) == ("F32", values.shape)
            assert data == values.tobytes()
        assert inventory.left_out == ()


@dataclass
class Bomb:
    """A pickle that leaves a file behind when anything unpickles it."""

    path: Path

    def __reduce__(self) -> tuple[object, ...]:
        """Say what unpickling calls."""
        return (Path.touch, (self.path,))


def test_indexes_to_refuse(tmp_path: Path) -> None:
    for case in rejected("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        bomb = pickle.dumps(Bomb(tmp_path / "unpickled"))
        (folder / "pytorch_model.bin").write_bytes(bomb)
        error = refusal(lambda folder=folder: read_inventory(folder))  # type: ignore[misc]  # bound now
        is_missing = case.id == "index-missing-shard"
        assert isinstance(error, NotFoundError if is_missing else CorruptDataError)
        assert error.rule == case.rule
        assert str(folder) in str(error)
        assert not (tmp_path / "unpickled").exists()
        for file, name in shards.items():  # nothing is wrong with the shards
            assert list(read_inventory(folder / file).tensors) == [name]


@pytest.mark.parametrize(
    ("name", "empty", "tensor"),
    [
        ("index-missing-tensor", "model-00001-of-00002.safetensors", "zzz"),
        ("index-wrong-shard", "model-00002-of-00002.safetensors", "a"),
    ],
)
def test_a_shard_without_the_tensor_that_the_index_promises(
    name: str, empty: str, tensor: str, tmp_path: Path
) -> None:
    write_index_folder(find("index", name), tmp_path / "model", empty)
    error = refusal(lambda: read_inventory(tmp_path / "model"))
    assert isinstance(error, CorruptDataError)
    assert (error.rule, error.tensor) == ("I1", tensor)
    assert empty in str(error)
