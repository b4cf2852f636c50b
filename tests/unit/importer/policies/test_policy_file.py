"""Policy files: TOML and JSON, refusals, and options that override them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE, ROOT
from support.checkpoints import small_tensors, write_checkpoint

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
from blobstore.store.local.store import Store

EXAMPLE = ROOT / "docs" / "example-policy.toml"
TOML = (
    'quant = "int4"\nmethod = "search"\nrules = ["a=int8", "*=none"]\n[groups]\nint4 = 64\nq8 = '
    "128\n"
)
UP = "model.layers.0.mlp.up_proj.weight"


def written(folder: Path, text: str | bytes, name: str = "policy.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    document = {
        "quant": "int4",
        "method": "search",
        "rules": ["a=int8", "*=none"],
        "groups": {"int4": 64, "q8": 128},
    }
    found = PolicyFile.read(written(tmp_path, TOML))
    assert found == PolicyFile.read(written(tmp_path, json.dumps(document), "policy.json"))
    assert found == PolicyFile(
        "int4",
        "search",
        {QuantType.INT4: 64, QuantType.INT8: 128},
        [Rule("a", QuantType.INT8), Rule("*", None)],
    )


@pytest.mark.parametrize(
    ("name", "text"), [("empty.toml", ""), ("empty.json", "{}"), ("comment.toml", "# nothing\n")]
)
def test_a_file_may_say_nothing(tmp_path: Path, name: str, text: str) -> None:
    assert PolicyFile.read(written(tmp_path, text, name)) == PolicyFile()
    assert ImportOptions.parse(policy=tmp_path / name) == ImportOptions.parse()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quant = ", "is not a TOML document"),
        (b"\xff\xfe", "is not a TOML document"),
        ("rules = []\nrules = []", "is not a TOML document"),
        ("a = " + "[" * 100_000, "is not a TOML document"),
        ("rule = []", "rule: Extra inputs are not permitted"),
        ('"\\u001b[31m" = 1', "Extra inputs"),
        ("quant = 4", "quant: Input should be a valid string"),
        ("method = true", "method: Input should be a valid string"),
        ('rules = "a=int4"', "rules: Input should be a valid list"),
        ('rules = ["a=int4", 4]', "rules.1: Input should be a valid string"),
        ("groups = [64]", "groups: Input should be a valid dictionary"),
        ('[groups]\nint4 = "64"', "groups.int4: Input should be a valid integer"),
        ("[groups]\nint4 = 64.0", "groups.int4: Input should be a valid integer"),
        ("[groups]\nint4 = true", "groups.int4: Input should be a valid integer"),
        ("[[groups]]\nint4 = 64", "groups: Input should be a valid dictionary"),
        ("rules = [" + '"a=int4",' * 10_001 + "]", "rules: List should have at most 10000 items"),
    ],
)
def test_what_is_no_such_toml_document_is_refused(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DocumentError, match=re.escape(said)) as caught:
        PolicyFile.read(path)
    assert caught.value.rule == "O1"
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a":1}', '{"rules":[],"rules":[]}', '{"quant":NaN}', '{"rules":' + "[" * 99],
)
def test_what_is_no_such_json_document_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text, "policy.json")
    with pytest.raises(DocumentError) as caught:
        PolicyFile.read(path)
    assert caught.value.rule == "O1"
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quant = "int5"', "unknown quantization type 'int5'"),
        ('method = "best"', "unknown quantization method 'best'"),
        ('rules = ["a"]', "invalid rule 'a'"),
        ('rules = ["a=int5"]', "unknown quantization type 'int5'"),
        ("[groups]\nint5 = 64", "unknown quantization type 'int5'"),
        ("[groups]\nint4 = 48", "int4 has no groups of 48"),
        ("[groups]\nnvfp4 = 32", "nvfp4 has no groups of 32"),
    ],
)
def test_an_unknown_word_is_wrong_use_and_the_file_is_named(
    tmp_path: Path, text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        PolicyFile.read(path)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["policy.toml", "policy.json"])
def test_a_large_file_is_not_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, " " * (2**20 + 1), name)
    with pytest.raises(LimitExceededError, match="at most 1,048,576 for a policy"):
        PolicyFile.read(path)


@pytest.mark.parametrize(
    "key", [".".join(["a"] * 20_000), " . ".join(['"a"', "'b'"] * 10_000)], ids=["bare", "quoted"]
)
@pytest.mark.parametrize("form", ["{} = 1", "[{}]"])
def test_a_key_of_many_parts_is_refused_before_tomllib_takes_its_square(
    tmp_path: Path, key: str, form: str
) -> None:
    with pytest.raises(LimitExceededError, match="dotted key of 64 parts or more"):
        PolicyFile.read(written(tmp_path, form.format(key)))


def test_dots_in_rules_are_not_counted(tmp_path: Path) -> None:
    rules = [f"model.layers.{number}.mlp.down_proj.weight=int8" for number in range(100)]
    assert len(PolicyFile.read(written(tmp_path, f"rules = {rules}")).rules) == 100


def test_a_number_that_python_refuses_is_a_document_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="not a TOML document"):
        PolicyFile.read(written(tmp_path, f"quant = {'9' * 5000}"))


def test_a_missing_file_a_folder_and_a_pipe_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        PolicyFile.read(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml"):
        with pytest.raises(BlobStoreError):
            PolicyFile.read(path)


def test_what_is_given_wins_over_the_file(tmp_path: Path) -> None:
    policy = written(tmp_path, TOML)
    options = ImportOptions.parse(
        policy=policy, quant="int8", method="minmax", group_size=32, rules=["a=mxfp4"]
    )
    assert options.quant_type is QuantType.INT8
    assert options.method == "minmax"
    assert options.quantization(QuantType.INT8).group_size == 32
    assert options.quantization(QuantType.INT4).group_size == 64
    assert [str(rule) for rule in options.rules] == ["a=int8", "*=none", "a=mxfp4"]


def test_the_files_quant_counts_as_asked_for(tmp_path: Path) -> None:
    options = ImportOptions.parse(policy=written(tmp_path, TOML), group_size=128)
    assert options.quantization(QuantType.INT4).group_size == 128
    with pytest.raises(UsageError, match="needs a quantization type"):
        ImportOptions.parse(policy=written(tmp_path, 'method = "search"'))


def test_groups_are_for_types_that_rules_and_promotions_use_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    policy = written(
        tmp_path, f'quant = "int4"\nrules = ["{UP}=int8"]\n[groups]\nint4 = 64\nint8 = 32\n'
    )
    plan = blobstore.plan_import(source, policy=policy)
    kinds = {
        tensor.name: str(tensor.quantization) for tensor in plan.tensors if tensor.quantization
    }
    assert kinds[UP] == kinds["lm_head.weight"] == "int8/32"
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "int4/64"
    options = json.loads(plan.documents["blobstore.json"])["options"]
    assert (options["quant"], options["groups"], options["rules"]) == (
        "int4",
        {"int4": 64, "int8": 32},
        [f"{UP}=int8"],
    )


def test_the_documented_example_does_what_it_says() -> None:
    plan = blobstore.plan_import(PYCODE_MOE, policy=EXAMPLE)
    kinds = {tensor.name: str(tensor.quantization or "none") for tensor in plan.tensors}
    assert plan.options.method == "search"
    assert kinds["model.layers.1.self_attn.q_proj.weight"] == "int8/64"
    assert kinds["model.layers.1.mlp.experts.0.up_proj.weight"] == "int4/64"
    assert kinds["model.layers.1.mlp.experts.0.down_proj.weight"] == "int8/128"
    assert {kind for name, kind in kinds.items() if name.startswith("model.layers.0.")} == {"none"}
    assert kinds["lm_head.weight"] == "int8/64"


def test_the_command_line_takes_a_policy(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "m", small_tensors())
    policy = written(tmp_path, 'quant = "mxfp8"\nrules = ["*.up_proj.weight=none"]\n')
    line: list[Any] = [
        "plan",
        source,
        "--policy",
        policy,
        "--rule",
        "lm_head.weight=int4",
        "--json",
    ]
    assert run([*map(str, line)]) == 0
    shown = json.loads(capsys.readouterr().out)
    kinds = {
        tensor["name"]: tensor["quant_type"]
        for blob in shown["blobs"]
        for tensor in blob["tensors"]
    }
    assert kinds[UP] is None
    assert (kinds["lm_head.weight"], kinds["model.layers.0.self_attn.q_proj.weight"]) == (
        "int4",
        "mxfp8",
    )
    assert (
        run(["import", str(source), "--policy", str(tmp_path / "x"), "--store", str(store.root)])
        == 1
    )
    written(tmp_path, 'rules = ["nobody=int4"]')
    assert run(["import", str(source), "--policy", str(policy), "--store", str(store.root)]) == 2
    assert "nobody=int4" in capsys.readouterr().err
