"""Tracing: what a sanitize does to stand-ins is known without a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mlx import core as mx

from blobstore.model.sanitize import Computed, Expression, Sanitize, Stored, evaluate, trace

A = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
B = A + 100
MOVES: dict[str, Callable[[Any, Any], Any]] = {
    "stack": lambda a, b: mx.stack([a, b]),
    "concatenate": lambda a, b: mx.concatenate([a, b], axis=-1),
    "second half": lambda a, _: mx.split(a, 2, axis=0)[1],
    "split at": lambda a, _: mx.split(a, [1, 4], axis=0)[1],
    "swapaxes": lambda a, _: mx.contiguous(a.swapaxes(-1, -2)),
    "every other row": lambda a, _: a[..., ::2, :],
    "columns": lambda a, _: a[:, 2:6],
    "reshape": lambda a, _: a.reshape(2, 3, -1),
    "flatten": lambda a, _: mx.flatten(a.reshape(2, 3, -1), 0, 1),
    "unflatten": lambda a, _: mx.unflatten(a, 0, (2, -1)),
    "moveaxis": lambda a, _: mx.moveaxis(a[None], 0, 2),
    "row": lambda a, _: a[3],
    "squeeze": lambda a, _: a[None].squeeze(0),
    "the same": lambda a, _: a,
}
COMPUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "times a number": lambda a, _: a * 2.0,
    "in place": lambda a, _: a.__imul__(3.0),
    "sum": lambda a, b: a + b,
    "norm": lambda a, _: a / mx.linalg.norm(a, axis=-1, keepdims=True),
    "cast": lambda a, _: a.astype(mx.float16),
    "backwards": lambda a, _: a[::-1],
    "computed, then moved": lambda a, _: (a + 1).transpose(1, 0),
    "moved after a sum": lambda a, b: mx.stack([a, a + b])[1],
}


def traced(sanitize: Sanitize, stand_ins: dict[str, Any]) -> dict[str, Expression]:
    given = {name: Stored(name, array.shape) for name, array in stand_ins.items()}
    return trace(sanitize, stand_ins, given)


def stand_ins() -> dict[str, Any]:
    return {"a": mx.zeros(A.shape), "b": mx.zeros(B.shape)}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_followed(name: str) -> None:
    def sanitize(weights: dict[str, Any]) -> dict[str, Any]:
        return {"out": MOVES[name](weights["a"], weights["b"])}

    found = traced(sanitize, stand_ins())["out"]
    wanted = sanitize({"a": mx.array(A), "b": mx.array(B)})["out"]
    np.testing.assert_array_equal(evaluate(found, {"a": A, "b": B}.__getitem__), np.array(wanted))


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_are_told(name: str) -> None:
    found = traced(
        lambda weights: {"out": COMPUTATIONS[name](weights["a"], weights["b"])}, stand_ins()
    )["out"]
    assert isinstance(found, Computed)
    assert "a" in found.of


def test_names_are_those_that_sanitize_gives() -> None:
    def sanitize(weights: dict[str, Any]) -> dict[str, Any]:
        weights.pop("a")
        return {f"model.{name}": array for name, array in weights.items()} | {"made": mx.ones((3,))}

    assert traced(sanitize, stand_ins()) == {
        "model.b": Stored("b", B.shape),
        "made": Computed(frozenset(), (3,)),
    }


def test_reading_a_value_is_an_error_and_contiguous_comes_back() -> None:
    contiguous = mx.contiguous
    with pytest.raises(ValueError, match="eval"):
        traced(lambda weights: {"out": weights["a"] * weights["b"].max().item()}, stand_ins())
    assert mx.contiguous is contiguous


def test_thousands_of_tensors() -> None:
    names = [f"experts.{number}" for number in range(3000)]
    found = traced(
        lambda weights: {"out": mx.stack(list(weights.values()))},
        {name: mx.zeros((2, 4)) for name in names},
    )
    assert found["out"].shape == (3000, 2, 4)
