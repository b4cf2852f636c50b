"""An import from end to end: names, results, reuse, and odd tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore.errors import InvalidNameError
from blobstore.names import ModelName
from blobstore.store.local.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("path", "quant", "name"),
    [
        ("llama-3.2", "q8", "llama-3.2:int8"),
        ("llama-3.2/../llama-3.2/.", None, "llama-3.2:latest"),
        ("llama-3.2/v1.5.safetensors", "mxfp4", "v1.5:mxfp4"),
    ],
)
def test_names_made_from_the_source(
    store: Store, tmp_path: Path, path: str, quant: str | None, name: str
) -> None:
    folder = write_checkpoint(tmp_path / "llama-3.2")
    (folder / "v1.5.safetensors").symlink_to(folder / "model.safetensors")
    result = blobstore.import_model(f"{tmp_path}/{path}", store=store, quant=quant)
    assert [str(found) for found, _ in store.models()] == [str(result.name)] == [name]


@pytest.mark.parametrize("folder", ["with space", "é"])
def test_a_source_whose_name_is_not_a_model_name_needs_one(
    store: Store, tmp_path: Path, folder: str
) -> None:
    write_checkpoint(tmp_path / folder)
    for name in (None, "../x"):
        with pytest.raises(InvalidNameError):
            blobstore.import_model(tmp_path / folder, name, store=store)
    assert not store.root.exists()
    text = blobstore.import_model(tmp_path / folder, "example.org/team/x:y", store=store)
    value = blobstore.import_model(tmp_path / folder, ModelName(model="z"), store=store)
    assert text.digest == value.digest


def test_imports_reuse_what_they_have_in_common(
    store: Store, source: Path, snapshot: Callable[[Store], dict[str, str]]
) -> None:
    first = blobstore.import_model(source, "m", store=store, quant="int4")
    before = snapshot(store)
    second = blobstore.import_model(source, "m", store=store, quant="int4")
    assert (second.created, second.reused, second.new_bytes) == (0, first.created, 0)
    assert (second.digest, second.stored_bytes) == (first.digest, first.stored_bytes)
    assert snapshot(store) == before
    other = blobstore.import_model(source, "m", store=store, quant="int8")
    # Embedding, norm, config.json; head and down_proj, which are int8 in both.
    assert other.reused == 5
    assert store.manifest(other.name).digest == other.digest  # the name is the new model's


@pytest.mark.parametrize(("quant", "experts"), [("int4", "stacked"), ("nvfp4", "packed")])
def test_odd_tensors_beside_quantized_experts_come_back(
    store: Store, tmp_path: Path, quant: str, experts: str
) -> None:
    """Integers, scales of nothing, empty tensors, and names that quantized formats use."""
    group = "model.layers.0.mlp.experts"
    tensors = {f"{group}.{e}.up_proj.weight": normal(str(e), 32, 64) for e in range(2)}
    odd: dict[str, Any] = {
        f"{group}.map": np.arange(4, dtype=np.uint32),
        **{f"{group}.{e}.up_proj.bias": normal("b", 32) for e in range(2)},
        "x.weight": np.arange(64, dtype=np.uint32),
        "x.scale": np.ones(3, np.uint8),
        "y.weight": np.zeros((0, 64), np.float32),
        "stem_blocks": normal("s", 4, 8, dtype=np.float32),
    }
    source = write_checkpoint(tmp_path / "odd", tensors | odd)
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name, array in odd.items():
            assert bits(model[name].numpy()) == bits(array), name
