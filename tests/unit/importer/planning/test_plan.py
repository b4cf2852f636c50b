"""The plan: blobs, names, order, metadata, layout, documents, notes and coverage."""

from dataclasses import replace
from typing import Any

import pytest
from support import QUANT_TYPES
from support.inventories import expert_tensors, inventory, plan_of, source_tensor, types_of

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.documents import MTP_HEADS, Tally
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import parse_header
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan, PlannedBlob
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor
from blobstore.source.inventory import Inventory
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


# Its documents and config, and the decisions of its architecture

NORM = source_tensor("model.norm.weight", 64)
UP_WEIGHT = source_tensor(UP, 64, 128)


def planned(source: Inventory, **options: Any) -> ImportPlan:
    return make_plan(source, ImportOptions.parse(**options))


def with_document(source: Inventory, name: str) -> Inventory:
    return replace(source, documents={**source.documents, name: b"{}"})


def test_own_document_is_exactly_this() -> None:
    documents = plan_of([UP_WEIGHT, NORM], quant="int4").documents
    assert documents["blobstore.json"] == (
        b'{"version":1,"options":{"quant":"int4","group_size":32,"groups":{},"method":"minmax","importance":null,'
        b'"global_scale":false,"rules":[],"requantize":false,"dtype":null,"profile":"default","experts":"packed",'
        b'"alignment":null},"sources":[{"name":"model.safetensors","size":4096,"metadata":{"format":"pt"},'
        b'"tensors":["model.layers.0.mlp.up_proj.weight","model.norm.weight"]}],"coverage":{'
        b'"tensors":{"source":2,"stored":2,"derived":{},"left_out":[]},'
        b'"files":{"source":2,"stored":2,"derived":{},"left_out":[]},"heads":{},"kept_whole":[]}}\n'
    )


def test_own_document_comes_last_and_only_in_the_default_profile() -> None:
    source = with_document(inventory([NORM]), "zz.json")
    assert list(planned(source).documents) == ["config.json", "zz.json", "blobstore.json"]
    assert planned(source, profile="ollama").documents == source.documents
    taken = with_document(source, "blobstore.json")
    with pytest.raises(UnsupportedSourceError, match=r"blobstore\.json"):
        planned(taken)
    assert planned(taken, profile="ollama").documents == taken.documents


def test_only_the_default_profile_can_do_without_a_config() -> None:
    source = inventory([NORM], architecture=None)
    plan = planned(source)
    assert (list(plan.documents), plan.config.capabilities) == (["blobstore.json"], [])
    with pytest.raises(UnsupportedSourceError, match=r"config\.json"):
        planned(source, profile="ollama")


def test_packed_experts_keep_what_the_architecture_keeps() -> None:
    config = {"architecture": "LagunaForCausalLM", "num_hidden_layers": 40}
    plan = plan_of([*expert_tensors(layer=1), *expert_tensors(layer=5)], config, quant="mxfp8")
    said = {"quant_type": "mxfp8", "group_size": "32"}
    assert [dict(blob.metadata) for blob in plan.blobs] == [said, {}, said]
    kept = [name for name, given in types_of(plan).items() if given == "none"]
    assert kept == [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]


# Notes: why a plan takes more bits than asked for, and the form of experts

COHERE = "Cohere2MoeForCausalLM"


def notes_of(
    tensors: list[SourceTensor], architecture: str = "LlamaForCausalLM", **options: Any
) -> tuple[str, ...]:
    config = {"architecture": architecture, "num_hidden_layers": 2}
    return plan_of(tensors, config, **options).notes


def layers(*shape: int, name: str = "mlp.up_proj.weight") -> list[SourceTensor]:
    return [source_tensor(f"model.layers.{layer}.{name}", *shape) for layer in range(3)]


def test_a_usual_model_needs_no_words() -> None:
    embedding = source_tensor("model.embed_tokens.weight", 128, 256)
    assert notes_of([*layers(64, 256), embedding], quant="int4") == ()
    assert notes_of([*layers(64, 256), NORM], quant="int8") == ()
    assert notes_of([NORM, embedding]) == ()
    assert notes_of(layers(64, 64), COHERE) == ()  # it has no experts


def test_the_largest_kept_tensors_are_named_with_their_reasons() -> None:
    tensors = [
        *layers(64, 256),
        *layers(64, 999, name="mlp.odd.weight"),
        source_tensor("model.embed_tokens.weight", 1024, 256),
        *layers(4, 64, 64, name="mixer.stack.weight"),
        NORM,
    ]
    (note,) = notes_of(tensors, quant="int4")
    assert note.startswith("15.0 bits per weight, and int4/32 has 5.0: ")
    embedding, odd, stack = note.split("; ")
    assert "'model.embed_tokens.weight' (524,288 bytes) is an embedding" in embedding
    assert odd.startswith("'model.layers.N.mlp.odd.weight' (3 tensors, 383,616 bytes)")
    assert "rows of 999" in odd
    assert stack.startswith("'model.layers.N.mixer.stack.weight' (3 tensors, 98,304 bytes)")
    assert "3 dimensions" in stack


@pytest.mark.parametrize(
    ("architecture", "asked", "form", "words"),
    [
        (COHERE, None, "stacked", "experts are stacked, because Ollama does not run"),
        (COHERE, "packed", "packed", 'needs experts="stacked"'),
        (COHERE, "stacked", "stacked", None),
        ("Qwen3MoeForCausalLM", None, "packed", None),
    ],
)
def test_stacks(architecture: str, asked: str | None, form: str, words: str | None) -> None:
    plan = plan_of(expert_tensors(), {"architecture": architecture}, experts=asked)
    assert len(list(plan.tensors)) == (3 if form == "stacked" else 6)
    assert f'"experts":"{form}"' in plan.documents["blobstore.json"].decode()
    assert [words in note for note in plan.notes if words] == ([True] if words else [])
    assert bool(plan.notes) == bool(words)


# Coverage: every tensor is stored, derived or left out with a reason, and counted once


def test_floats_are_stored_and_stacked_experts_derived() -> None:
    tensors = [*expert_tensors(), NORM, UP_WEIGHT]
    assert plan_of(tensors, quant="int4").coverage.tensors == Tally(8, 8)
    stacked = plan_of(tensors, experts="stacked").coverage.tensors
    assert stacked == Tally(8, 2, {"experts that were stacked": 6})


@pytest.mark.parametrize(
    ("names", "config", "count"),
    [
        (["mtp.fc", "mtp.layers.0.x", "model.mtp.x", "nomtp.x"], {}, 3),
        (["layers.1.x", "layers.2.eh_proj", "layers.10.x"], {"num_hidden_layers": 2}, 2),
        (["model.language_model.layers.2.x"], {"text_config": {"num_hidden_layers": 2}}, 1),
        (["model.visual.layers.2.x"], {"num_hidden_layers": 2}, 0),
    ],
)
def test_more_heads(names: list[str], config: dict[str, Any], count: int) -> None:
    plan = plan_of([source_tensor(f"{name}.weight", 4, 64) for name in names], config)
    assert plan.coverage.heads == ({MTP_HEADS: count} if count else {})
