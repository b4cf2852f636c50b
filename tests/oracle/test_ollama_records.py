"""Float checkpoints in the ollama profile equal the imports of Ollama.

Held for every source and type: the plan, the config, the layers of the manifest; every byte of what
is copied; every array of int4, int8 and mxfp8, and of nvfp4 and mxfp4 all but the E2M1 codes. Those
are held too, by MLX's rule for them: it takes the quotient in the source's dtype, and of equally
near values the first of its table (so +0 where we keep the sign). With an F32 source nothing but
the sign of zero differs; with BF16 and F16 our codes are never further from the weight.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import QUANT_TYPES
from support.ollama_cases import Case, Cases, contents, planned
from support.ollama_sources import INDEX

from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.importer.outputs import PlannedBlob
from blobstore.inspection.listing import summarize
from blobstore.source.inventory import kind_of

Array = np.ndarray[Any, Any]

SOURCES = (
    "a_dense_bf16",
    "a_dense_bias_tied",
    "b_qwen3_moe",
    "b_switch_mlp_stacked",
    "c_sharded",
    "g_f16",
    "g_f32",
    "h_cohere2_moe",
    "h_gemma4",
    "h_gemma4_moe8",
    "h_nemotron_h",
    "h_qwen3_5_moe",
    "z_draft",
)
E2M1_TYPES = ("nvfp4", "mxfp4")
# Of equally near values the first one is taken: the smaller magnitude, and +0 rather than -0.
E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


every_source = pytest.mark.parametrize("source", SOURCES)
every_type = pytest.mark.parametrize("quant", ["none", *QUANT_TYPES])


@every_source
@every_type
def test_plan_is_equal(case: Case) -> None:
    assert kind_of(case.plan.inventory.weights) == case.record["kind"]
    assert [planned(blob) for blob in case.plan.blobs] == case.record["blobs"]


@every_source
@every_type
def test_config_and_layers_are_equal(case: Case) -> None:
    recorded = json.loads(case.record["manifest"])
    manifest = case.result.manifest
    assert case.plan.config.encode().decode() == case.record["config"]
    assert manifest.config == Descriptor.checked(recorded["config"])
    assert [(layer.media_type, layer.name) for layer in manifest.layers] == [
        (layer["mediaType"], layer["name"]) for layer in recorded["layers"]
    ]


@every_source
@pytest.mark.parametrize("quant", ["none"])
def test_manifest_of_an_unquantized_import_is_equal_byte_for_byte(case: Case) -> None:
    assert case.result.manifest.raw.decode() == case.record["manifest"]


@every_source
@every_type
def test_copied_blobs_are_equal_byte_for_byte(case: Case) -> None:
    layers, headers = case.result.manifest.layers, case.record["headers"]
    copied = {layer.name for layer in layers} - {
        blob.name for blob in case.plan.blobs if _is_quantized(blob)
    }
    assert (
        len(copied) == len(layers)
        if case.record["quantize"] == ""
        else 0 < len(copied) < len(layers)
    )
    for layer, recorded in zip(layers, case.recorded_layers, strict=True):
        if layer.name in copied:
            assert layer == recorded
        if layer.name in copied and layer.media_type == TENSOR_MEDIA_TYPE:
            assert case.header_text(layer) == headers[str(layer.digest)]


@every_source
@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_quantized_blobs_hold_the_same_arrays_and_metadata(case: Case) -> None:
    # MLX writes the arrays of a blob in the order of a hash table, and does not pad the header:
    # digests can't be equal.
    names = {blob.name for blob in case.plan.blobs if _is_quantized(blob)}
    for layer, recorded in zip(case.result.manifest.layers, case.recorded_layers, strict=True):
        if layer.name in names:
            assert contents(case.header_text(layer)) == contents(
                case.record["headers"][str(recorded.digest)]
            )


@every_source
@every_type
def test_arrays_are_equal(case: Case, quant: str) -> None:
    arrays, codes = case.described_arrays(), _e2m1_weights(case)
    recorded = case.record["arrays"]
    assert {name: array[:2] for name, array in arrays.items()} == {
        name: array[:2] for name, array in recorded.items()
    }
    assert bool(codes) == (quant in E2M1_TYPES)
    assert {name: array[2] for name, array in arrays.items() if name not in codes} == {
        name: array[2] for name, array in recorded.items() if name not in codes
    }


@every_source
@pytest.mark.parametrize("quant", E2M1_TYPES)
def test_recorded_e2m1_codes_are_those_of_mlx_rule_and_ours_are_never_further_from_the_weight(
    case: Case, cases: Cases, source: str, quant: str
) -> None:
    with case.open() as model, cases(source, "none").open() as original:
        arrays, weights = model.arrays("numpy"), original.arrays("numpy")
        for name in _e2m1_weights(case):
            weight, scales = weights[name], _scales(arrays[f"{name}_scale"], quant)
            ours, theirs = _unpacked(arrays[name]), _mlx_codes(weight, scales)
            packed = theirs[..., 0::2] | theirs[..., 1::2] << 4
            assert hashlib.sha256(packed.tobytes()).hexdigest() == case.record["arrays"][name][2], (
                name
            )
            assert (_distance(ours, weight, scales) <= _distance(theirs, weight, scales)).all(), (
                name
            )
            if weight.dtype == np.float32:
                assert np.array_equal(np.where(ours == 8, 0, ours), theirs), name


@every_source
@every_type
def test_show_is_equal(case: Case, source: str, quant: str) -> None:
    show = case.record["show"]
    summary, tensors = summarize(case.store, case.result.name, case.result.manifest)
    # Ollama's `show` leaves out blobs that hold nothing but a bias or a scale; ours does not.
    left_out = [tensor for tensor in tensors if tensor.name.endswith((".bias", ".scale"))]
    assert len(left_out) == {"a_dense_bias_tied": 6, "h_gemma4_moe8": 4}.get(source, 0)
    assert summary.parameters == show["parameter_count"] + sum(
        tensor.parameters for tensor in left_out
    )
    assert [
        {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)}
        for tensor in sorted(tensors, key=lambda tensor: tensor.name)
        if tensor not in left_out
    ] == sorted(show["tensors"], key=lambda tensor: tensor["name"])
    if quant != "none":
        assert summary.quant_type == show["dtype"]


def test_safetensors_outside_the_index_are_left_out(cases: Cases) -> None:
    whole, sharded = cases("a_dense_bf16", "int4"), cases("c_sharded", "int4")
    assert [one.name for one in sharded.plan.coverage.left_out] == [
        "consolidated.safetensors",
        INDEX,
    ]
    assert INDEX not in {layer.name for layer in sharded.result.manifest.layers}
    assert sharded.result.manifest.raw == whole.result.manifest.raw


def _is_quantized(blob: PlannedBlob) -> bool:
    return any(tensor.quantization is not None for tensor in blob.tensors)


def _e2m1_weights(case: Case) -> set[str]:
    quantized = {
        tensor.name: tensor.quantization
        for tensor in case.plan.tensors
        if tensor.quantization is not None
    }
    return {
        name
        for name, quantization in quantized.items()
        if quantization.quant_type.value in E2M1_TYPES
    }


def _scales(bits: Array, quant: str) -> Array:
    """Return decoded scales with a last dimension of 1, exact in the dtype of these weights."""
    kind = ml_dtypes.float8_e4m3fn if quant == "nvfp4" else ml_dtypes.float8_e8m0fnu
    scales: Array = bits.view(kind).astype(np.float32)[..., None]
    return scales


def _mlx_codes(weight: Array, scales: Array) -> Array:
    """Return MLX's codes: the first of the nearest to ``weight / scale``, in the weight's dtype."""
    divisors = scales.astype(weight.dtype)
    quotients = weight.reshape(*scales.shape[:-1], -1) / np.where(
        divisors == 0, np.inf, divisors
    ).astype(weight.dtype)
    if weight.dtype == np.float32:
        codes = _nearest(quotients)
    else:
        codes = _nearest(np.arange(2**16, dtype=np.uint16).view(weight.dtype))[
            quotients.view(np.uint16)
        ]
    return codes.reshape(weight.shape)


def _nearest(values: Array) -> Array:
    with np.errstate(all="ignore"):
        distances = np.abs(values[..., None] - E2M1_VALUES.astype(values.dtype))
    codes: Array = distances.astype(np.float32).argmin(-1).astype(np.uint8)
    return codes


def _unpacked(words: Array) -> Array:
    packed = words.view(np.uint8)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*words.shape[:-1], -1)


def _distance(codes: Array, weight: Array, scales: Array) -> Array:
    values = E2M1_VALUES.astype(np.float64)[codes].reshape(*scales.shape[:-1], -1) * scales
    distances: Array = np.abs(values - weight.astype(np.float64).reshape(values.shape))
    return distances
