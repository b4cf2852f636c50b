"""Policies of the user: files in TOML and JSON, and functions of name, shape and dtype."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE, ROOT
from support.checkpoints import write_checkpoint
from support.inventories import types_of

from blobstore import errors
from blobstore.formats.dtypes import QuantType
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
