"""Notes of a plan: why it takes more bits than asked for, and the form of experts."""

from __future__ import annotations

from typing import Any

import pytest
from support.inventories import expert_tensors, plan_of, source_tensor

from blobstore.source.folders import SourceTensor

COHERE = "Cohere2MoeForCausalLM"
NORM = source_tensor("model.norm.weight", 64)


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


def test_a_rule_and_a_group_are_reasons_too() -> None:
    (kept,) = notes_of(layers(64, 256), quant="int4", rules=["*.0.*=none", "*.1.*=none"])
    assert "(2 tensors, 65,536 bytes) is kept by a rule" in kept
    odd = [source_tensor(f"model.layers.0.mlp.experts.{n}.w.weight", 64, 48) for n in range(2)]
    (group,) = notes_of([*expert_tensors(), *odd, *layers(64, 64)], quant="int4")
    assert "'model.layers.0.mlp.experts.0.w.weight', which has rows of 48" in group


@pytest.mark.parametrize(
    ("architecture", "asked", "form", "words"),
    [
        (COHERE, None, "stacked", "experts are stacked, because Ollama does not run"),
        (COHERE, "packed", "packed", 'needs experts="stacked"'),
        (COHERE, "stacked", "stacked", None),
        ("Qwen3MoeForCausalLM", None, "packed", None),
    ],
)
def test_the_form_of_experts(
    architecture: str, asked: str | None, form: str, words: str | None
) -> None:
    plan = plan_of(expert_tensors(), {"architecture": architecture}, experts=asked)
    assert len(list(plan.tensors)) == (3 if form == "stacked" else 6)
    assert f'"experts":"{form}"' in plan.documents["blobstore.json"].decode()
    assert [words in note for note in plan.notes if words] == ([True] if words else [])
    assert bool(plan.notes) == bool(words)
