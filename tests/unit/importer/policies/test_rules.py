"""Rules: how they parse, which names they match, which one wins, and a plan with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.inventories import inventory, source_tensor

import blobstore
from blobstore.errors import LimitExceededError, UsageError
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.importer.rules import MAX_PATTERNS, Rule, RuleBook, escaped
from blobstore.source.folders import SourceTensor
from blobstore.store.local.store import Store

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
UP, DOWN, HEAD = f"{MLP}.up_proj.weight", f"{MLP}.down_proj.weight", "lm_head.weight"
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
DENSE = [source_tensor(name, 64, 128) for name in (UP, DOWN, HEAD, EMBED)] + [
    source_tensor(NORM, 128)
]

# Few characters, so that patterns and names meet often.
PATTERNS = st.text(st.sampled_from("a.*?[]!-="), min_size=1, max_size=8)
NAMES = st.text(st.sampled_from("ab.*?[]\n"), max_size=6)


def plan_of(tensors: Sequence[SourceTensor], *rules: str, **options: Any) -> ImportPlan:
    return make_plan(inventory(tensors), ImportOptions.parse(rules=rules, **options))


def types(plan: ImportPlan) -> dict[str, str | None]:
    return {
        tensor.name: str(tensor.quantization) if tensor.quantization else None
        for tensor in plan.tensors
    }


def experts(count: int = 2, cols: int = 64) -> list[SourceTensor]:
    names = ("down_proj", "gate_proj", "up_proj")
    return [
        source_tensor(f"{EXPERTS}.{expert}.{name}.weight", 64, cols)
        for expert in range(count)
        for name in names
    ]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*.down_proj.weight=int8", Rule("*.down_proj.weight", QuantType.INT8)),
        ("a=INT4/128", Rule("a", QuantType.INT4, 128)),
        ("a=q8", Rule("a", QuantType.INT8)),
        ("a=nvfp4/16", Rule("a", QuantType.NVFP4, 16)),
        ("*=none", Rule("*", None)),
        ("a=b=none", Rule("a=b", None)),
    ],
)
def test_a_rule_is_a_pattern_and_a_type(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "invalid rule") for text in ("", "=", "a", "a=", "=int4")),
        ("a=int5", "unknown quantization type 'int5'"),
        ("a=none/32", "unknown quantization type 'none'"),
        ("a=mxfp4/64", "no groups of 64"),
        *((f"a=int4/{size}", "no groups of 0") for size in ("", "-32", " 32", "٣٢", "9" * 5000)),
    ],
)
def test_what_is_no_rule_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Rule.parse(text)


@given(name=NAMES)
def test_an_escaped_name_is_like_itself_only(name: str) -> None:
    rule = Rule(escaped(name), None)
    assert rule.matching([name, name + "a"]) == [name]
    assert rule.literal == name
    assert RuleBook([rule]).rule_for(name) is rule
    assert RuleBook([rule]).rule_for(name + "a") is None


@given(patterns=st.lists(PATTERNS, max_size=6), name=NAMES)
def test_the_book_finds_the_last_rule_that_matches(patterns: list[str], name: str) -> None:
    rules = [Rule(pattern, None) for pattern in patterns]
    wanted = next((rule for rule in reversed(rules) if fnmatchcase(name, rule.pattern)), None)
    assert RuleBook(rules).rule_for(name) is wanted


@given(pattern=PATTERNS, names=st.lists(NAMES, max_size=8))
def test_a_rule_finds_the_names_that_it_is_for(pattern: str, names: list[str]) -> None:
    wanted = {name for name in names if fnmatchcase(name, pattern)}
    assert set(Rule(pattern, None).matching(names)) == wanted


def test_a_rule_wins_over_the_policy_and_the_last_over_the_others() -> None:
    plan = plan_of(
        DENSE,
        "*_proj.weight=mxfp4",
        "*.down_proj.weight=none",
        "model.embed*=int8/128",
        quant="int4",
    )
    assert types(plan) == {
        UP: "mxfp4/32",
        DOWN: None,
        HEAD: "int8/64",
        EMBED: "int8/128",
        NORM: None,
    }


def test_a_type_without_a_group_takes_the_groups_in_use() -> None:
    assert (
        types(plan_of(DENSE, f"{UP}=int4", f"{DOWN}=int8", quant="int4", group_size=128))[UP]
        == "int4/128"
    )
    assert types(plan_of(DENSE, f"{UP}=int4", profile="ollama"))[UP] == "int4/64"
    assert types(plan_of(DENSE, f"{UP}=int4/32", quant="int4", group_size=128))[UP] == "int4/32"


def test_a_wide_rule_says_nothing_about_what_can_not_follow_it() -> None:
    tensors = [
        *DENSE,
        source_tensor("odd.weight", 64, 48),
        source_tensor("ids", 64, 64, dtype=DType.I64),
    ]
    assert types(plan_of(tensors, "*=mxfp8")) == {
        **dict.fromkeys((UP, DOWN, HEAD, EMBED), "mxfp8/32"),
        **dict.fromkeys((NORM, "odd.weight", "ids"), None),
    }


@pytest.mark.parametrize("rule", ["nobody=none", "MODEL.*=int4", "model.layers.1.*=int4"])
def test_a_rule_for_no_tensor_is_an_error(rule: str) -> None:
    with pytest.raises(UsageError, match="no tensor's name matches the rule"):
        plan_of(DENSE, rule)


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (source_tensor(NORM, 128), f"{NORM}=int4"),
        (source_tensor(UP, 64, 48), f"{UP}=int4"),
        (source_tensor(UP, 64, 64), f"{UP}=int4/128"),
        (source_tensor(UP, 64, 64, dtype=DType.I64), "*up*=mxfp4"),
    ],
)
def test_a_rule_that_nothing_can_follow_is_an_error(tensor: SourceTensor, rule: str) -> None:
    with pytest.raises(UsageError, match="matches no tensor that can be quantized so") as caught:
        plan_of([tensor, source_tensor("other", 4)], rule)
    assert caught.value.tensor == tensor.name


def test_a_rule_splits_a_packed_group_and_then_metadata_is_per_tensor() -> None:
    plan = plan_of(experts(), "*.down_proj.weight=int8", quant="int4")
    (blob,) = plan.blobs
    downs = {name for name in types(plan) if ".down_proj." in name}
    assert types(plan) == {name: "int8/64" if name in downs else "int4/32" for name in types(plan)}
    assert blob.metadata[f"{EXPERTS}.1.down_proj.weight.quant_type"] == "int8"
    assert blob.metadata[f"{EXPERTS}.1.up_proj.weight.group_size"] == "32"
    assert len(blob.metadata) == 2 * 6
    (whole,) = plan_of(experts(), f"{EXPERTS}.*=mxfp4", quant="int4").blobs
    assert whole.metadata == {"quant_type": "mxfp4", "group_size": "32"}
    stacked = plan_of(
        experts(), f"{EXPERTS}.down_proj.weight=int8", quant="int4", experts="stacked"
    )
    assert list(types(stacked).values()) == ["int8/64", "int4/32", "int4/32"]


def test_a_rule_may_keep_one_expert() -> None:
    plan = plan_of(experts(), f"{EXPERTS}.1.*=none", quant="int4")
    assert set(types(plan).values()) == {"int4/32", None}
    assert {name for name, kind in types(plan).items() if kind is None} == {
        f"{EXPERTS}.1.{name}_proj.weight" for name in ("up", "down", "gate")
    }
    assert plan.blobs[0].metadata == {"quant_type": "int4", "group_size": "32"}


def test_a_group_that_does_not_fit_is_kept_but_for_what_a_rule_says() -> None:
    tensors = [
        *experts(cols=64),
        source_tensor(f"{EXPERTS}.0.w.weight", 64, 48),
        source_tensor(f"{EXPERTS}.1.w.weight", 64, 48),
    ]
    plan = plan_of(
        [*tensors, source_tensor(UP.replace(".0.", ".1."), 64, 64)],
        "*.0.up_proj.weight=int4",
        quant="int4",
    )
    assert {name for name, kind in types(plan).items() if kind} == {
        f"{EXPERTS}.0.up_proj.weight",
        UP.replace(".0.", ".1."),
    }


def test_rules_are_kept_with_the_model_and_repeat_it(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "m", {**small_tensors(), "odd[0].weight": normal("odd", 32, 64)}
    )
    rules = ["*.up_proj.weight=mxfp8", f"{escaped('odd[0].weight')}=int4/64"]
    first = blobstore.import_model(source, "a", store=store, quant="int4", rules=rules)
    with blobstore.open_model("a", store=store) as model:
        stored = json.loads(model.document("blobstore.json"))["options"]
        assert (model["odd[0].weight"].quant_type, model["odd[0].weight"].group_size) == (
            QuantType.INT4,
            64,
        )
    assert stored["rules"] == rules
    again = blobstore.import_model(
        source, "b", store=store, quant=stored["quant"], rules=stored["rules"]
    )
    assert again.digest == first.digest
    assert again.created == 0


def test_a_thousand_patterns_may_be_tried_on_every_name_and_any_number_be_looked_up() -> None:
    looked_up = [f"model.layers.{number}.x.weight=int8" for number in range(MAX_PATTERNS)]
    patterns = [f"*.{number}.weight=int8" for number in range(MAX_PATTERNS)]
    ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns])
    with pytest.raises(LimitExceededError, match="1,001 rules with patterns, at most 1,000"):
        ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns, "*x*=none"])
