"""A plan's documents and config, its sizes, the decisions of its architecture, and its notes."""

from dataclasses import replace
from typing import Any

import pytest
from support.inventories import expert_tensors, inventory, plan_of, source_tensor, types_of

from blobstore.errors import UnsupportedSourceError
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor
from blobstore.source.inventory import Inventory

NORM = source_tensor("model.norm.weight", 64)
UP = source_tensor("model.layers.0.mlp.up_proj.weight", 64, 128)


def planned(source: Inventory, **options: Any) -> ImportPlan:
    return make_plan(source, ImportOptions.parse(**options))


def with_document(source: Inventory, name: str) -> Inventory:
    return replace(source, documents={**source.documents, name: b"{}"})


def test_own_document_is_exactly_this() -> None:
    documents = plan_of([UP, NORM], quant="int4").documents
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
