"""Broken checkpoints, all of which Ollama refuses or should (docs/formats.md section 8)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.producers import Kind, block_fp8, nvfp4

import blobstore
from blobstore.errors import BlobStoreError, DocumentError, MissingFileError, UnsupportedSourceError
from blobstore.importer.run import import_model, plan_import
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"
INDEX = "model.safetensors.index.json"
PACKED, BLOCKS = nvfp4(modelopt=False), block_fp8()


def written(folder: Path, kind: Kind, **more: Any) -> Path:
    """Write a checkpoint of a weight of that kind, and of more tensors of its module."""
    tensors = kind.make(UP, (64, 128)).tensors
    tensors |= {f"{UP}.{name}": array for name, array in more.items()}
    return write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **kind.config})


def experts(folder: Path, *numbers: int, odd: tuple[int, int] = (64, 64)) -> Path:
    """Write a checkpoint of experts, of which the last has a shape of its own."""
    shapes = dict.fromkeys(numbers, (64, 64)) | {numbers[-1]: odd}
    tensors = {f"{EXPERTS}.{n}.up_proj.weight": normal(f"{n}", *shapes[n]) for n in shapes}
    return write_checkpoint(folder, tensors)


def ambiguous(folder: Path) -> Path:
    source = write_checkpoint(folder)
    data = (source / "model.safetensors").read_bytes()
    (source / "model-00001-of-00001.safetensors").write_bytes(data)
    return source


BROKEN: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "a single file beside shards": (ambiguous, None),
    "one weight in two forms": (
        lambda at: written(at, PACKED, weight=normal("q", 64, 128)),
        f"{UP}.weight",
    ),
    "an expert of another shape": (
        lambda at: experts(at, 0, 1, 2, odd=(32, 64)),
        f"{EXPERTS}.2.up_proj.weight",
    ),
    "an expert that is missing": (lambda at: experts(at, 0, 1, 3), f"{EXPERTS}.2.up_proj.weight"),
    "FP8 without the size of its blocks": (
        lambda at: written(at, Kind(BLOCKS.make, {})),
        f"{UP}.weight",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_source_is_refused_and_the_store_is_as_it_was(
    what: str, store: Store, snapshot: Callable[[Store], dict[str, str]], tmp_path: Path
) -> None:
    import_model(write_checkpoint(tmp_path / "good"), "kept", store=store)
    before = snapshot(store)
    write, tensor = BROKEN[what]
    source = write(tmp_path / "source")
    for quant, profile in (("none", "default"), ("int4", "ollama")):
        with pytest.raises(UnsupportedSourceError) as caught:
            import_model(source, "kept", store=store, quant=quant, profile=profile)
        assert caught.value.tensor == tensor
    assert snapshot(store) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"{place}.safetensors", DocumentError) for place in ("../evil", "/evil", "sub/x")),
        ("weights.bin", DocumentError),
        ("model-00002-of-00002.safetensors", MissingFileError),
    ],
)
def test_a_shard_is_a_file_in_there(tmp_path: Path, name: str, kind: type[BlobStoreError]) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "model.safetensors").rename(tmp_path / "evil.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(kind) as caught:
        plan_import(source)
    assert caught.value.rule == "I1"


@pytest.mark.parametrize("profile", ["ollama", "default"])
def test_tensors_do_not_vanish(store: Store, tmp_path: Path, profile: str) -> None:
    """F64 on load; blobs that hold only a bias in `show`; FP8 that is not a weight."""
    tensors: dict[str, Any] = {
        f"{UP}.weight": np.random.default_rng(64).standard_normal((4, 64)),
        f"{UP}.bias": normal("b", 64),
        "model.layers.0.router.scale": normal("s", 32),
        "table": np.ones((4, 32), ml_dtypes.float8_e4m3fn),
    }
    source = write_checkpoint(tmp_path / "s", tensors)
    blobstore.import_model(source, "m", store=store, profile=profile)
    with blobstore.open_model("m", store=store, verify=True) as model:
        found = {name: (plain(one).dtype, plain(one).tobytes()) for name, one in model.items()}
    assert found == {name: (array.dtype, array.tobytes()) for name, array in tensors.items()}
    shown = blobstore.inspect("m", store=store).tensors
    assert {tensor.name for tensor in shown} == set(tensors)
