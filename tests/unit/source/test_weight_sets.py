"""Which files of a folder are a checkpoint's weights, by the names that loaders know."""

import json
from pathlib import Path

import pytest
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)

from blobstore.errors import NotFoundError, UnsupportedSourceError
from blobstore.source.files import weight_sets
from blobstore.source.inventory import read_inventory


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["model.fp16.safetensors", "model.safetensors", "consolidated.safetensors"], ["model"]),
        (["model.fp16.safetensors", "other.safetensors"], ["model.fp16"]),
        (["model.bf16.safetensors", "model.fp16.safetensors"], ["model.bf16", "model.fp16"]),
        (["consolidated.safetensors", "model.fp16.safetensors"], ["consolidated", "model.fp16"]),
    ],
)
def test_which_sets_count(names: list[str], expected: list[str]) -> None:
    assert [found.name for found in weight_sets(names)] == expected


def write(folder: Path, *names: str, index: str | None = None) -> Path:
    """Write a checkpoint whose tensors are split into files of these names, with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    places = {tensor: names[number % len(names)] for number, tensor in enumerate(small_tensors())}
    for name in names:
        own = {tensor: array for tensor, array in small_tensors().items() if places[tensor] == name}
        (folder / name).write_bytes(safetensors_bytes(own))
    if index is not None:
        (folder / index).write_text(json.dumps({"weight_map": places}))
    return folder


FP16_INDEX = "model.safetensors.index.fp16.json"


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.fp16.safetensors"], None),
        ([f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)], FP16_INDEX),
    ],
)
def test_the_only_weights_are_read(tmp_path: Path, names: list[str], index: str | None) -> None:
    source = write(tmp_path / "m", *names, index=index)
    (source / "adapter.safetensors").write_bytes(safetensors_bytes({"other": normal("o", 3)}))
    inventory = read_inventory(source)
    assert [one.name for one in inventory.files] == names
    assert [one.name for one in inventory.left_out] == ["adapter.safetensors"]
    assert inventory.tensors.keys() == small_tensors().keys()


def test_several_sets_are_offered(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "model.bf16.safetensors")
    write(folder, "model.fp16-00001-of-00001.safetensors", index=FP16_INDEX)
    with pytest.raises(UnsupportedSourceError, match=r"model\.bf16, model\.fp16") as caught:
        read_inventory(folder)
    offered = [folder / "model.bf16.safetensors", folder / FP16_INDEX]
    assert f"{offered[0]} or {offered[1]}" in (caught.value.hint or "")
    for target in offered:
        assert len(read_inventory(target).tensors) == len(small_tensors())


def test_a_variant_may_hold_what_the_index_names(tmp_path: Path) -> None:
    """Another file with a tensor of the index is an error; the model in another dtype is not."""
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    folder = write(tmp_path / "m", *shards, index="model.safetensors.index.json")
    write(folder, "model.fp16.safetensors")
    assert [file.name for file in read_inventory(folder).files] == shards
    assert [one.name for one in read_inventory(folder).left_out] == ["model.fp16.safetensors"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("-00002-of-00002", "-00001-of-00002"),
        (".fp16-00001-of-00002", ".fp16-00002-of-00002"),
        ("-000001-of-010000", "-000002-of-010000"),
    ],
)
def test_a_missing_shard_is_named(tmp_path: Path, name: str, missing: str) -> None:
    """The shards' own names say how many there must be; a claim costs nothing."""
    with pytest.raises(NotFoundError, match=f"model{missing}.safetensors"):
        read_inventory(write(tmp_path / "m", f"model{name}.safetensors"))


# Adapters

Q = "layers.0.self_attn.q_proj"
PEFT = {f"base_model.model.model.{Q}.lora_{part}.weight": normal(part, 8, 64) for part in "AB"}
MLX = {f"model.{Q}.lora_{part}": normal(part, 8, 64) for part in "ab"}


def test_an_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for name, tensors, target in (
        ("adapter_model.safetensors", PEFT, tmp_path),
        ("x.safetensors", MLX, tmp_path / "x.safetensors"),
    ):
        (tmp_path / name).write_bytes(safetensors_bytes(tensors))
        with pytest.raises(UnsupportedSourceError, match="is an adapter") as caught:
            read_inventory(target)
        assert caught.value.path == str(tmp_path / name)
        assert "--adapter" in (caught.value.hint or "")


def test_a_model_with_an_adapter_beside_it_or_in_it_is_a_model(tmp_path: Path) -> None:
    speech = {f"model.{Q}.lora_A.speech.weight": normal("l", 8, 64)}
    folder = write_checkpoint(tmp_path / "m", {**small_tensors(), **speech})
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(PEFT))
    inventory = read_inventory(folder)
    assert [one.name for one in inventory.left_out] == ["adapter_model.safetensors"]
