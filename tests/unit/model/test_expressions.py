"""Expressions give the same values evaluated, filled and cut, and codes follow weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from blobstore import kernels
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import QuantizedArray
from blobstore.model.sanitize import (
    Computed,
    Expression,
    Joined,
    Stored,
    evaluate,
    fill,
    in_units,
    joined,
    leaves,
    reshaped,
    row_range,
    runs,
    sliced,
    transposed,
)

Array = np.ndarray[Any, Any]
GROUP = 32
ARRAYS = {
    name: np.random.default_rng(number).standard_normal((4, 6, 2 * GROUP)).astype(np.float32)
    for number, name in enumerate("abc")
}


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> Expression:
    """A tree over the arrays a, b and c, of rank 3."""
    kind = (
        draw(st.sampled_from(["leaf", "reshape", "transpose", "slice", "join"]))
        if depth
        else "leaf"
    )
    if kind == "leaf":
        return Stored(draw(st.sampled_from("abc")), (4, 6, 2 * GROUP))
    of = draw(expressions(depth=depth - 1))
    if kind == "reshape":
        first, second, last = of.shape
        shapes = [
            (second, first, last),
            (1, first * second, last),
            (first, second * last, 1),
            of.shape,
        ]
        return reshaped(of, draw(st.sampled_from(shapes)))
    if kind == "transpose":
        return transposed(of, draw(st.permutations(range(3))))
    if kind == "slice":
        begins = [draw(st.integers(0, size - 1)) for size in of.shape]
        return sliced(
            of,
            [
                range(begin, draw(st.integers(begin + 1, size)), draw(st.integers(1, 2)))
                for begin, size in zip(begins, of.shape, strict=True)
            ],
        )
    axis = draw(st.integers(0, 2))
    return joined([of, of], axis)


@given(expressions())
def test_filling_copies_what_evaluating_gives(expression: Expression) -> None:
    value = evaluate(expression, ARRAYS.__getitem__)
    assert value.shape == expression.shape
    out = np.zeros(expression.shape, np.float32)
    fill(out, expression, ARRAYS.__getitem__)
    np.testing.assert_array_equal(out, value)


@given(expressions())
def test_runs_are_the_values_in_order(expression: Expression) -> None:
    found = runs(expression)
    if found is not None:
        pieces = [ARRAYS[name].reshape(-1)[start : start + count] for name, start, count in found]
        value = evaluate(expression, ARRAYS.__getitem__).reshape(-1)
        np.testing.assert_array_equal(np.concatenate(pieces), value)


@pytest.mark.parametrize("quant_type", [QuantType.INT4, QuantType.MXFP8])
@given(expressions())
def test_codes_move_as_values_do(quant_type: QuantType, expression: Expression) -> None:
    """Invariant: dequantizing moved arrays gives the moved values, where codes can follow."""
    quantization = Quantization(quant_type, GROUP)
    stored = {
        name: kernels.quantize(array, quant_type, group_size=GROUP)
        for name, array in ARRAYS.items()
    }

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


def test_groups_that_are_split_are_not_followed() -> None:
    whole = Stored("a", (4, 6, 64))
    assert in_units(transposed(whole, (0, 2, 1)), 32, 32) is None
    assert in_units(sliced(whole, (range(4), range(6), range(0, 64, 2))), 32, 32) is None
    assert in_units(sliced(whole, (range(4), range(6), range(16, 48))), 32, 32) is None
    assert in_units(reshaped(whole, (4, 6, 4, 16)), 32, 32) is None
    assert in_units(reshaped(whole, (4, 6, 2, 32)), 32, 32) == reshaped(
        Stored("a", (4, 6, 2)), (4, 6, 2, 1)
    )


def test_experts_that_are_taken_apart_and_stacked_again_are_the_stack() -> None:
    stack = Stored("experts", (3, 4, 8))
    apart = [reshaped(row_range(stack, number, number + 1), (4, 8)) for number in range(3)]
    again = joined([reshaped(one, (1, 4, 8)) for one in apart], 0)
    assert again == stack
    assert isinstance(joined([reshaped(apart[number], (1, 4, 8)) for number in (0, 2)], 0), Joined)


def test_what_is_computed_stays_so_whatever_is_done_with_it() -> None:
    computed = Computed(frozenset({"x"}), (4, 8))
    assert transposed(computed, (1, 0)) == Computed(frozenset({"x"}), (8, 4))
    other = joined([computed, Stored("y", (4, 8))], 0)
    assert other == Computed(frozenset({"x", "y"}), (8, 8))
    assert list(leaves(other)) == ["x", "y"]
    assert in_units(computed, 8, 8) is None
    assert runs(computed) is None


def test_a_part_between_two_transpositions_is_a_part() -> None:
    turned = transposed(Stored("a", (4, 6, 2 * GROUP)), (0, 2, 1))
    part = sliced(turned, (range(0, 4, 2), range(GROUP, 2 * GROUP), range(1, 6, 3)))
    np.testing.assert_array_equal(
        evaluate(part, ARRAYS.__getitem__), ARRAYS["a"].transpose(0, 2, 1)[::2, GROUP:, 1:6:3]
    )
    back = transposed(part, (0, 2, 1))
    assert back == sliced(
        Stored("a", (4, 6, 2 * GROUP)),
        (range(0, 4, 2), range(1, 6, 3), range(GROUP, 2 * GROUP)),
    )
    assert in_units(back, GROUP, GROUP) is not None
