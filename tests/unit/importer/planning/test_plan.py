"""The plan: blobs, names, order, metadata and layout, from inventories made by hand."""

from typing import Any

import pytest
from support import QUANT_TYPES
from support.inventories import expert_tensors, plan_of, source_tensor, types_of

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import parse_header
from blobstore.importer.outputs import ImportPlan, PlannedBlob
from blobstore.store.stored import stored_tensors

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
UP = f"{MLP}.up_proj.weight"


def names_of(plan: ImportPlan) -> list[str]:
    return [blob.name for blob in plan.blobs]


def read_back(blob: PlannedBlob) -> list[tuple[str, tuple[int, ...], str]]:
    header = parse_header(blob.header[8:], blob.data_size)
    return [
        (tensor.name, tensor.shape, str(tensor.quantization or "none"))
        for tensor in stored_tensors(header)
    ]


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_packed_group_is_one_blob_under_its_prefix(quant: str) -> None:
    tensors = [
        *expert_tensors(11),
        source_tensor(f"{MLP}.shared_experts.up_proj.weight", 64, 64),
        source_tensor(f"{MLP}.gate.weight", 11, 128),
        source_tensor("model.norm.weight", 64),
    ]
    plan = plan_of(tensors, quant=quant)
    assert names_of(plan) == [
        *(f"{MLP}.gate.weight", "model.norm.weight", EXPERTS, f"{MLP}.shared_experts")
    ]
    assert [one.name for one in plan.blobs[2].tensors] == [one.name for one in tensors[:33]]
    said = {} if quant == "none" else {"quant_type": quant, "group_size": "16"}
    assert plan.blobs[2].metadata == plan.blobs[3].metadata == said


def test_packed_group_is_left_alone_when_one_weight_does_not_fit() -> None:
    experts = expert_tensors(2, up=(48, 64), down=(64, 48))
    plan = plan_of([*experts, source_tensor(UP, 64, 64)], quant="int4")
    assert {name for name, kind in types_of(plan).items() if kind != "none"} == {UP}
    assert plan.blobs[-1].metadata == {}


@pytest.mark.parametrize(
    ("extras", "name"),
    [
        (["0.alpha", "0.up_proj.bias", "1.alpha", "1.up_proj.bias"], f"{EXPERTS}.unquantized"),
        (["alpha"], f"{EXPERTS}.alpha"),  # Ollama calls a blob's only tensor by the layer's name
    ],
)
def test_what_stays_unquantized_in_a_group_has_its_own_blob(extras: list[str], name: str) -> None:
    tensors = expert_tensors() + [source_tensor(f"{EXPERTS}.{extra}", 64) for extra in extras]
    plan = plan_of(tensors, quant="nvfp4")
    assert names_of(plan) == [EXPERTS, name]
    assert [one.name for one in plan.blobs[1].tensors] == [f"{EXPERTS}.{one}" for one in extras]
    assert plan.blobs[0].metadata == {"quant_type": "nvfp4", "group_size": "16"}
    assert plan.blobs[1].metadata == {}
    assert names_of(plan_of(tensors)) == [EXPERTS]


@pytest.mark.parametrize(("quant", "together"), [("none", True), ("int8", True), ("int4", False)])
def test_stacked_projections_of_one_type_share_a_blob(quant: str, together: bool) -> None:
    plan = plan_of(expert_tensors(11), quant=quant, profile="ollama")
    stems = ("down_proj", "gate_proj", "up_proj")
    names = [f"{EXPERTS}.{stem}.weight" for stem in stems]
    assert names_of(plan) == ([EXPERTS] if together else names)
    for tensor, name, stem in zip(plan.tensors, names, stems, strict=True):
        assert (tensor.name, tensor.shape) == (name, (11, 64, 64))
        assert [source.name for source in tensor.sources] == [
            f"{EXPERTS}.{expert}.{stem}.weight" for expert in range(11)
        ]


def test_names_of_stacks_and_groups_may_not_be_taken() -> None:
    taken = source_tensor(f"{EXPERTS}.up_proj.weight", 1, 64, 64)
    with pytest.raises(UnsupportedSourceError, match="two tensors") as caught:
        plan_of([*expert_tensors(1), taken], experts="stacked")
    assert caught.value.tensor == taken.name
    with pytest.raises(UnsupportedSourceError, match="two blobs") as caught:
        plan_of([*expert_tensors(1), source_tensor(EXPERTS, 64)])
    assert caught.value.blob == EXPERTS


@pytest.mark.parametrize(
    ("name", "dtype", "profile"),
    [
        (UP, DType.F64, "default"),
        (UP, DType.I8, "ollama"),
        (f"{EXPERTS}.0.up_proj.weight", DType.U32, "default"),
        (f"{EXPERTS}.0.up_proj.weight", DType.F64, "ollama"),
    ],
)
def test_other_dtypes_are_copied_and_not_quantized(name: str, dtype: DType, profile: str) -> None:
    tensors = [source_tensor(name, 64, 64, dtype=dtype)]
    (tensor,) = plan_of(tensors, profile=profile).tensors
    assert (tensor.dtype, tensor.quantization) == (dtype, None)
    with pytest.raises(UnsupportedSourceError, match=f"{dtype}.*BF16, F16 and F32") as caught:
        plan_of(tensors, profile=profile, quant="int4")
    assert name.replace(".0.", ".") == str(caught.value.tensor).replace(".0.", ".")


@pytest.mark.parametrize("quant", ["none", *QUANT_TYPES])
def test_planned_headers_read_back_as_planned(quant: str) -> None:
    tensors = [
        *expert_tensors(3),
        source_tensor(UP, 64, 128),
        source_tensor("z.weight", 128, 64, dtype=DType.F32),
        source_tensor("empty", 0, 64),
        source_tensor(f"{EXPERTS}.table", 32, dtype=DType.U32),
    ]
    plan = plan_of(tensors, quant=quant)
    for blob in plan.blobs:
        assert read_back(blob) == [
            (tensor.name, tensor.shape, types_of(plan)[tensor.name]) for tensor in blob.tensors
        ]
    odd = source_tensor(f"{EXPERTS}.table.scale", 32, dtype=DType.U32)
    with pytest.raises(UnsupportedSourceError):  # it would read back as quantized
        plan_of([*tensors, odd], quant=quant)


@pytest.mark.parametrize(
    ("options", "cols", "alignment"),
    [
        ({}, 2**19 - 1, 8),
        ({}, 2**19, 16_384),
        ({"profile": "ollama"}, 2**21, 8),
        ({"alignment": 4096}, 8, 4096),
    ],
)
def test_data_begin_at_the_alignment(options: dict[str, Any], cols: int, alignment: int) -> None:
    (blob,) = plan_of([source_tensor("a", cols)], **options).blobs
    padding = len(blob.header) - len(blob.header.rstrip(b" "))
    assert int.from_bytes(blob.header[:8], "little") == len(blob.header) - 8
    assert len(blob.header) % alignment == 0
    assert padding < alignment
    assert blob.size == len(blob.header) + 2 * cols
