"""The config of a ModelPack artifact: what modelpack/model-spec@d78bf323's pages say."""

import json

from blobstore.formats.dtypes import DType
from blobstore.formats.oci import modelpack_config
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
