"""Notes of a plan: why it takes more bits than asked for, and the form of experts."""

from __future__ import annotations

from typing import Any

import pytest
from support.inventories import inventory, source_tensor

from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor

COHERE = "Cohere2MoeForCausalLM"


def plan_of(
    tensors: list[SourceTensor], architecture: str = "LlamaForCausalLM", **options: Any
) -> ImportPlan:
    return make_plan(
        inventory(tensors, architecture=architecture, num_hidden_layers=2),
        ImportOptions.parse(**options),
    )


def layers(shape: tuple[int, ...], name: str = "mlp.up_proj.weight") -> list[SourceTensor]:
    return [source_tensor(f"model.layers.{layer}.{name}", *shape) for layer in range(3)]


def experts() -> list[SourceTensor]:
    return [
        source_tensor(f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight", 64, 64)
        for expert in range(2)
        for name in ("up", "down", "gate")
    ]


def test_a_plan_of_the_bits_that_were_asked_needs_no_words() -> None:
    assert plan_of(layers((64, 256)), quant="int4").notes == ()
    norm = source_tensor("model.norm.weight", 64)
    assert plan_of([*layers((64, 256)), norm], quant="int8").notes == ()
    assert plan_of([norm, source_tensor("model.embed_tokens.weight", 640, 64)]).notes == ()
    assert plan_of(layers((64, 64)), COHERE).notes == ()  # it has no experts


def test_an_embedding_of_a_usual_model_needs_no_words() -> None:
    tensors = [*layers((64, 256)), source_tensor("model.embed_tokens.weight", 128, 256)]
    assert plan_of(tensors, quant="int4").notes == ()
    (note,) = plan_of([*tensors, *layers((512, 99), "x.weight")], quant="mxfp8").notes
    assert "'model.layers.N.x.weight' (3 tensors, 304,128 bytes) has rows of 99" in note


def test_the_largest_kept_tensors_are_named_with_their_reasons() -> None:
    tensors = [
        *layers((64, 256)),
        *layers((64, 999), "mlp.odd.weight"),
        source_tensor("model.embed_tokens.weight", 1024, 256),
        *layers((4, 64, 64), "mixer.stack.weight"),
        source_tensor("model.norm.weight", 256),
    ]
    (note,) = plan_of(tensors, quant="int4").notes
    assert note.startswith("15.0 bits per weight, and int4/32 has 5.0: ")
    assert note.split(": ", 1)[1].split("; ") == [
        "'model.embed_tokens.weight' (524,288 bytes) is an embedding",
        (
            "'model.layers.N.mlp.odd.weight' (3 tensors, 383,616 bytes) has rows of 999, not a "
            "multiple of 32"
        ),
        (
            "'model.layers.N.mixer.stack.weight' (3 tensors, 98,304 bytes) has 3 dimensions "
            "and is not known as a stack of "
            "experts"
        ),
    ]


def test_a_rule_and_a_group_are_reasons_too() -> None:
    kept = plan_of(layers((64, 256)), quant="int4", rules=["*.0.*=none", "*.1.*=none"])
    assert (
        "'model.layers.N.mlp.up_proj.weight' (2 tensors, 65,536 bytes) is kept by a rule"
        in kept.notes[0]
    )
    odd = [
        source_tensor(f"model.layers.1.mlp.experts.{expert}.w.weight", 64, 48)
        for expert in range(2)
    ]
    group = plan_of([*experts(), *odd, *layers((64, 64))], quant="int4")
    assert (
        "is in a group with 'model.layers.1.mlp.experts.0.w.weight', which has rows of 48"
        in group.notes[0]
    )


@pytest.mark.parametrize(
    ("architecture", "experts_option", "names", "words"),
    [
        (
            COHERE,
            None,
            {"down_proj", "gate_proj", "up_proj"},
            "experts are stacked, because Ollama does not run",
        ),
        (COHERE, "packed", {""}, 'needs experts="stacked"'),
        (COHERE, "stacked", {"down_proj", "gate_proj", "up_proj"}, ""),
        ("Qwen3MoeForCausalLM", None, {""}, ""),
    ],
)
def test_the_form_of_experts(
    architecture: str, experts_option: str | None, names: set[str], words: str
) -> None:
    plan = plan_of(experts(), architecture, experts=experts_option)
    assert len(list(plan.tensors)) == (3 if "down_proj" in names else 6)
    assert [words in note for note in plan.notes] == ([True] if words else [])
    form = "stacked" if "down_proj" in names else "packed"
    assert f'"experts":"{form}"' in plan.documents["blobstore.json"].decode()
