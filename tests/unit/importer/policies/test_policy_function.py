"""A policy may be a function of name, shape and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import UsageError
from blobstore.importer.run import plan_import
from blobstore.store.memory import MemoryStore


def types_of(plan: blobstore.ImportPlan) -> dict[str, str | None]:
    return {
        tensor.name: str(tensor.quantization) if tensor.quantization else None
        for tensor in plan.tensors
    }


def test_a_function_decides_what_it_wants_to(tmp_path: Path) -> None:
    seen: list[tuple[str, tuple[int, ...], str]] = []

    def policy(name: str, shape: tuple[int, ...], dtype: str) -> str | None:
        seen.append((name, shape, dtype))
        if "down_proj" in name:
            return "int8/64"
        return "none" if name == "lm_head.weight" else None

    plan = plan_import(PYCODE_MOE, quant="int4", policy=policy)
    by_rules = plan_import(
        PYCODE_MOE, quant="int4", rules=["*down_proj*=int8/64", "lm_head.weight=none"]
    )
    assert types_of(plan) == types_of(by_rules)
    assert {name for name, _, _ in seen} == {
        tensor.name for tensor in plan.tensors if len(tensor.shape) > 1
    }
    assert {dtype for _, _, dtype in seen} == {"BF16"}
    assert all(isinstance(shape, tuple) for _, shape, _ in seen)


def test_rules_win_over_it() -> None:
    plan = plan_import(
        PYCODE_MOE, quant="int4", policy=lambda *_: "int8", rules=["lm_head.weight=nvfp4"]
    )
    assert "nvfp4" in str(types_of(plan)["lm_head.weight"])
    assert any("int8" in str(kind) for kind in types_of(plan).values())


def test_the_import_can_be_repeated_without_it(tmp_path: Path) -> None:
    store = MemoryStore()
    made = blobstore.import_model(
        PYCODE_MOE,
        "m",
        store=store,
        quant="int4",
        policy=lambda name, *_: "mxfp8" if "q_proj" in name else None,
    )
    own = made.manifest.document("blobstore.json")
    assert own is not None
    options = json.loads(store.blobs.read(own))["options"]
    again = blobstore.import_model(
        PYCODE_MOE, "n", store=store, quant="int4", rules=options["rules"]
    )
    assert [layer.digest for layer in again.manifest.tensor_layers] == [
        layer.digest for layer in made.manifest.tensor_layers
    ]


@pytest.mark.parametrize(
    ("answer", "says"),
    [(7, "and not the name"), (b"int4", "and not the name"), ("int5", "int5"), ("int4/7", "7")],
)
def test_an_answer_that_is_none(answer: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        plan_import(write_checkpoint(tmp_path / "m"), policy=lambda *_: answer)


def test_an_error_of_the_function_is_its_own(tmp_path: Path) -> None:
    def policy(*_: object) -> str:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        plan_import(write_checkpoint(tmp_path / "m"), policy=policy)
