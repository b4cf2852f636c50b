"""The config of a ModelPack artifact: what modelpack/model-spec@d78bf323's pages say."""

from __future__ import annotations

import json

from blobstore.formats.dtypes import DType
from blobstore.formats.oci import layer_media_type, modelpack_config, param_size
from blobstore.names import Digest

DIGESTS = [Digest.of(b"a"), Digest.of(b"b")]


def test_all_that_can_be_said() -> None:
    config = modelpack_config(
        DIGESTS,
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        family="qwen3",
        parameters=596_049_920,
        dtypes=(DType.BF16, DType.I32, DType.F32),
        quantization=("int4", "int8"),
    )
    document = json.loads(config)
    assert document == {
        "descriptor": {"family": "qwen3", "name": "qwen3"},
        "modelfs": {"type": "layers", "diffIds": [str(digest) for digest in DIGESTS]},
        "config": {
            "architecture": "Qwen3ForCausalLM",
            "format": "safetensors",
            "paramSize": "596M",
            "precision": "bfloat16,float32",
            "quantization": "int4,int8",
        },
    }
    least = modelpack_config(DIGESTS, name="m", architecture=None, family=None, parameters=3)
    assert json.loads(least)["descriptor"] == {"name": "m"}
    assert json.loads(least)["config"] == {"format": "safetensors"}


def test_param_size() -> None:
    sizes = {999: None, 1000: "1K", 1049: "1K", 1050: "1.1K", 6_738_415_616: "6.7B"}
    sizes |= {70_000_000_000: "70B", 1_040_000_000_000: "1T", 3 * 10**15: "3Q"}
    assert {number: param_size(number) for number in sizes} == sizes


def test_media_types() -> None:
    weights = ("m-00001-of-00002.safetensors", "d/MODEL.SAFETENSORS", "pytorch_model.bin")
    configs = ("config.json", "model.safetensors.index.json", "chat_template.jinja", "Modelfile")
    kinds = {"weight": weights, "weight.config": configs}
    kinds |= {"doc": ("README.md", "docs/LICENSE"), "code": ("modeling_x.py",)}
    for kind, paths in kinds.items():
        for path in paths:
            assert layer_media_type(path) == f"application/vnd.cncf.model.{kind}.v1.raw"
