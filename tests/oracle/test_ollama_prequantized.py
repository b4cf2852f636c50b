"""Quantized checkpoints in the ollama profile equal the imports of Ollama.

Copied ones (MLX, NVFP4 of two producers): the plan and the manifest, so every blob, byte for byte;
where Ollama gets the metadata wrong (docs/formats.md section 8), everything else is equal and ours
are right. Block FP8 becomes mxfp8: the plan, all copied blobs, and every array.
"""

from __future__ import annotations

import json

import pytest
from support import QUANT_TYPES
from support.ollama_cases import Case, contents, planned, record_of
from support.ollama_sources import write_source

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.importer.run import plan_import
from blobstore.inspection.listing import summarize
from blobstore.source.inventory import kind_of

MISLABELLED = {
    # An MLX config without `mode` is affine: Ollama forgets the type, and guesses it from shapes
    # where it can.
    "d_mlx_int4": {"quant_type": "int4", "group_size": "64"},
    "d_mlx_int4_g32": {"quant_type": "int4", "group_size": "32"},
    # Ollama gives every tensor the config's general type.
    "d_mlx_mixed_4_8": {"quant_type": "int4", "group_size": "64"},
}
OWN_TYPE = {("d_mlx_mixed_4_8", "lm_head.weight"): {"quant_type": "int8", "group_size": "64"}}
COPIED = ("d_mlx_int8", "d_mlx_mxfp4", "d_mlx_nvfp4", "f_ct_nvfp4", "f_modelopt_nvfp4")
FP8 = ("e_fp8_block", "e_fp8_block_bf16scale", "e_fp8_moe")

every_source = pytest.mark.parametrize("source", [*COPIED, *MISLABELLED, *FP8])
every_copied = pytest.mark.parametrize("source", [*COPIED, *MISLABELLED])
unquantized = pytest.mark.parametrize("quant", ["none"])


@every_source
@unquantized
def test_plan_is_equal(case: Case, source: str) -> None:
    assert kind_of(case.plan.inventory.weights) == case.record["kind"]
    plan, recorded = [planned(blob) for blob in case.plan.blobs], case.record["blobs"]
    if source in MISLABELLED:
        for ours, theirs in zip(plan, recorded, strict=True):
            ours["metadata"] = theirs[
                "metadata"
            ]  # its own test: test_metadata_that_ollama_gets_wrong
    assert plan == recorded


@pytest.mark.parametrize("source", COPIED)
@unquantized
def test_manifest_of_a_copied_import_is_equal_byte_for_byte(case: Case) -> None:
    assert case.result.manifest.raw.decode() == case.record["manifest"]
    assert case.plan.config.encode().decode() == case.record["config"]


@every_source
@unquantized
def test_copied_blobs_and_documents_are_equal_byte_for_byte(case: Case, source: str) -> None:
    decoded = {
        blob.name for blob in case.plan.blobs if not all(tensor.copies for tensor in blob.tensors)
    }
    made = decoded | {
        blob.name for blob in case.plan.blobs if blob.metadata and source in MISLABELLED
    }
    layers, recorded = case.result.manifest.layers, case.recorded_layers
    assert [(layer.media_type, layer.name) for layer in layers] == [
        (layer.media_type, layer.name) for layer in recorded
    ]
    assert bool(made) == (source not in COPIED)
    for layer, theirs in zip(layers, recorded, strict=True):
        if layer.name not in made:
            assert layer == theirs
            assert layer.media_type != TENSOR_MEDIA_TYPE or case.header_text(layer) == _header(
                case, theirs
            )


@pytest.mark.parametrize("source", MISLABELLED)
@unquantized
def test_metadata_that_ollama_gets_wrong(case: Case, source: str) -> None:
    labelled = 0
    for layer, theirs in zip(
        case.result.manifest.tensor_layers, case.recorded_layers, strict=False
    ):
        ours, recorded = contents(case.header_text(layer)), contents(_header(case, theirs))
        metadata, wrong = ours.pop("__metadata__", None), recorded.pop("__metadata__", None)
        assert ours == recorded
        quantized = f"{layer.name}.scale" in ours
        wanted = OWN_TYPE.get((source, str(layer.name)), MISLABELLED[source]) if quantized else None
        labelled += metadata != wrong
        assert metadata == wanted
    assert labelled == {"d_mlx_mixed_4_8": 1}.get(source, 16)


@pytest.mark.parametrize("source", ["d_mlx_int4", "d_mlx_int4_g32"])
@unquantized
def test_file_type_that_ollama_gets_wrong(case: Case) -> None:
    config, recorded = json.loads(case.plan.config.encode()), json.loads(case.record["config"])
    assert config.pop("file_type") == "int4"
    assert recorded.pop("file_type") == ""
    assert config == recorded


@pytest.mark.parametrize("source", ["d_mlx_mixed_4_8"])
@unquantized
def test_file_type_of_a_mixed_source_is_that_of_the_general_settings(case: Case) -> None:
    assert json.loads(case.record["config"])["file_type"] == "int4"
    assert case.plan.config.encode().decode() == case.record["config"]


@pytest.mark.parametrize("source", FP8)
@unquantized
def test_config_of_an_fp8_import_is_equal(case: Case) -> None:
    assert json.loads(case.plan.config.encode())["file_type"] == "mxfp8"
    assert case.plan.config.encode().decode() == case.record["config"]


@every_source
@unquantized
def test_arrays_are_equal(case: Case) -> None:
    assert case.described_arrays() == case.record["arrays"]


@pytest.mark.parametrize("source", FP8)
@unquantized
def test_headers_of_decoded_blobs_say_the_same(case: Case) -> None:
    # MLX writes the arrays of a blob in the order of a hash table, and does not pad the header:
    # digests can't be equal.
    for layer, theirs in zip(
        case.result.manifest.tensor_layers, case.recorded_layers, strict=False
    ):
        assert contents(case.header_text(layer)) == contents(_header(case, theirs))


@every_source
@unquantized
def test_show_is_equal(case: Case, source: str) -> None:
    show = case.record["show"]
    summary, tensors = summarize(case.store, case.result.name, case.result.manifest)
    shown = {tensor.name: (tensor.type_name, tensor.shape) for tensor in tensors}
    recorded = {
        tensor["name"]: (tensor["type"], tuple(tensor["shape"])) for tensor in show["tensors"]
    }
    wrong = {name for name in shown if shown[name] != recorded[name]}
    if source == "d_mlx_int4":  # called U32 there, with the shapes of the packed codes
        assert len(wrong) == 16
    elif source == "d_mlx_mixed_4_8":
        assert wrong == {"lm_head.weight"}
        assert (shown["lm_head.weight"], recorded["lm_head.weight"]) == (
            ("int8", (2048, 256)),
            ("int4", (2048, 512)),
        )
    else:
        assert not wrong
        assert summary.parameters == show["parameter_count"]
        assert summary.quant_type == show["dtype"]


@pytest.mark.parametrize("quant", QUANT_TYPES)
@every_source
def test_a_type_is_refused_as_ollama_refuses_it(
    quantized_sources: dict[str, str], source: str, quant: str
) -> None:
    assert record_of(source)[quant]["stage"] == "classify"
    for profile in ("ollama", "default"):
        with pytest.raises(UnsupportedSourceError, match="is quantized already") as caught:
            plan_import(quantized_sources[source], quant=quant, profile=profile)
        assert caught.value.path == quantized_sources[source]
        assert "requantize=True" in str(caught.value.hint)


@pytest.fixture(scope="session")
def quantized_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The quantized sources' folders by name."""
    root = tmp_path_factory.mktemp("quantized")
    return {source: str(write_source(root, source)) for source in (*COPIED, *MISLABELLED, *FP8)}


def _header(case: Case, recorded: Descriptor) -> str:
    header: str = case.record["headers"][str(recorded.digest)]
    return header
