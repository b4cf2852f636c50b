"""A plan's documents and config, its sizes, and the decisions of its architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.inventories import inventory, source_tensor

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor
from blobstore.source.inventory import Inventory

NORM = source_tensor("model.norm.weight", 64)
UP = source_tensor("model.layers.0.mlp.up_proj.weight", 64, 128)
DOWN = source_tensor("model.layers.0.mlp.down_proj.weight", 128, 64)


def _plan(source: Inventory, **options: Any) -> ImportPlan:
    return make_plan(source, ImportOptions.parse(**options))


def test_own_document_is_exactly_this() -> None:
    documents = _plan(inventory([UP, NORM]), quant="int4").documents
    assert documents["blobstore.json"] == (
        b'{"version":1,"options":{"quant":"int4","group_size":32,"groups":{},"method":"minmax","importance":null,'
        b'"global_scale":false,"rules":[],"requantize":false,"dtype":null,"profile":"default","experts":"packed",'
        b'"alignment":null},"sources":[{"name":"model.safetensors","size":4096,"metadata":{"format":"pt"},'
        b'"tensors":["model.layers.0.mlp.up_proj.weight","model.norm.weight"]}],"coverage":{'
        b'"tensors":{"source":2,"stored":2,"derived":{},"left_out":[]},'
        b'"files":{"source":2,"stored":2,"derived":{},"left_out":[]},"heads":{},"kept_whole":[]}}\n'
    )


def test_own_document_holds_no_path_and_is_the_same_for_the_same_import() -> None:
    plans = [
        _plan(inventory([UP, NORM], folder=folder), quant="int4")
        for folder in ("/models/tiny", "/elsewhere/x")
    ]
    assert plans[0].documents == plans[1].documents
    assert [blob.header for blob in plans[0].blobs] == [blob.header for blob in plans[1].blobs]
    assert all(b"/" not in document for document in plans[0].documents.values())


def test_own_document_comes_last_and_only_in_the_default_profile() -> None:
    source = inventory([NORM])
    source = replace(
        source, documents={**source.documents, "tokenizer.json": b"{}", "zz.json": b"[]"}
    )
    assert list(_plan(source).documents) == [
        "config.json",
        "tokenizer.json",
        "zz.json",
        "blobstore.json",
    ]
    assert _plan(source, profile="ollama").documents == source.documents


def test_a_document_of_our_name_is_refused_in_the_default_profile() -> None:
    source = inventory([NORM])
    source = replace(source, documents={**source.documents, "blobstore.json": b"{}"})
    with pytest.raises(UnsupportedSourceError, match=r"blobstore\.json"):
        _plan(source)
    assert _plan(source, profile="ollama").documents == source.documents


def test_only_the_default_profile_can_do_without_a_config() -> None:
    assert _plan(inventory([UP]), quant="q8").config.file_type == "int8"
    source = inventory([NORM], architecture=None)
    plan = _plan(source)
    assert list(plan.documents) == ["blobstore.json"]
    assert plan.config.capabilities == []
    with pytest.raises(UnsupportedSourceError, match=r"no config\.json"):
        _plan(source, profile="ollama")


@pytest.mark.parametrize(
    ("quant", "profile", "dtype", "bits"),
    [
        ("none", "default", DType.BF16, 16),
        ("none", "default", DType.I8, 8),
        ("int4", "ollama", DType.BF16, 4 + 2 * 16 / 64),
        ("int4", "default", DType.F32, 4 + 2 * 32 / 32),
        ("int8", "default", DType.F16, 8 + 2 * 16 / 64),
        ("nvfp4", "default", DType.BF16, 4 + 8 / 16),
        ("mxfp4", "default", DType.BF16, 4 + 8 / 32),
        ("mxfp8", "default", DType.F32, 8 + 8 / 32),
    ],
)
def test_bits_per_weight_count_scales_and_biases(
    quant: str, profile: str, dtype: DType, bits: float
) -> None:
    weight = source_tensor(UP.name, *UP.shape, dtype=dtype)
    assert _plan(inventory([weight]), quant=quant, profile=profile).bits_per_weight == bits


def test_sizes_are_sums_of_their_parts() -> None:
    experts = [
        source_tensor(f"model.layers.0.mlp.experts.{expert}.up_proj.weight", 64, 64)
        for expert in range(3)
    ]
    for profile in ("default", "ollama"):
        plan = _plan(inventory([UP, DOWN, NORM, *experts]), quant="int4", profile=profile)
        assert sum(blob.source_bytes for blob in plan.blobs) == plan.inventory.nbytes
        assert plan.parameters == plan.inventory.nbytes // 2
        for blob in plan.blobs:
            assert blob.data_size == max(entry.end for entry in blob.entries.values())
            assert blob.size == len(blob.header) + blob.data_size
        documents = sum(map(len, plan.documents.values())) + len(plan.config.encode())
        assert plan.stored_bytes == sum(blob.size for blob in plan.blobs) + documents


def _experts(layer: int) -> list[SourceTensor]:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for expert in (0, 1)
        for part in ("down", "up")
    ]
    return [source_tensor(f"{name}.weight", 64, 64) for name in names]


def _types(plan: ImportPlan) -> dict[str, str | None]:
    return {
        tensor.name: str(tensor.quantization) if tensor.quantization else None
        for tensor in plan.tensors
    }


def test_packed_experts_get_one_type_whatever_the_architecture_promotes() -> None:
    source = inventory(_experts(0), architecture="Cohere2MoeForCausalLM", num_hidden_layers=8)
    packed, stacked = (
        _plan(source, quant="int4", experts="packed"),
        _plan(source, quant="int4", experts="stacked"),
    )
    assert [dict(blob.metadata) for blob in packed.blobs] == [
        {"quant_type": "int4", "group_size": "32"}
    ]
    assert set(_types(packed).values()) == {"int4/32"}
    assert list(_types(stacked).values()) == ["int8/64", "int4/32"]


def test_packed_experts_keep_what_the_architecture_keeps() -> None:
    source = inventory(
        [*_experts(1), *_experts(5)], architecture="LagunaForCausalLM", num_hidden_layers=40
    )
    plan = _plan(source, quant="mxfp8")
    assert [dict(blob.metadata) for blob in plan.blobs] == [
        *(
            {"quant_type": "mxfp8", "group_size": "32"},
            {},
            {"quant_type": "mxfp8", "group_size": "32"},
        )
    ]
    kept = [name for name, given in _types(plan).items() if given is None]
    assert kept == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
