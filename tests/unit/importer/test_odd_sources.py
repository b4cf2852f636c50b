"""Sources with odd names, shapes and companions: refused before a write, or read right."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)

import blobstore
from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    StorageError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.source.inventory import read_inventory
from blobstore.store.local.store import Store


@pytest.mark.parametrize("path", ["a" * 300, "a\0b", "/proc/1/root/../../\udcff/" + "x" * 300])
def test_paths_that_no_file_can_have(path: str) -> None:
    with pytest.raises(StorageError):
        blobstore.plan_import(path)


@pytest.mark.parametrize("name", [b"\xff.json", b"a:b.json", b"new\nline.json"])
def test_documents_that_could_not_be_files_again(tmp_path: Path, name: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).open("wb") as file:
        file.write(b"{}")
    with pytest.raises(UnsupportedSourceError, match="can't be stored"):
        blobstore.plan_import(folder)


def test_a_source_file_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors"))
    path.write_bytes(safetensors_bytes(small_tensors()))
    with pytest.raises(UnsupportedSourceError, match="can't be stored"):
        blobstore.plan_import(path)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**32, 0, 2**32], [0, 2**61]])
def test_empty_tensors_of_impossible_shapes(tmp_path: Path, shape: list[int]) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        raw_safetensors({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    )
    with pytest.raises(BlobStoreError) as caught:
        blobstore.plan_import(path)
    assert caught.value.path == str(path)


def test_a_companion_with_a_name_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"a" * (65_536 - 7) + ".weight": normal("x", 64, 64)}))
    blobstore.plan_import(path)
    with pytest.raises(LimitExceededError, match="name"):
        blobstore.plan_import(path, quant="int8")


@pytest.mark.parametrize("name", ["conv.scales", "stem_blocks", "x.weight_scale", "gate.scales"])
def test_float_tensors_with_names_of_quantized_formats_are_imported(
    tmp_path: Path, name: str, store: Store
) -> None:
    source = write_checkpoint(
        tmp_path / "m", {**small_tensors(), name: normal(name, 4, 8, dtype=np.float32)}
    )
    blobstore.import_model(source, "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store) as model:
        assert model[name].shape == (4, 8)


def test_many_shards_without_an_index_are_checked_quickly(tmp_path: Path) -> None:
    for number in range(1, 2001):
        (tmp_path / f"model-{number:05}-of-02000.safetensors").touch()
    with pytest.raises(BlobStoreError, match="F1"):
        read_inventory(tmp_path)


def test_a_gguf_model_is_listed_and_not_opened(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store)
    path = store.root / "manifests/registry.ollama.ai/library/m/latest"
    document = json.loads(path.read_text())
    for layer in document["layers"]:
        layer["mediaType"] = "application/vnd.ollama.image.model"
    path.write_text(json.dumps(document))
    with pytest.raises(UnsupportedSourceError, match="GGUF"):
        blobstore.open_model("m", store=store)


def test_complex_values_are_not_halved(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    data = np.array([1 + 2j], np.complex64).tobytes()
    path.write_bytes(
        raw_safetensors({"x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, data)
    )
    blobstore.import_model(path, "m", store=store)
    with blobstore.open_model("m", store=store) as model:
        assert plain(model["x"])[0] == 1 + 2j
        with pytest.raises(UnsupportedSourceError, match="complex"):
            model["x"].dequantize()
    with pytest.raises(TensorNotFoundError, match="is closed"):
        model["x"]


def test_a_config_without_quantization_settings_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", config={**LLAMA_CONFIG, "quantization": None, "vision_config": None}
    )
    assert blobstore.plan_import(folder).config.capabilities == ["completion"]


def test_a_huge_alignment_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="power of two"):
        blobstore.plan_import("x", alignment=2**26)


def test_errors_with_notes_survive_pickling() -> None:
    error = UsageError("no", hint="yes", tensor="t")
    error.add_note("while testing")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.hint, again.tensor) == ("no", "yes", "t")
    placed = error.at("here", tensor="other", path="p")
    assert (str(placed), placed.tensor, placed.path, placed.hint) == ("here: no", "t", "p", "yes")
