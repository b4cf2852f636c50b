"""Export as stored: the folder equals the source, and its import stores the same blobs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE, exports
from support.arrays import bits_of_parts
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.layouts import files_of, sentencepiece
from support.prequantized_sources import fp8_model, mlx_model, nvfp4_model

import blobstore
from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType
from blobstore.kernels.arrays import Array
from blobstore.store.local.store import Store

INDEX = "model.safetensors.index.json"


def test_what_came_in_goes_out_byte_for_byte(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE, "m", store=store)
    counts: list[int] = []
    result = blobstore.export_model(
        "m", tmp_path / "new" / "out", store=store, progress=lambda count, _: counts.append(count)
    )
    found = files_of(tmp_path / "new" / "out")
    assert found == files_of(PYCODE)
    assert result.files == {name: len(data) for name, data in sorted(found.items())}
    assert result.nbytes == sum(counts) == sum(map(len, found.values()))
    assert (result.notes, result.folder) == ((), tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_an_index_that_is_not_right_any_more_is_made_again(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(sentencepiece(tmp_path / "in"), "m", store=store, quant="int8")
    blobstore.export_model("m", tmp_path / "out", store=store, max_shard_size="source")
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    tensors = exports.raw_tensors(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert "lm_head.weight.scale" in tensors
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())


@pytest.mark.parametrize(("quant", "experts"), [(None, "packed"), ("mxfp8", "stacked")])
def test_an_import_of_the_export_stores_the_same_blobs(
    store: Store, tmp_path: Path, quant: str | None, experts: str
) -> None:
    source = write_checkpoint(tmp_path / "in", exports.mixture_tensors())
    result = blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    again = exports.imported_again(store, "m", tmp_path / "out", experts=experts)
    assert exports.tensor_layers(again) == exports.tensor_layers(result.manifest)
    assert again.config == result.manifest.config  # the type that was asked for, too
    found = exports.raw_tensors(tmp_path / "out")
    weights = {name for name in found if not name.endswith((".scale", ".bias"))}
    assert weights == exports.raw_tensors(source).keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_ollama_profile_keeps_its_stacks(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", exports.mixture_tensors())
    blobstore.import_model(source, "m", store=store, quant="int4", profile="ollama")
    exports.imported_again(store, "m", tmp_path / "out", profile="ollama")
    old, new = (blobstore.open_model(name, store=store) for name in ("m", "again"))
    assert old.keys() == new.keys()
    for name in (name for name in old if old[name].quant_type):
        assert bits_of_parts(old[name].numpy()) == bits_of_parts(new[name].numpy())
    assert "model.layers.0.mlp.experts.up_proj.weight" in exports.raw_tensors(tmp_path / "out")
    assert exports.metadata_of(tmp_path / "out" / "model.safetensors")["format"] == "pt"
    with pytest.raises(UsageError, match="that the model was imported from are not known"):
        blobstore.export_model("m", tmp_path / "out2", store=store, max_shard_size="source")


MLX = {"quantization": {"group_size": 32, "bits": 4, "mode": "affine"}}
COMPRESSED = {"quantization_config": {"quant_method": "compressed-tensors"}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
PREQUANTIZED: dict[str, tuple[dict[str, Array], dict[str, Any]]] = {
    "mlx": (mlx_model(small_tensors(), (32, 4, "affine")), MLX),
    "fp8": (fp8_model(small_tensors()), FP8),
    "compressed": (nvfp4_model(small_tensors(), modelopt=False), {"text_config": COMPRESSED}),
}


@pytest.mark.parametrize(("tensors", "claim"), PREQUANTIZED.values(), ids=PREQUANTIZED)
def test_sources_that_were_quantized(
    store: Store, tmp_path: Path, tensors: dict[str, Array], claim: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "in", tensors, {**LLAMA_CONFIG, **claim})
    (source / "hf_quant_config.json").write_text("{}")
    manifest = blobstore.import_model(source, "m", store=store).manifest
    result = blobstore.export_model("m", tmp_path / "out", store=store)
    nested: dict[str, Any] = {"text_config": {}} if "text_config" in claim else {}
    assert json.loads((tmp_path / "out" / "config.json").read_bytes()) == LLAMA_CONFIG | nested
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert len(result.notes) == 2
    again = blobstore.import_model(tmp_path / "out", "again", store=store).manifest
    assert exports.tensor_layers(again) == exports.tensor_layers(manifest)
    # An export of the import of an export knows nothing of the first source, and is the same.
    blobstore.export_model("again", tmp_path / "out2", store=store)
    assert exports.raw_tensors(tmp_path / "out2") == exports.raw_tensors(tmp_path / "out")
    assert exports.metadata_of(tmp_path / "out2" / "model.safetensors") == exports.metadata_of(
        tmp_path / "out" / "model.safetensors"
    )
    blobstore.export_model("again", tmp_path / "values", store=store, dequantize="bfloat16")
    assert exports.metadata_of(tmp_path / "values" / "model.safetensors") == {"format": "pt"}


def test_a_weight_and_its_scales_may_be_in_two_shards(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", exports.mixture_tensors())
    rules = ["*.1.mlp.*=mxfp8"]
    first = blobstore.import_model(source, "m", store=store, quant="int4", rules=rules)
    blobstore.export_model("m", tmp_path / "out", store=store, max_shard_size=15_000)
    shards = [set(exports.raw_tensors_of(one)) for one in (tmp_path / "out").glob("*.safetensors")]
    assert any({part[:-6] for part in one if part.endswith(".scale")} - one for one in shards)
    again = blobstore.import_model(tmp_path / "out", "again", store=store)
    assert exports.tensor_layers(again.manifest) == exports.tensor_layers(first.manifest)


def test_one_file_without_documents_and_ambiguous_names(store: Store, tmp_path: Path) -> None:
    names = ("é<&>\u2028", 'quo"te\\', "\x1b[31m", "")
    tensors = {"a": np.zeros((0, 4), np.float32), "b": np.array(2.0), "c": np.arange(3)}
    path = tmp_path / "odd name.safetensors"
    path.write_bytes(safetensors_bytes({name: normal(name, 4) for name in names} | tensors))
    blobstore.import_model(path, "m", store=store)
    for size, name in ((5 * 10**9, "model.safetensors"), ("source", path.name)):
        out = tmp_path / str(size)
        result = blobstore.export_model("m", out, store=store, max_shard_size=size)
        assert list(result.files) == [name]
        assert exports.raw_tensors(out) == exports.raw_tensors(tmp_path)
        assert exports.metadata_of(out / name) == {}


def test_wrong_options(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "in"), "m", store=store)
    wrong: list[dict[str, Any]] = [
        *({"format": "gguf"}, {"dequantize": "int8"}, {"dequantize": DType.U8}, {"jobs": 0}),
        *({"max_shard_size": "5GB"}, {"format": "mlx", "max_shard_size": "source"}),
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            blobstore.export_model("m", tmp_path / "out", store=store, **options)
    assert not (tmp_path / "out").exists()
