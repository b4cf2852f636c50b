"""Checkpoints in the ollama profile equal the imports of Ollama (fixtures/ollama-records).

Equal are the kind of the source, the config, the layers of the manifest; every byte of what is
copied; every array of int4, int8 and mxfp8, and of nvfp4 and mxfp4 all but the E2M1 codes, whose
rounding is MLX's there (test_quantize_mlx.py).

Where Ollama gets the metadata of a quantized source wrong (docs/formats.md section 8), everything
else is equal and ours are right. Block FP8 becomes mxfp8.
"""

import json
from typing import Any

import numpy as np
import pytest
from oracle.ollama_cases import Case, contents, record_of
from support import QUANT_TYPES
from support.ollama_sources import write_source

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE
from blobstore.importer.run import plan_import
from blobstore.inspection.listing import summarize
from blobstore.source.inventory import kind_of

Array = np.ndarray[Any, Any]

TYPES = ("none", *QUANT_TYPES)
E2M1_TYPES = ("nvfp4", "mxfp4")
# Each architecture, each layout, each dtype and each type of quantization at least once.
FLOAT_CASES = {
    "a_dense_bf16": TYPES,
    "a_dense_bias_tied": ("int4",),
    "b_qwen3_moe": ("int8", "nvfp4"),
    "b_switch_mlp_stacked": ("none", "nvfp4"),
    "c_sharded": ("mxfp8",),
    "g_f16": ("int4", "nvfp4"),
    "g_f32": ("mxfp8", "mxfp4"),
    "h_cohere2_moe": ("int4",),
    "h_gemma4": ("mxfp4",),
    "h_gemma4_moe8": ("nvfp4",),
    "h_nemotron_h": ("nvfp4",),
    "h_qwen3_5_moe": ("int4",),
    "z_draft": ("none",),
}
# Ollama forgets the type of an MLX config without `mode`, and gives every tensor the general one.
MISLABELLED = {
    "d_mlx_int4": {"quant_type": "int4", "group_size": "64"},
    "d_mlx_int4_g32": {"quant_type": "int4", "group_size": "32"},
    "d_mlx_mixed_4_8": {"quant_type": "int4", "group_size": "64"},
}
OWN_TYPE = {("d_mlx_mixed_4_8", "lm_head.weight"): {"quant_type": "int8", "group_size": "64"}}
COPIED = ("d_mlx_int8", "d_mlx_mxfp4", "d_mlx_nvfp4", "f_ct_nvfp4", "f_modelopt_nvfp4")
FP8 = ("e_fp8_block", "e_fp8_block_bf16scale", "e_fp8_moe")
QUANTIZED = (*COPIED, *MISLABELLED, *FP8)

CHOSEN = [
    *((source, quant) for source, types in FLOAT_CASES.items() for quant in types),
    *((source, "none") for source in QUANTIZED),
]
SHOWN = [(source, types[-1]) for source, types in FLOAT_CASES.items()]
SHOWN += [(source, "none") for source in QUANTIZED]


@pytest.mark.parametrize(("source", "quant"), CHOSEN)
def test_an_import_is_ollamas(case: Case, source: str) -> None:
    assert kind_of(case.plan.inventory.weights) == case.record["kind"]
    assert_same_config(case, source)
    assert_same_layers(case, source)
    assert_same_arrays(case)
    if not any(_is_made(case, blob.name, source) for blob in case.plan.blobs):
        assert case.result.manifest.raw.decode() == case.record["manifest"]


def assert_same_config(case: Case, source: str) -> None:
    config, theirs = json.loads(case.plan.config.encode()), json.loads(case.record["config"])
    if source in MISLABELLED:
        config["file_type"] = theirs["file_type"] or config["file_type"]
        theirs["file_type"] = "int4"
    assert config == theirs


def assert_same_layers(case: Case, source: str) -> None:
    """The layers of the manifest: copied ones byte for byte, of others what the header says."""
    layers = case.result.manifest.layers
    assert [(layer.media_type, layer.name) for layer in layers] == [
        (layer.media_type, layer.name) for layer in case.recorded_layers
    ]
    for layer, theirs in zip(layers, case.recorded_layers, strict=True):
        is_made = _is_made(case, layer.name, source)
        assert is_made or layer == theirs
        if layer.media_type == TENSOR_MEDIA_TYPE:
            ours, recorded = case.header_text(layer), case.record["headers"][str(theirs.digest)]
            # MLX writes the arrays of a blob in the order of a hash table, without padding.
            one, other = (contents(ours), contents(recorded)) if is_made else (ours, recorded)
            if source in MISLABELLED and isinstance(one, dict):
                metadata, _ = one.pop("__metadata__", None), other.pop("__metadata__", None)
                usual = MISLABELLED[source] if f"{layer.name}.scale" in one else None
                assert metadata == OWN_TYPE.get((source, str(layer.name)), usual)
            assert one == other


def assert_same_arrays(case: Case) -> None:
    arrays, codes, recorded = case.described_arrays(), _e2m1_weights(case), case.record["arrays"]
    assert {name: array[:2] for name, array in arrays.items()} == {
        name: array[:2] for name, array in recorded.items()
    }
    assert {name: array[2] for name, array in arrays.items() if name not in codes} == {
        name: array[2] for name, array in recorded.items() if name not in codes
    }


@pytest.mark.parametrize(("source", "quant"), SHOWN)
def test_show_is_ollamas(case: Case, source: str, quant: str) -> None:
    show = case.record["show"]
    summary, tensors = summarize(case.store, case.result.name, case.result.manifest)
    # Ollama's `show` leaves out blobs that hold nothing but a bias or a scale; ours does not.
    left_out = [tensor for tensor in tensors if tensor.name.endswith((".bias", ".scale"))]
    assert len(left_out) == {"a_dense_bias_tied": 6, "h_gemma4_moe8": 4}.get(source, 0)
    ours = {one.name: (one.type_name, list(one.shape)) for one in tensors if one not in left_out}
    theirs = {tensor["name"]: (tensor["type"], tensor["shape"]) for tensor in show["tensors"]}
    wrong = {name for name in ours if ours[name] != theirs[name]}
    # It calls the codes of the first U32, and gives the head of the other the general type.
    assert len(wrong) == {"d_mlx_int4": 16, "d_mlx_mixed_4_8": 1}.get(source, 0)
    if not wrong:
        biases = sum(tensor.parameters for tensor in left_out)
        assert summary.parameters == show["parameter_count"] + biases
        assert summary.quant_type == show["dtype"] or quant == "none"


@pytest.mark.parametrize("source", ["d_mlx_int8", "e_fp8_block_bf16scale", "f_ct_nvfp4"])
def test_a_type_for_a_quantized_source_is_refused_as_by_ollama(
    tmp_path_factory: pytest.TempPathFactory, source: str
) -> None:
    folder = write_source(tmp_path_factory.mktemp("quantized"), source)
    for quant in QUANT_TYPES:
        assert record_of(source)[quant]["stage"] == "classify"
        for profile in ("ollama", "default"):
            with pytest.raises(UnsupportedSourceError, match="is quantized already"):
                plan_import(folder, quant=quant, profile=profile)


def _is_made(case: Case, name: str | None, source: str) -> bool:
    """Return True for a blob that is not a copy, or whose metadata Ollama gets wrong."""
    return any(
        (blob.metadata and source in MISLABELLED)
        or not all(tensor.copies for tensor in blob.tensors)
        for blob in case.plan.blobs
        if blob.name == name
    )


def _e2m1_weights(case: Case) -> set[str]:
    return {
        tensor.name
        for tensor in case.plan.tensors
        if tensor.quantization is not None
        and not tensor.copies_codes
        and tensor.quantization.quant_type.value in E2M1_TYPES
    }
