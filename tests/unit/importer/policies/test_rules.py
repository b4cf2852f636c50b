"""Rules, and policies of the user: files in TOML and JSON, functions of name, shape and dtype."""

import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support import PYCODE_MOE, ROOT
from support.checkpoints import write_checkpoint
from support.inventories import expert_tensors, plan_of, source_tensor, types_of

from blobstore import errors
from blobstore.formats.dtypes import DType, QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.rules import MAX_PATTERNS, PolicyFile, Rule, RuleBook, escape_name
from blobstore.importer.run import plan_import
from blobstore.source.folders import SourceTensor

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
    with pytest.raises(errors.UsageError):
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
    with pytest.raises(errors.UsageError, match="matches") as caught:
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


def test_a_thousand_patterns_may_be_tried_on_every_name_and_any_number_be_looked_up() -> None:
    looked_up = [f"model.layers.{number}.x.weight=int8" for number in range(MAX_PATTERNS)]
    patterns = [f"*.{number}.weight=int8" for number in range(MAX_PATTERNS)]
    ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns])
    with pytest.raises(errors.LimitExceededError, match="1,001"):
        ImportOptions.parse(quant="int4", rules=[*looked_up, *patterns, "*x*=none"])


# Policies of the user

Q = "model.layers.0.self_attn.q_proj.weight"
TOML = """quant = "int4"
method = "search"
rules = ["a=int8", "*=none"]
[groups]
int4 = 64
q8 = 128
"""


def written(folder: Path, text: str | bytes, name: str = "policy.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    document: dict[str, Any] = {"quant": "int4", "method": "search", "rules": ["a=int8", "*=none"]}
    document["groups"] = {"int4": 64, "q8": 128}
    found = PolicyFile.read(written(tmp_path, TOML))
    assert found == PolicyFile.read(written(tmp_path, json.dumps(document), "policy.json"))
    groups = {QuantType.INT4: 64, QuantType.INT8: 128}
    rules = [Rule("a", QuantType.INT8), Rule("*", None)]
    assert found == PolicyFile("int4", "search", groups, rules)
    assert PolicyFile.read(written(tmp_path, "# nothing\n")) == PolicyFile()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("quant = ", "TOML"),
        (b"\xff\xfe", "TOML"),
        ("a = " + "[" * 100_000, "TOML"),
        ("quant = 4", "quant:"),
        ('rules = ["a=int4", 4]', "rules.1:"),
        ("[groups]\nint4 = 64.0", "groups.int4:"),
        ("rules = [" + '"a=int4",' * 10_001 + "]", "10000"),
    ],
)
def test_what_is_not_such_a_document(tmp_path: Path, text: str | bytes, named: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(errors.DocumentError, match=re.escape(named)) as caught:
        PolicyFile.read(path)
    assert (caught.value.rule, caught.value.path) == ("O1", str(path))


def test_files_that_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "bad.json").write_text('{"quant":NaN}')
    large = written(tmp_path, " " * (2**20 + 1))
    for path, kind in (
        (tmp_path / "none.toml", errors.NotFoundError),
        (tmp_path / "pipe.toml", errors.StorageError),
        (tmp_path / "bad.json", errors.DocumentError),
        (large, errors.LimitExceededError),
    ):
        with pytest.raises(kind):
            PolicyFile.read(path)


@pytest.mark.parametrize(
    "key", [".".join(["a"] * 20_000), " . ".join(['"a"', "'b'"] * 10_000)], ids=["bare", "quoted"]
)
def test_a_key_of_many_parts_is_refused_before_tomllib(tmp_path: Path, key: str) -> None:
    for text in (f"{key} = 1", f"[{key}]"):
        with pytest.raises(errors.LimitExceededError, match="64 parts"):
            PolicyFile.read(written(tmp_path, text))
    rules = [f"model.layers.{number}.mlp.down_proj.weight=int8" for number in range(100)]
    assert len(PolicyFile.read(written(tmp_path, f"rules = {rules}")).rules) == 100


def test_other_options_win_over_the_file(tmp_path: Path) -> None:
    policy = written(tmp_path, TOML)
    options = ImportOptions.parse(
        policy=policy, quant="int8", method="minmax", group_size=32, rules=["a=mxfp4"]
    )
    assert (options.quant_type, options.method) == (QuantType.INT8, "minmax")
    assert options.quantization(QuantType.INT8).group_size == 32
    assert options.quantization(QuantType.INT4).group_size == 64
    assert [str(rule) for rule in options.rules] == ["a=int8", "*=none", "a=mxfp4"]
    given = ImportOptions.parse(policy=policy, group_size=128)  # of the file's type
    assert given.quantization(QuantType.INT4).group_size == 128


def test_groups_are_for_types_that_rules_and_promotions_use_too(tmp_path: Path) -> None:
    text = f'quant = "int4"\nrules = ["{UP}=int8"]\n[groups]\nint4 = 64\nint8 = 32\n'
    plan = plan_import(write_checkpoint(tmp_path / "m"), policy=written(tmp_path, text))
    kinds = types_of(plan)
    assert (kinds[UP], kinds["lm_head.weight"], kinds[Q]) == ("int8/32", "int8/32", "int4/64")
    options = json.loads(plan.documents["blobstore.json"])["options"]
    assert (options["quant"], options["groups"]) == ("int4", {"int4": 64, "int8": 32})
    assert options["rules"] == [f"{UP}=int8"]


def test_the_documented_example_does_what_it_says() -> None:
    plan = plan_import(PYCODE_MOE, policy=ROOT / "docs" / "example-policy.toml")
    kinds = types_of(plan)
    assert plan.options.method == "search"
    assert kinds["model.layers.1.self_attn.q_proj.weight"] == "int8/64"
    assert kinds["model.layers.1.mlp.experts.0.up_proj.weight"] == "int4/64"
    assert kinds["model.layers.1.mlp.experts.0.down_proj.weight"] == "int8/128"
    assert {kind for name, kind in kinds.items() if name.startswith("model.layers.0.")} == {"none"}


def test_a_function_decides_what_it_wants_to_and_rules_win_over_it() -> None:
    seen: list[tuple[str, tuple[int, ...], str]] = []

    def policy(name: str, shape: tuple[int, ...], dtype: str) -> str | None:
        seen.append((name, shape, dtype))
        if "down_proj" in name:
            return "int8/64"
        return "none" if "head" in name or name.endswith("q_proj.weight") else None

    rules = ["*down_proj*=int8/64", "*q_proj.weight=none", "lm_head.weight=nvfp4"]
    plan = plan_import(PYCODE_MOE, quant="int4", policy=policy, rules=rules[-1:])
    repeated = plan_import(PYCODE_MOE, quant="int4", rules=rules)
    assert types_of(plan) == types_of(repeated)
    matrices = {tensor.name: tensor.shape for tensor in plan.tensors if len(tensor.shape) > 1}
    assert {name: shape for name, shape, _ in seen} == matrices
    assert {dtype for _, _, dtype in seen} == {"BF16"}
    recorded = json.loads(plan.documents["blobstore.json"])["options"]["rules"]
    again = plan_import(PYCODE_MOE, quant="int4", rules=recorded)  # without the function
    assert [blob.header for blob in again.blobs] == [blob.header for blob in plan.blobs]


def test_an_answer_that_is_not_a_type_and_an_error_of_the_function(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    for answer in (7, "int5", "int4/7"):
        with pytest.raises(errors.UsageError, match=str(answer)):
            plan_import(source, policy=lambda *_, answer=answer: answer)
    with pytest.raises(ZeroDivisionError):
        plan_import(source, policy=lambda *_: str(1 // 0))
