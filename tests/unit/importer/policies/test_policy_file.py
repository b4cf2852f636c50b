"""Policies of the user: files in TOML and JSON, and functions of name, shape and dtype."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE, ROOT
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.cli.main import run
from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
    UsageError,
)
from blobstore.formats.quant import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.rules import PolicyFile, Rule
from blobstore.importer.run import plan_import

UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
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


def types_of(plan: blobstore.ImportPlan) -> dict[str, str]:
    return {tensor.name: str(tensor.quantization or "none") for tensor in plan.tensors}


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    document: dict[str, Any] = {"quant": "int4", "method": "search", "rules": ["a=int8", "*=none"]}
    document["groups"] = {"int4": 64, "q8": 128}
    found = PolicyFile.read(written(tmp_path, TOML))
    assert found == PolicyFile.read(written(tmp_path, json.dumps(document), "policy.json"))
    groups = {QuantType.INT4: 64, QuantType.INT8: 128}
    rules = [Rule("a", QuantType.INT8), Rule("*", None)]
    assert found == PolicyFile("int4", "search", groups, rules)
    assert PolicyFile.read(written(tmp_path, "# nothing\n")) == PolicyFile()
    assert ImportOptions.parse(policy=tmp_path / "policy.toml") == ImportOptions.parse()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quant = ", "is not a TOML document"),
        (b"\xff\xfe", "is not a TOML document"),
        ("a = " + "[" * 100_000, "is not a TOML document"),
        (f"quant = {'9' * 5000}", "is not a TOML document"),
        ("rule = []", "rule: Extra inputs are not permitted"),
        ("quant = 4", "quant: Input should be a valid string"),
        ('rules = ["a=int4", 4]', "rules.1: Input should be a valid string"),
        ("[groups]\nint4 = 64.0", "groups.int4: Input should be a valid integer"),
        ("[[groups]]\nint4 = 64", "groups: Input should be a valid dictionary"),
        ("rules = [" + '"a=int4",' * 10_001 + "]", "rules: List should have at most 10000 items"),
    ],
)
def test_what_is_not_such_a_toml_document_is_refused(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DocumentError, match=re.escape(said)) as caught:
        PolicyFile.read(path)
    assert (caught.value.rule, caught.value.path) == ("O1", str(path))


@pytest.mark.parametrize("text", ["", "[]", '{"rules":[],"rules":[]}', '{"quant":NaN}'])
def test_what_is_not_such_a_json_document_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text, "policy.json")
    with pytest.raises(DocumentError) as caught:
        PolicyFile.read(path)
    assert (caught.value.rule, caught.value.path) == ("O1", str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quant = "int5"', "unknown quantization type 'int5'"),
        ('method = "best"', "unknown quantization method 'best'"),
        ('rules = ["a"]', "invalid rule 'a'"),
        ("[groups]\nint5 = 64", "unknown quantization type 'int5'"),
        ("[groups]\nint4 = 48", "int4 has no groups of 48"),
    ],
)
def test_an_unknown_word_is_wrong_use_and_the_file_is_named(
    tmp_path: Path, text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        PolicyFile.read(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["policy.toml", "policy.json"])
def test_a_large_file_is_not_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, " " * (2**20 + 1), name)
    with pytest.raises(LimitExceededError, match="at most 1,048,576 for a policy"):
        PolicyFile.read(path)


@pytest.mark.parametrize(
    "key", [".".join(["a"] * 20_000), " . ".join(['"a"', "'b'"] * 10_000)], ids=["bare", "quoted"]
)
def test_a_key_of_many_parts_is_refused_before_tomllib_takes_its_square(
    tmp_path: Path, key: str
) -> None:
    for text in (f"{key} = 1", f"[{key}]"):
        with pytest.raises(LimitExceededError, match="dotted key of 64 parts or more"):
            PolicyFile.read(written(tmp_path, text))
    rules = [f"model.layers.{number}.mlp.down_proj.weight=int8" for number in range(100)]
    assert len(PolicyFile.read(written(tmp_path, f"rules = {rules}")).rules) == 100


def test_a_missing_file_a_folder_and_a_pipe_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        PolicyFile.read(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml"):
        with pytest.raises(BlobStoreError):
            PolicyFile.read(path)


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
    with pytest.raises(UsageError, match="needs a quantization type"):
        ImportOptions.parse(policy=written(tmp_path, 'method = "search"'))


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


def test_the_command_line_takes_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_checkpoint(tmp_path / "m"))
    policy = str(written(tmp_path, 'quant = "mxfp8"\nrules = ["*.up_proj.weight=none"]\n'))
    line = ["plan", source, "--policy", policy, "--rule", "lm_head.weight=int4", "--json"]
    assert run(line) == 0
    blobs = json.loads(capsys.readouterr().out)["blobs"]
    kinds = {one["name"]: one["quant_type"] for blob in blobs for one in blob["tensors"]}
    assert (kinds[UP], kinds["lm_head.weight"], kinds[Q]) == (None, "int4", "mxfp8")
    assert run(["plan", source, "--policy", str(tmp_path / "x")]) == 1
    written(tmp_path, 'rules = ["nobody=int4"]')
    assert run(["plan", source, "--policy", policy]) == 2
    assert "nobody=int4" in capsys.readouterr().err


def test_a_function_decides_what_it_wants_to_and_rules_win_over_it() -> None:
    seen: list[tuple[str, tuple[int, ...], str]] = []

    def policy(name: str, shape: tuple[int, ...], dtype: str) -> str | None:
        seen.append((name, shape, dtype))
        if "down_proj" in name:
            return "int8/64"
        return "none" if "head" in name or name.endswith("q_proj.weight") else None

    rules = ["*down_proj*=int8/64", "*q_proj.weight=none", "lm_head.weight=nvfp4"]
    plan = plan_import(PYCODE_MOE, quant="int4", policy=policy, rules=rules[-1:])
    assert types_of(plan) == types_of(plan_import(PYCODE_MOE, quant="int4", rules=rules))
    matrices = {tensor.name: tensor.shape for tensor in plan.tensors if len(tensor.shape) > 1}
    assert {name: shape for name, shape, _ in seen} == matrices
    assert {dtype for _, _, dtype in seen} == {"BF16"}


def test_an_import_can_be_repeated_without_its_function(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    made = plan_import(
        source, quant="int4", policy=lambda name, *_: "mxfp8" if "q_proj" in name else None
    )
    recorded = json.loads(made.documents["blobstore.json"])["options"]["rules"]
    again = plan_import(source, quant="int4", rules=recorded)
    assert [blob.header for blob in again.blobs] == [blob.header for blob in made.blobs]
    assert types_of(made)[Q] == "mxfp8/32"


@pytest.mark.parametrize(
    ("answer", "says"), [(7, "and not the name"), ("int5", "int5"), ("int4/7", "7")]
)
def test_an_answer_that_is_not_a_type(answer: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        plan_import(write_checkpoint(tmp_path / "m"), policy=lambda *_: answer)


def test_an_error_of_the_function_is_its_own(tmp_path: Path) -> None:
    def policy(*_: object) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        plan_import(write_checkpoint(tmp_path / "m"), policy=policy)
