"""What a `sanitize` of mlx-lm does is traced, and codes follow where weights move."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from mlx import core as mx

from blobstore import kernels
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray
from blobstore.model.sanitize import (
    Computed,
    Expression,
    Sanitize,
    Stored,
    evaluate,
    fill,
    in_units,
    join,
    reshape,
    runs,
    take,
    trace,
    transpose,
)

Array = np.ndarray[Any, Any]
GROUP = 32
SHAPE = (4, 6, 2 * GROUP)
ARRAYS = {
    name: np.random.default_rng(number).standard_normal(SHAPE).astype(np.float32)
    for number, name in enumerate("abc")
}


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> Expression:
    """A tree over the arrays a, b and c, of rank 3."""
    kinds = ["leaf", "reshape", "transpose", "slice", "join"]
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        return Stored(draw(st.sampled_from("abc")), SHAPE)
    of = draw(expressions(depth=depth - 1))
    if kind == "reshape":
        first, second, last = of.shape
        shapes = [(second, first, last), (1, first * second, last), (first, second * last, 1)]
        return reshape(of, draw(st.sampled_from([*shapes, of.shape])))
    if kind == "transpose":
        return transpose(of, draw(st.permutations(range(3))))
    if kind == "slice":
        begins = [draw(st.integers(0, size - 1)) for size in of.shape]
        return take(
            of,
            [
                range(begin, draw(st.integers(begin + 1, size)), draw(st.integers(1, 2)))
                for begin, size in zip(begins, of.shape, strict=True)
            ],
        )
    return join([of, of], draw(st.integers(0, 2)))


@given(expressions())
def test_filling_and_reading_runs_give_what_evaluating_gives(expression: Expression) -> None:
    value = evaluate(expression, ARRAYS.__getitem__)
    assert value.shape == expression.shape
    out = np.zeros(expression.shape, np.float32)
    fill(out, expression, ARRAYS.__getitem__)
    np.testing.assert_array_equal(out, value)
    if (found := runs(expression)) is not None:
        pieces = [ARRAYS[name].reshape(-1)[start : start + count] for name, start, count in found]
        np.testing.assert_array_equal(np.concatenate(pieces), value.reshape(-1))


@given(expressions(), st.sampled_from([QuantType.INT4, QuantType.MXFP8]))
def test_codes_move_as_values_do(expression: Expression, quant_type: QuantType) -> None:
    """Invariant: dequantizing moved arrays gives the moved values, where codes can follow."""
    quantization = Quantization(quant_type, GROUP)
    stored = {n: kernels.quantize(a, quant_type, group_size=GROUP) for n, a in ARRAYS.items()}

    def part(field: str, name: str) -> Any:
        return getattr(stored[name], field)

    parts: dict[str, Array | None] = {}
    for field, unit in (("weight", 32 // quant_type.bits), ("scale", GROUP), ("bias", GROUP)):
        moved = in_units(expression, GROUP, unit)
        if moved is None:
            return
        if getattr(stored["a"], field) is not None:
            parts[field] = evaluate(moved, partial(part, field))
    weight, scale = (np.ascontiguousarray(parts[field]) for field in ("weight", "scale"))
    bias = np.ascontiguousarray(parts["bias"]) if "bias" in parts else None
    values = {name: kernels.dequantize(array) for name, array in stored.items()}
    np.testing.assert_array_equal(
        kernels.dequantize(QuantizedArray(weight, scale, bias, None, quantization)),
        evaluate(expression, values.__getitem__),
    )


def test_codes_do_not_follow_where_groups_are_split() -> None:
    whole = Stored("a", (4, 6, 64))
    assert in_units(transpose(whole, (0, 2, 1)), 32, 32) is None
    assert in_units(take(whole, (range(4), range(6), range(0, 64, 2))), 32, 32) is None
    assert in_units(take(whole, (range(4), range(6), range(16, 48))), 32, 32) is None
    assert in_units(reshape(whole, (4, 6, 4, 16)), 32, 32) is None
    groups = reshape(Stored("a", (4, 6, 2)), (4, 6, 2, 1))
    assert in_units(reshape(whole, (4, 6, 2, 32)), 32, 32) == groups


A = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
B = A + 100
MOVES: dict[str, Callable[[Any, Any], Any]] = {
    "stack": lambda a, b: mx.stack([a, b]),
    "concatenate": lambda a, b: mx.concatenate([a, b], axis=-1),
    "split at": lambda a, _: mx.split(a, [1, 4], axis=0)[1],
    "swapaxes": lambda a, _: mx.contiguous(a.swapaxes(-1, -2)),
    "every other row": lambda a, _: a[..., ::2, :],
    "flatten": lambda a, _: mx.flatten(a.reshape(2, 3, -1), 0, 1),
    "unflatten": lambda a, _: mx.unflatten(a, 0, (2, -1)),
    "moveaxis": lambda a, _: mx.moveaxis(a[None], 0, 2),
    "row": lambda a, _: a[3],
    "squeeze": lambda a, _: a[None].squeeze(0),
}
COMPUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda a, _: a.__imul__(3.0),
    "norm": lambda a, _: a / mx.linalg.norm(a, axis=-1, keepdims=True),
    "cast": lambda a, _: a.astype(mx.float16),
    "backwards": lambda a, _: a[::-1],
    "moved after a sum": lambda a, b: mx.stack([a, a + b])[1],
}


def traced(sanitize: Sanitize) -> dict[str, Expression]:
    """Return what a sanitize makes of the arrays A and B, called ``a`` and ``b``."""
    stand_ins = {"a": mx.zeros(A.shape), "b": mx.zeros(B.shape)}
    return trace(sanitize, stand_ins, {name: Stored(name, A.shape) for name in "ab"})


def test_moves_are_followed() -> None:
    found = traced(lambda of: {name: move(of["a"], of["b"]) for name, move in MOVES.items()})
    for name, move in MOVES.items():
        wanted = np.array(move(mx.array(A), mx.array(B)))
        moved = evaluate(found[name], {"a": A, "b": B}.__getitem__)
        np.testing.assert_array_equal(moved, wanted, err_msg=name)


def test_computations_are_noticed() -> None:
    found = traced(lambda of: {n: make(of["a"], of["b"]) for n, make in COMPUTATIONS.items()})
    for name, made in found.items():
        assert isinstance(made, Computed), name
        assert "a" in made.of


def test_names_are_those_that_sanitize_gives() -> None:
    def sanitize(weights: dict[str, Any]) -> dict[str, Any]:
        weights.pop("a")
        return {f"model.{name}": array for name, array in weights.items()} | {"made": mx.ones((3,))}

    made = Computed(frozenset(), (3,))
    assert traced(sanitize) == {"model.b": Stored("b", B.shape), "made": made}


def test_reading_a_value_is_an_error_and_contiguous_comes_back() -> None:
    contiguous = mx.contiguous
    with pytest.raises(ValueError, match="eval"):
        traced(lambda weights: {"out": weights["a"] * weights["b"].max().item()})
    assert mx.contiguous is contiguous
