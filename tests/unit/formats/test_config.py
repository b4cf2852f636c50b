"""config.json: strict JSON, but for transformers' non-finite numbers; the config of a ModelPack."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import LLAMA_CONFIG, write_checkpoint

import blobstore
from blobstore.errors import DocumentError
from blobstore.formats.checkpoint import SourceConfig, parse_config, with_floats
from blobstore.formats.dtypes import DType
from blobstore.formats.oci import modelpack_config
from blobstore.names import Digest
from blobstore.store.local.store import Store


def test_words_that_python_writes_are_read_and_nothing_else_is_laxer() -> None:
    text = b'{"model_type": "llama", "limits": [0.0, Infinity, -Infinity], "odd": {"a": NaN}}'
    config = parse_config(text)
    assert config["limits"] == [0.0, math.inf, -math.inf]
    assert math.isnan(config["odd"]["a"])
    assert SourceConfig.parse(text).model_type == "llama"
    for wrong in (b'{"a": Inf}', b'{"a": Infinity, "a": 1}', b"Infinity"):
        with pytest.raises(DocumentError, match="Q1"):
            parse_config(wrong)


def test_tagged_floats_become_floats() -> None:
    tagged = {"limit": [0.0, {"__float__": "Infinity"}], "a": {"low": {"__float__": "-Infinity"}}}
    assert parse_config(json.dumps(tagged).encode()) == tagged
    assert with_floats(tagged) == {"limit": [0.0, math.inf], "a": {"low": -math.inf}}
    assert math.isnan(with_floats({"__float__": "NaN"}))
    for value in ({"__float__": "1.5"}, {"__float__": ["Infinity"]}, "Infinity"):
        assert with_floats({"key": value}) == {"key": value}
    assert with_floats({"__float__": "NaN", "more": 1}) == {"__float__": "NaN", "more": 1}


def test_a_config_is_stored_and_exported_as_it_is(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "source")
    limits = [math.inf, {"__float__": "Infinity"}]
    text = json.dumps({**LLAMA_CONFIG, "time_step_limit": limits})
    (source / "config.json").write_text(text)
    blobstore.import_model(source, "m", store=store)
    with blobstore.open_model("m", store=store) as model:
        assert model.document("config.json") == text.encode()
    blobstore.export_model("m", tmp_path / "exported", store=store)
    assert (tmp_path / "exported" / "config.json").read_text() == text
    blobstore.export_model("m", tmp_path / "changed", store=store, dequantize="float32")
    changed = (tmp_path / "changed" / "config.json").read_text()
    assert json.loads(changed)["time_step_limit"] == json.loads(text)["time_step_limit"]


def mlx_settings(quantization: dict[str, Any]) -> Any:
    settings = SourceConfig.parse(json.dumps({"quantization": quantization}).encode())
    return settings.mlx_quantization


def test_settings_without_sizes_are_the_modes() -> None:
    modules: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"bits": 8}, (64, 8)),  # RWKV-7's predicate
        ({"group_size": None, "bits": 4, "mode": "affine"}, (64, 4)),  # without --q-group-size
        ({"mode": "mxfp8"}, (32, 8)),
        ({"mode": "nvfp4", "group_size": None}, (16, 4)),
    ]
    for module, sizes in modules:
        found = mlx_settings({"group_size": 32, "bits": 4, "a": module}).of("a")
        assert (found.group_size, found.bits) == sizes


def test_settings_of_all_modules_have_sizes() -> None:
    whole = {"group_size": 64, "bits": 4}
    odd = {"model.head": {"group_size": 64, "bits": 7}}
    for sizes in ({"bits": 4}, whole | {"group_size": "64"}, whole | odd):
        with pytest.raises(DocumentError, match="Q1"):
            mlx_settings(sizes)


def test_all_that_can_be_said() -> None:
    digests = [Digest.of(b"a"), Digest.of(b"b")]
    config = modelpack_config(
        digests,
        name="m",
        architecture="Qwen3ForCausalLM",
        family="qwen3",
        parameters=596_049_920,
        dtypes=(DType.BF16, DType.I32, DType.F32),
        quantization=("int4", "int8"),
    )
    assert json.loads(config) == {
        "descriptor": {"family": "qwen3", "name": "m"},
        "modelfs": {"type": "layers", "diffIds": [str(digest) for digest in digests]},
        "config": {
            "architecture": "Qwen3ForCausalLM",
            "format": "safetensors",
            "paramSize": "596M",
            "precision": "bfloat16,float32",
            "quantization": "int4,int8",
        },
    }
    least = modelpack_config([], name="m", architecture=None, family=None, parameters=3)
    assert json.loads(least)["descriptor"] == {"name": "m"}
    assert json.loads(least)["config"] == {"format": "safetensors"}
