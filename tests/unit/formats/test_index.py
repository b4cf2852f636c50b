"""Every index of shards of the corpus gets its verdict, by the public reader."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import safetensors_bytes
from support.corpus import Case, accepted, refusal, rejected

from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.source.inventory import read_inventory

SHARDS = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
OTHER_SHARDS = {
    "index-dup-name": {"m1.safetensors": "a", "m2.safetensors": "a"},
    "index-total-size-float": {"m.safetensors": "a"},
    "index-tensor-in-two-shards": {"m1.safetensors": "a", "m2.safetensors": "a"},
}


def write_index_folder(case: Case, folder: Path) -> dict[str, str]:
    """Write the folder that an index case is about; return its shards: file name and tensor.

    Tensor ``a`` is F32 ``[1, 2]`` in a folder of one shard and ``[1]`` else, ``b`` is ``[2]``: the
    ``total_size`` of the accepted cases.
    """
    folder.mkdir()
    shards = OTHER_SHARDS.get(case.id, SHARDS)
    for file, name in shards.items():
        (folder / file).write_bytes(safetensors_bytes({name: index_tensor(name, len(shards))}))
    case.write(folder / "model.safetensors.index.json")
    return shards


def index_tensor(name: str, shards: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of a tensor of an index case's folder with so many shards."""
    return np.array([1, 2] if shards == 1 else [1 if name == "a" else 2], np.float32)


def test_indexes_to_accept(tmp_path: Path) -> None:
    for case in accepted("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        inventory = read_inventory(folder)
        assert {tensor.file.name: name for name, tensor in inventory.tensors.items()} == shards
        assert list(inventory.tensors) == sorted(shards.values())
        for name, tensor in inventory.tensors.items():
            stored = Path(tensor.file.path).read_bytes()[tensor.offset :][: tensor.nbytes]
            assert stored == index_tensor(name, len(shards)).tobytes()
        assert inventory.left_out == ()


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.abort, ())


def test_indexes_to_refuse(tmp_path: Path) -> None:
    for case in rejected("index"):
        folder = tmp_path / case.id
        shards = write_index_folder(case, folder)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
        error = refusal(lambda folder=folder: read_inventory(folder))  # type: ignore[misc]  # bound now
        is_missing = case.id == "index-missing-shard"
        assert isinstance(error, NotFoundError if is_missing else CorruptDataError)
        assert error.rule == case.rule
        assert str(folder) in str(error)
        for file, name in shards.items():  # nothing is wrong with the shards
            assert list(read_inventory(folder / file).tensors) == [name]
