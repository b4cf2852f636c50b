"""Rules: how they parse, which names they match, which one wins, and a plan with them."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.inventories import expert_tensors, plan_of, source_tensor, types_of

import blobstore
from blobstore.errors import LimitExceededError, UsageError
from blobstore.formats.dtypes import DType, QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.rules import MAX_PATTERNS, Rule, RuleBook, escape_name
from blobstore.source.folders import SourceTensor
from blobstore.store.local.store import Store

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
UP, DOWN, HEAD = f"{MLP}.up_proj.weight", f"{MLP}.down_proj.weight", "lm_head.weight"
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
DENSE = [source_tensor(name, 64, 128) for name in (UP, DOWN, HEAD, EMBED)]
DENSE += [source_tensor(NORM, 128)]

# Few characters, so that patterns and names meet often.
PATTERNS = st.text(st.sampled_from("a.*?[]!-="), min_size=1, max_size=8)
NAMES = st.text(st.sampled_from("ab.*?[]\n"), max_size=6)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*.down_proj.weight=int8", Rule("*.down_proj.weight", QuantType.INT8)),
        ("a=INT4/128", Rule("a", QuantType.INT4, 128)),
        ("a=q8", Rule("a", QuantType.INT8)),
        ("a=b=none", Rule("a=b", None)),
    ],
)
def test_a_rule_is_a_pattern_and_a_type(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=int4",
        "a=int5",
        "a=none/32",
        "a=mxfp4/64",
        "a=int4/٣٢",
        "a=int4/" + "9" * 5000,
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Rule.parse(text)


@given(name=NAMES)
def test_an_escaped_name_is_like_itself_only(name: str) -> None:
    rule = Rule(escape_name(name), None)
    assert rule.matches([name, name + "a"]) == [name]
    assert RuleBook([rule]).rule_for(name) is rule
    assert RuleBook([rule]).rule_for(name + "a") is None


@given(patterns=st.lists(PATTERNS, max_size=6), names=st.lists(NAMES, max_size=8))
def test_the_last_rule_that_matches_wins(patterns: list[str], names: list[str]) -> None:
    rules = [Rule(pattern, None) for pattern in patterns]
    for rule in rules:
        wanted = {name for name in names if fnmatchcase(name, rule.pattern)}
        assert set(rule.matches(names)) == wanted
    for name in names:
        last = next((rule for rule in reversed(rules) if fnmatchcase(name, rule.pattern)), None)
        assert RuleBook(rules).rule_for(name) is last


def test_a_rule_wins_over_the_policy_and_the_last_over_the_others() -> None:
    rules = ["*_proj.weight=mxfp4", "*.down_proj.weight=none", "model.embed*=int8/128"]
    assert types_of(plan_of(DENSE, rules=rules, quant="int4")) == {
        UP: "mxfp4/32",
        DOWN: "none",
        HEAD: "int8/64",
        EMBED: "int8/128",
        NORM: "none",
    }


def test_a_type_without_a_group_takes_the_groups_in_use() -> None:
    plan = plan_of(DENSE, rules=[f"{UP}=int4", f"{DOWN}=int4/32"], quant="int4", group_size=128)
    assert (types_of(plan)[UP], types_of(plan)[DOWN]) == ("int4/128", "int4/32")
    assert types_of(plan_of(DENSE, rules=[f"{UP}=int4"], profile="ollama"))[UP] == "int4/64"


def test_a_wide_rule_says_nothing_about_what_can_not_follow_it() -> None:
    odd = source_tensor("odd.weight", 64, 48)
    integers = source_tensor("ids", 64, 64, dtype=DType.I64)
    assert types_of(plan_of([*DENSE, odd, integers], rules=["*=mxfp8"])) == {
        **dict.fromkeys((UP, DOWN, HEAD, EMBED), "mxfp8/32"),
        **dict.fromkeys((NORM, "odd.weight", "ids"), "none"),
    }


@pytest.mark.parametrize(
    ("tensor", "rule", "named"),
    [
        (source_tensor(UP, 64, 64), "nobody=none", None),
        (source_tensor(UP, 64, 64), "MODEL.*=int4", None),
        (source_tensor(NORM, 128), f"{NORM}=int4", NORM),
        (source_tensor(UP, 64, 64), f"{UP}=int4/128", UP),
        (source_tensor(UP, 64, 64, dtype=DType.I64), "*up*=mxfp4", UP),
    ],
)
def test_a_rule_that_no_tensor_follows(tensor: SourceTensor, rule: str, named: str | None) -> None:
    with pytest.raises(UsageError, match="matches") as caught:
        plan_of([tensor, source_tensor("other", 4)], rules=[rule])
    assert caught.value.tensor == named


def test_a_rule_splits_a_packed_group_and_then_metadata_is_per_tensor() -> None:
    plan = plan_of(expert_tensors(), rules=["*.down_proj.weight=int8"], quant="int4")
    (blob,) = plan.blobs
    assert types_of(plan) == {
        name: "int8/64" if ".down_proj." in name else "int4/32" for name in types_of(plan)
    }
    assert blob.metadata[f"{EXPERTS}.1.down_proj.weight.quant_type"] == "int8"
    assert blob.metadata[f"{EXPERTS}.1.up_proj.weight.group_size"] == "32"
    assert len(blob.metadata) == 2 * 6
    (whole,) = plan_of(expert_tensors(), rules=[f"{EXPERTS}.*=mxfp4"], quant="int4").blobs
    assert whole.metadata == {"quant_type": "mxfp4", "group_size": "32"}


def test_rules_are_kept_with_the_model_and_repeat_it(store: Store, tmp_path: Path) -> None:
    tensors = {**small_tensors(), "odd[0].weight": normal("odd", 32, 64)}
    source = write_checkpoint(tmp_path / "m", tensors)
    rules = ["*.up_proj.weight=mxfp8", f"{escape_name('odd[0].weight')}=int4/64"]
    first = blobstore.import_model(source, "a", store=store, quant="int4", rules=rules)
    with blobstore.open_model("a", store=store) as model:
        options = json.loads(model.document("blobstore.json"))["options"]
        odd = model["odd[0].weight"]
        assert (odd.quant_type, odd.group_size, options["rules"]) == (QuantType.INT4, 64, rules)
    given = {name: options[name] for name in ("quant", "rules")}
    again = blobstore.import_model(source, "b", store=store, **given)
    assert (again.digest, again.created) == (first.digest, 0)


def test_a_thousand_patterns_may_be_tried_on_every_name_and_any_number_be_looked_up() -> None:
    looked_up = [f"model.layers.{number}.x.weight=int8" for number in range(MAX_PATTERNS)]
    patterns = [f"*.{number}.weight=int8" for number in range(MAX_PATTERNS)]
    ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns])
    with pytest.raises(LimitExceededError, match="1,001"):
        ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns, "*x*=none"])
