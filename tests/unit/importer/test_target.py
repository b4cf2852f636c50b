"""Targets: a plan is at most 1 % below its target, and equal with any threads."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE, PYCODE_MOE
from support.checkpoints import BF16, normal, small_tensors, write_checkpoint
from support.inventories import types_of

import blobstore
from blobstore.errors import NonFiniteWeightError, UsageError
from blobstore.importer import targets
from blobstore.importer.allocation import NEAR, Choice, Item, allocate, least_bytes
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
EXPERTS = "model.layers.1.mlp.experts"
EMBED, UP = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
WHOLE = 2**22


@pytest.fixture(autouse=True)
def sample(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(targets, "SAMPLE", 2**12)
    return monkeypatch


def checkpoint(folder: Path, changed: dict[str, Array] | None = None) -> Path:
    """Write a model of two layers of 64 x 256 matrices, and ``changed`` instead of some."""
    made = {
        f"model.layers.{layer}.{name}_proj.weight": normal(f"{name}{layer}", 64, 256)
        for layer in range(2)
        for name in "abcd"
    }
    return write_checkpoint(folder, made | (changed or {}))


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ({"target_bpw": 4.3}, ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")),
        ({"target_bpw": 5.0, "quant": "int4"}, ("int4", "int8")),
        ({"target_bpw": 4.7, "quant": "nvfp4", "global_scale": True}, ("nvfp4", "mxfp4", "mxfp8")),
    ],
    ids=str,
)
def test_bits_are_met_from_below(options: dict[str, Any], families: tuple[str, ...]) -> None:
    plan = blobstore.plan_import(PYCODE, jobs=1, **options)
    assert 0.99 * options["target_bpw"] <= plan.bits_per_weight <= options["target_bpw"]
    kinds = types_of(plan)
    assert {kind.split("/")[0] for kind in kinds.values()} <= {"none", *families}
    assert {kinds[name] for name in kinds if "norm" in name} == {"none"}
    scaled = {tensor.name for tensor in plan.tensors if tensor.global_scale is not None}
    assert bool(scaled) == ("global_scale" in options)
    assert EMBED not in scaled
    again = blobstore.plan_import(PYCODE, jobs=4, **options)
    assert (again.documents, again.relative_errors) == (plan.documents, plan.relative_errors)


def test_a_size_counts_all_that_is_stored(store: Store) -> None:
    size = 3_200_000
    result = blobstore.import_model(PYCODE_MOE, "m", store=store, target_size=size)
    blobs = [path.stat().st_size for path in (store.root / "blobs").iterdir()]
    assert result.stored_bytes == sum(blobs)
    assert 0.99 * size <= sum(blobs) <= size


@pytest.mark.parametrize(
    ("experts", "bits", "rule"),
    [("packed", 6.1, f"{EXPERTS}.*="), ("stacked", 4.5, f"{EXPERTS}.up_proj.weight=")],
)
def test_expert_groups_get_one_type_when_packed(experts: str, bits: float, rule: str) -> None:
    plan = blobstore.plan_import(PYCODE_MOE, target_bpw=bits, experts=experts)
    assert 0.99 * bits <= plan.bits_per_weight <= bits
    kinds = {kind for name, kind in types_of(plan).items() if name.startswith(EXPERTS)}
    assert len(kinds) == 1 or experts == "stacked"
    assert sum(str(one).startswith(rule) for one in plan.options.rules) == 1


def test_what_was_chosen_is_stored_as_rules_that_repeat_the_import_with_its_errors(
    store: Store, sample: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sample.setattr(targets, "SAMPLE", WHOLE)
    source = checkpoint(tmp_path / "m")
    asked: dict[str, Any] = {"target_bpw": 6.0, "method": "search"}
    plan = blobstore.plan_import(source, **asked)
    first = blobstore.import_model(source, "a", store=store, **asked)
    with blobstore.open_model("a", store=store) as model:
        options = json.loads(model.document("blobstore.json"))["options"]
    given = {name: options[name] for name in ("quant", "method", "rules")}
    assert blobstore.import_model(source, "b", store=store, **given).digest == first.digest
    measured = blobstore.measure_quality("a", source, store=store).tensors
    stored = {one.name: one.errors.relative_rmse for one in measured if one.quantized}
    for name, error in plan.relative_errors.items():
        assert error == pytest.approx(stored.get(name, 0.0), rel=1e-4)


def test_the_users_rules_stay(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m", small_tensors())
    rules = ["*.0.a_proj.weight=int8/32", "*.1.*=none", "*.layers.0.b_proj.weight=mxfp4"]
    plan = blobstore.plan_import(source, target_bpw=10.5, rules=rules)
    kinds = types_of(plan)
    assert 0.99 * 10.5 <= plan.bits_per_weight <= 10.5
    assert kinds["model.layers.0.a_proj.weight"] == "int8/32"
    assert kinds["model.layers.0.b_proj.weight"] == "mxfp4/32"
    assert {kind for name, kind in kinds.items() if ".1." in name} == {"none"}
    assert [str(rule) for rule in plan.options.rules][-3:] == rules
    assert "model.layers.0.a_proj.weight" not in plan.relative_errors


@pytest.mark.parametrize("wanted", [{"target_size": 10**9}, {"target_bpw": 1e300}])
def test_everything_is_kept_when_that_is_smaller(wanted: dict[str, Any], tmp_path: Path) -> None:
    tensors = small_tensors() | {UP: np.full((128, 64), np.nan, BF16)}  # no weight is even read
    plan = blobstore.plan_import(write_checkpoint(tmp_path / "m", tensors), **wanted)
    assert set(types_of(plan).values()) == {"none"}
    assert "everything is kept" in plan.notes[0]
    assert set(plan.relative_errors.values()) == {0.0}


@pytest.mark.parametrize("wanted", [{"target_bpw": 4.0}, {"target_size": 1}])
def test_less_than_the_smallest_says_what_is_possible(
    wanted: dict[str, Any], tmp_path: Path
) -> None:
    source = checkpoint(tmp_path / "m")
    with pytest.raises(UsageError, match=r"[0-9,]+ bytes, [0-9.]+ bits") as caught:
        blobstore.plan_import(source, **wanted)
    words = str(caught.value).replace(",", "").split()
    nbytes, bits = (words[words.index(unit) - 1] for unit in ("bytes", "bits"))
    assert blobstore.plan_import(source, target_size=int(nbytes)).stored_bytes <= int(nbytes)
    assert blobstore.plan_import(source, target_bpw=float(bits)).bits_per_weight <= float(bits)


@pytest.mark.parametrize(
    "options",
    [
        {"target_bpw": 4.5, "target_size": 10**6},
        *({"target_bpw": value} for value in (0, float("nan"), True, "4")),
        *({"target_size": value} for value in (-5, 1.5, "3GB")),
        {"target_bpw": 5.0, "group_size": 64},
        {"target_bpw": 5.0, "global_scale": True},
    ],
    ids=str,
)
def test_targets_that_are_none_are_wrong_use(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        blobstore.plan_import(PYCODE, **options)


def test_weights_that_can_not_be_quantized(tmp_path: Path, sample: pytest.MonkeyPatch) -> None:
    sample.setattr(targets, "SAMPLE", WHOLE)
    name, other = "model.layers.1.b_proj.weight", "model.layers.0.b_proj.weight"
    weights = normal("bad", 64, 256).astype(np.float32)
    weights[40, 7:9] = 3e38, -2e38  # its scale overflows
    source = checkpoint(tmp_path / "m", {name: weights})
    chosen = types_of(blobstore.plan_import(source, target_bpw=8.3, quant="int4"))
    assert (chosen[name], chosen[other] != "none") == ("none", True)
    weights[40, 7] = np.inf
    source = checkpoint(tmp_path / "m", {name: weights})
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.plan_import(source, target_bpw=6.0, jobs=3)
    assert (caught.value.tensor, caught.value.index) == (name, (40, 7))


def total(items: Sequence[Item], chosen: Sequence[int]) -> tuple[int, float]:
    choices = [item[index] for item, index in zip(items, chosen, strict=True)]
    return sum(choice.nbytes for choice in choices), math.fsum(choice.error for choice in choices)


def test_few_items_get_what_trying_everything_finds() -> None:
    """The least error of what nearly fills the budget; of all that fits, if nothing does."""
    generator = random.Random(0)
    for _ in range(60):
        items = [
            [
                Choice(generator.randint(1, 1000), generator.random())
                for _ in range(generator.randint(1, 4))
            ]
            for _ in range(generator.randint(1, 4))
        ]
        most = sum(max(choice.nbytes for choice in item) for item in items)
        budget = generator.randint(least_bytes(items), most + 50)
        nbytes, error = total(items, allocate(items, budget))
        every = (total(items, each) for each in itertools.product(*(range(len(i)) for i in items)))
        fitting = [(size, lost) for size, lost in every if size <= budget]
        near = [(size, lost) for size, lost in fitting if size >= NEAR * budget]
        assert nbytes <= budget
        assert error <= min(lost for _, lost in near or fitting) + 1e-9


def test_the_smallest_and_the_largest_budget() -> None:
    items = [[Choice(2**16 * bits, 1 / bits) for bits in (4, 8, 16)]] * 50
    assert allocate(items, least_bytes(items)) == [0] * 50
    assert allocate(items, 2**60) == [2] * 50
    with pytest.raises(UsageError, match="3 bytes"):
        allocate([[Choice(1, 1.0)], [Choice(2, 1.0), Choice(9, 0.0)]], 2)
