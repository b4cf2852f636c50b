"""The plan: blobs, names, order, metadata and layout, from inventories made by hand.

No file is read.

What is planned is also what a reader finds: the planned header, read back, gives the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support import QUANT_TYPES
from support.inventories import inventory, source_tensor

from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import parse_header
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan, PlannedBlob
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor
from blobstore.store.stored import stored_tensors

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
UP = f"{MLP}.up_proj.weight"
HEAD = "lm_head.weight"


def _plan(tensors: Sequence[SourceTensor], **options: Any) -> ImportPlan:
    return make_plan(inventory(tensors), ImportOptions.parse(**options))


def _experts(
    count: int, up: tuple[int, int] = (64, 64), down: tuple[int, int] = (64, 64)
) -> list[SourceTensor]:
    shapes = {"down_proj": down, "gate_proj": up, "up_proj": up}
    return [
        source_tensor(f"{EXPERTS}.{expert}.{name}.weight", *shapes[name])
        for expert in range(count)
        for name in shapes
    ]


def _types(plan: ImportPlan) -> dict[str, str | None]:
    return {
        tensor.name: str(tensor.quantization) if tensor.quantization else None
        for tensor in plan.tensors
    }


def _names(plan: ImportPlan) -> list[str]:
    return [blob.name for blob in plan.blobs]


def _read_back(blob: PlannedBlob) -> list[tuple[str, tuple[int, ...], str | None]]:
    header = parse_header(blob.header[8:], blob.data_size)
    return [
        (tensor.name, tensor.shape, str(tensor.quantization or "") or None)
        for tensor in stored_tensors(header)
    ]


@pytest.mark.parametrize("quant", ["none", "int4", "nvfp4"])
def test_packed_group_is_one_blob_under_its_prefix(quant: str) -> None:
    tensors = [
        *_experts(11),
        source_tensor(f"{MLP}.shared_experts.up_proj.weight", 64, 64),
        source_tensor(f"{MLP}.gate.weight", 11, 128),
    ]
    plan = _plan([*tensors, source_tensor("model.norm.weight", 64)], quant=quant)
    assert _names(plan) == [
        f"{MLP}.gate.weight",
        "model.norm.weight",
        EXPERTS,
        f"{MLP}.shared_experts",
    ]
    packed = plan.blobs[2]
    assert [tensor.name for tensor in packed.tensors] == [tensor.name for tensor in _experts(11)]
    assert next(iter(packed.entries)).startswith(f"{EXPERTS}.0.down_proj.weight")
    for blob in plan.blobs[2:]:
        (quantization,) = {tensor.quantization for tensor in blob.tensors}
        assert (str(quantization.quant_type) if quantization else "none") == quant
        size = str(quantization.group_size) if quantization else ""
        assert blob.metadata == ({"quant_type": quant, "group_size": size} if quantization else {})


@pytest.mark.parametrize(
    ("quant", "size", "cols", "scale", "others"),
    [
        ("int4", "32", 16, ("BF16", [64, 4]), [".bias"]),
        ("int8", "64", 32, ("BF16", [64, 2]), [".bias"]),
        ("nvfp4", "16", 16, ("U8", [64, 8]), []),
        ("mxfp4", "32", 16, ("U8", [64, 4]), []),
        ("mxfp8", "32", 32, ("U8", [64, 4]), []),
    ],
)
def test_quantized_blob_holds_weight_scale_bias_and_says_its_type(
    quant: str, size: str, cols: int, scale: tuple[str, list[int]], others: list[str]
) -> None:
    (blob,) = _plan([source_tensor(UP, 64, 128)], quant=quant).blobs
    header = json.loads(blob.header[8:])
    assert blob.metadata == header.pop("__metadata__") == {"quant_type": quant, "group_size": size}
    arrays = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    wanted = [("", ("U32", [64, cols])), (".scale", scale), *((suffix, scale) for suffix in others)]
    assert [(name, (array["dtype"], array["shape"])) for name, array in arrays] == [
        (UP + suffix, array) for suffix, array in wanted
    ]
    places = [place for _, array in arrays for place in array["data_offsets"]]
    assert (places[0], places[-1]) == (0, blob.data_size)
    assert places[1:-1:2] == places[2::2]  # without gaps


@pytest.mark.parametrize(
    ("tensors", "quant", "named"),
    [
        ([source_tensor(UP, 64, 48)], "int4", f"'{UP}' [64, 48] are not a multiple of 32"),
        (_experts(1, up=(64, 48), down=(48, 64)), "int4", ".0.gate_proj.weight' [64, 48]"),
    ],
)
def test_nothing_that_can_be_quantized_is_a_wrong_use(
    tensors: list[SourceTensor], quant: str, named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _plan([source_tensor("a.weight", 64), *tensors], quant=quant)
    assert named in str(caught.value)


def test_packed_group_is_left_alone_when_one_weight_does_not_fit() -> None:
    plan = _plan(
        [*_experts(2, up=(48, 64), down=(64, 48)), source_tensor(UP, 64, 64)], quant="int4"
    )
    assert {name for name, kind in _types(plan).items() if kind} == {UP}
    assert plan.blobs[-1].metadata == {}


def test_what_stays_unquantized_in_a_packed_group_has_a_blob_of_its_own() -> None:
    extras = [
        source_tensor(f"{EXPERTS}.{expert}.{name}", 64)
        for expert in range(2)
        for name in ("up_proj.bias", "alpha")
    ]
    plan = _plan([*_experts(2), *extras], quant="nvfp4")
    blob, others = plan.blobs
    assert _names(plan) == [EXPERTS, f"{EXPERTS}.unquantized"]
    assert [tensor.name.removeprefix(f"{EXPERTS}.") for tensor in blob.tensors][:3] == [
        *("0.down_proj.weight", "0.gate_proj.weight", "0.up_proj.weight")
    ]
    assert [tensor.name.removeprefix(f"{EXPERTS}.") for tensor in others.tensors] == [
        *("0.alpha", "0.up_proj.bias", "1.alpha", "1.up_proj.bias")
    ]
    assert (blob.metadata, others.metadata) == ({"quant_type": "nvfp4", "group_size": "16"}, {})


def test_the_only_unquantized_tensor_of_a_packed_group_names_its_blob() -> None:
    # Ollama calls a blob's only tensor by the layer's name.
    plan = _plan([*_experts(2), source_tensor(f"{EXPERTS}.alpha", 64)], quant="nvfp4")
    assert _names(plan) == [EXPERTS, f"{EXPERTS}.alpha"]
    unquantized = _plan([*_experts(2), source_tensor(f"{EXPERTS}.alpha", 64)])
    assert _names(unquantized) == [EXPERTS]


@pytest.mark.parametrize(
    ("quant", "together"), [("none", True), ("int8", True), ("nvfp4", True), ("int4", False)]
)
def test_stacked_projections_share_a_blob_when_they_have_one_type(
    quant: str, together: bool
) -> None:
    plan = _plan(_experts(11), quant=quant, profile="ollama")
    names = [f"{EXPERTS}.{name}.weight" for name in ("down_proj", "gate_proj", "up_proj")]
    assert _names(plan) == ([EXPERTS] if together else names)
    assert [tensor.name for tensor in plan.tensors] == names
    for tensor in plan.tensors:
        assert tensor.shape == (11, 64, 64)
        stem = tensor.name.removeprefix(f"{EXPERTS}.")
        assert [source.name for source in tensor.sources] == [
            f"{EXPERTS}.{expert}.{stem}" for expert in range(11)
        ]


def test_stacked_name_may_not_be_taken() -> None:
    with pytest.raises(UnsupportedSourceError, match="two tensors") as caught:
        _plan(
            [*_experts(1), source_tensor(f"{EXPERTS}.up_proj.weight", 1, 64, 64)], experts="stacked"
        )
    assert caught.value.tensor == f"{EXPERTS}.up_proj.weight"


def test_group_name_may_not_be_a_tensor_name() -> None:
    with pytest.raises(UnsupportedSourceError, match="two blobs") as caught:
        _plan([*_experts(1), source_tensor(EXPERTS, 64)])
    assert caught.value.blob == EXPERTS


@pytest.mark.parametrize(
    ("name", "dtype", "profile"),
    [
        (UP, DType.F64, "default"),
        (UP, DType.I8, "ollama"),
        (UP, DType.BOOL, "default"),
        (f"{EXPERTS}.0.up_proj.weight", DType.U32, "default"),
        (f"{EXPERTS}.0.up_proj.weight", DType.F64, "ollama"),
    ],
)
def test_other_dtypes_are_copied_and_not_quantized(name: str, dtype: DType, profile: str) -> None:
    tensors = [source_tensor(name, 64, 64, dtype=dtype)]
    (tensor,) = _plan(tensors, profile=profile).tensors
    assert (tensor.dtype, tensor.quantization) == (dtype, None)
    with pytest.raises(
        UnsupportedSourceError, match=f"is {dtype}: only BF16, F16 and F32"
    ) as caught:
        _plan(tensors, profile=profile, quant="int4")
    assert name.replace(".0.", ".") == str(caught.value.tensor).replace(".0.", ".")
    assert "quant" in str(caught.value.hint)


def test_dtype_converts_float_weights_first() -> None:
    tensors = [
        source_tensor(UP, 64, 64, dtype=DType.F64),
        source_tensor("a.bias", 64),
        source_tensor("ids", 64, dtype=DType.I32),
    ]
    plan = _plan(tensors, quant="int4", dtype="float16")
    assert {tensor.name: tensor.dtype for tensor in plan.tensors} == {
        "a.bias": DType.F16,
        "ids": DType.I32,
        UP: DType.F16,
    }
    assert plan.blobs[-1].entries[f"{UP}.scale"].dtype is DType.F16


@pytest.mark.parametrize("quant", ["none", *QUANT_TYPES])
def test_planned_headers_read_back_as_planned(quant: str) -> None:
    tensors = [
        *_experts(3),
        source_tensor(UP, 64, 128),
        source_tensor("z.weight", 128, 64, dtype=DType.F32),
        source_tensor("model.norm.weight", 64),
        source_tensor("empty", 0, 64),
        source_tensor(f"{EXPERTS}.table", 32, dtype=DType.U32),
    ]
    plan = _plan(tensors, quant=quant)
    for blob in plan.blobs:
        assert _read_back(blob) == [
            (tensor.name, tensor.shape, _types(plan)[tensor.name]) for tensor in blob.tensors
        ]
    odd = source_tensor(f"{EXPERTS}.table.scale", 32, dtype=DType.U32)
    with pytest.raises(UnsupportedSourceError):  # it would read back as quantized
        _plan([*tensors, odd], quant=quant)


@pytest.mark.parametrize(
    ("options", "cols", "alignment"),
    [
        ({}, 2**19 - 1, 8),
        ({}, 2**19, 16_384),
        ({"profile": "ollama"}, 2**21, 8),
        ({"alignment": 4096}, 8, 4096),
        ({"alignment": 8}, 2**21, 8),
    ],
)
def test_data_begin_at_the_alignment(options: dict[str, Any], cols: int, alignment: int) -> None:
    (blob,) = _plan([source_tensor("a", cols)], **options).blobs
    padding = len(blob.header) - len(blob.header.rstrip(b" "))
    assert int.from_bytes(blob.header[:8], "little") == len(blob.header) - 8
    assert len(blob.header) % alignment == 0
    assert padding < alignment
    assert blob.size == len(blob.header) + 2 * cols
