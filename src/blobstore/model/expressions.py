"""Expressions: how an array is made of stored ones by moving values, without changing any. Pure.

An expression is a tree. Its leaves are stored arrays; its nodes reshape, transpose, slice and join.
`Computed` stands for everything else: values that no stored array contains. `evaluate` and `fill`
follow a tree with NumPy, where all nodes but `Joined` are views where NumPy can make them.

The same tree holds for the arrays of a quantized tensor when no node splits a group: `in_units`
gives it for codes and for scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blobstore.kernels.arrays import Array

Shape = tuple[int, ...]
Arrays = Callable[[str], Array]
"""Returns a stored array by the name of its leaf."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole stored array."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same values in the same order, in another shape."""

    of: Expression
    shape: Shape


@dataclass(frozen=True, slots=True)
class Transposed:
    """Dimension ``i`` is dimension ``axes[i]`` of ``of``."""

    of: Expression
    axes: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Sliced:
    """The indices that ``ranges`` give, one range a dimension."""

    of: Expression
    ranges: tuple[range, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Joined:
    """Arrays one after the other along ``axis``."""

    parts: tuple[Expression, ...]
    axis: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Computed:
    """Values that arithmetic makes from the leaves ``of``."""

    of: frozenset[str]
    shape: Shape


Expression = Stored | Reshaped | Transposed | Sliced | Joined | Computed


def reshaped(of: Expression, shape: Sequence[int]) -> Expression:
    """Return ``of`` in another shape."""
    shape = tuple(shape)
    if shape == of.shape:
        return of
    if isinstance(of, Computed):
        return Computed(of.of, shape)
    return reshaped(of.of, shape) if isinstance(of, Reshaped) else Reshaped(of, shape)


def transposed(of: Expression, axes: Sequence[int]) -> Expression:
    """Return ``of`` with its dimensions in the order of ``axes``."""
    axes = tuple(axes)
    shape = tuple(of.shape[axis] for axis in axes)
    if isinstance(of, Computed):
        return Computed(of.of, shape)
    if isinstance(of, Transposed):
        return transposed(of.of, [of.axes[axis] for axis in axes])
    return of if axes == tuple(range(len(axes))) else Transposed(of, axes, shape)


def sliced(of: Expression, ranges: Sequence[range]) -> Expression:
    """Return a part of ``of``: the indices of ``ranges``, in steps of at least 1.

    Slicing moves inside a transposition, so that a second transposition cancels the first: mlx-lm
    slices fused experts and then transposes them (models/llama4.py, qwen3_vl_moe.py, dbrx.py), and
    imports store them transposed.
    """
    shape = tuple(map(len, ranges))
    if isinstance(of, Computed):
        return Computed(of.of, shape)
    if shape == of.shape:
        return of
    if isinstance(of, Transposed):
        inner = sliced(of.of, [ranges[of.axes.index(axis)] for axis in range(len(of.axes))])
        return transposed(inner, of.axes)
    return Sliced(of, tuple(ranges), shape)


def row_range(of: Expression, begin: int, end: int) -> Expression:
    """Return ``of[begin:end]``."""
    return sliced(of, (range(begin, end), *map(range, of.shape[1:])))


def joined(parts: Sequence[Expression], axis: int) -> Expression:
    """Return ``parts`` one after the other along ``axis``.

    Consecutive rows of one array become one slice of it again.
    """
    if any(isinstance(part, Computed) for part in parts):
        shape = _joined_shape(parts, axis)
        return Computed(frozenset(name for part in parts for name in leaves(part)), shape)
    merged: list[Expression] = []
    for part in parts:
        whole = _rows_together(merged[-1], part) if merged and axis == 0 else None
        if whole is not None:
            merged.pop()
        merged.append(whole or part)
    if len(merged) == 1:
        return merged[0]
    return Joined(tuple(merged), axis, _joined_shape(merged, axis))


def _joined_shape(parts: Sequence[Expression], axis: int) -> Shape:
    first = parts[0].shape
    return (*first[:axis], sum(part.shape[axis] for part in parts), *first[axis + 1 :])


def _rows_together(one: Expression, other: Expression) -> Expression | None:
    first, second = _rows_of(one), _rows_of(other)
    if first is None or second is None or first[0] != second[0] or first[1].stop != second[1].start:
        return None
    return row_range(first[0], first[1].start, second[1].stop)


def _rows_of(expression: Expression) -> tuple[Expression, range] | None:
    # An expert is a row that lost its first dimension, and gets it back when it is stacked.
    if (
        isinstance(expression, Reshaped)
        and isinstance(expression.of, Sliced)
        and expression.shape == expression.of.shape
    ):
        expression = expression.of
    if not isinstance(expression, Sliced):
        return None
    of, rows = expression.of, expression.ranges[0]
    is_rows = expression.shape[1:] == of.shape[1:] and rows.step == 1
    return (of, rows) if is_rows else None


def leaves(expression: Expression) -> Iterator[str]:
    """Yield the names of the leaves, in order, a repeated leaf as often as it occurs."""
    match expression:
        case Stored(name):
            yield name
        case Computed(of):
            yield from sorted(of)
        case Joined(parts):
            for part in parts:
                yield from leaves(part)
        case _:
            yield from leaves(expression.of)


def in_units(expression: Expression, group: int, unit: int) -> Expression | None:
    """Return the expression for stored arrays with one element for ``unit`` values of a row.

    ``unit`` divides ``group``. None when a group of ``group`` consecutive values of a row would not
    stay together.
    """
    if isinstance(expression, Computed) or not expression.shape or expression.shape[-1] % group:
        return None
    shape = (*expression.shape[:-1], expression.shape[-1] // unit)
    if isinstance(expression, Stored):
        return Stored(expression.name, shape)
    if isinstance(expression, Joined):
        scaled = [in_units(part, group, unit) for part in expression.parts]
        whole = [part for part in scaled if part is not None]
        return joined(whole, expression.axis) if len(whole) == len(scaled) else None
    inner = in_units(expression.of, group, unit)
    return None if inner is None else _node_in_units(expression, inner, shape, group, unit)


def _node_in_units(
    node: Reshaped | Transposed | Sliced, inner: Expression, shape: Shape, group: int, unit: int
) -> Expression | None:
    match node:
        case Reshaped():
            return reshaped(inner, shape)
        case Transposed(_, axes):
            return transposed(inner, axes) if axes[-1] == len(axes) - 1 else None
        case Sliced(_, ranges):
            *rest, last = ranges
            if last.start % group or last.stop % group or last.step != 1:
                return None
            return sliced(inner, (*rest, range(last.start // unit, last.stop // unit)))


def evaluate(expression: Expression, arrays: Arrays) -> Array:
    """Return the array: a view of stored ones where NumPy can make one."""
    match expression:
        case Stored(name):
            return arrays(name)
        case Reshaped(of, shape):
            return evaluate(of, arrays).reshape(shape)
        case Transposed(of, axes):
            return evaluate(of, arrays).transpose(axes)
        case Sliced(of, ranges):
            index = tuple(slice(one.start, one.stop, one.step) for one in ranges)
            return evaluate(of, arrays)[index]
        case Joined(parts, axis):
            return np.concatenate([evaluate(part, arrays) for part in parts], axis)
        case Computed():
            raise ValueError("computed values are in no stored array")


def fill(out: Array, expression: Expression, arrays: Arrays) -> None:
    """Write the array into ``out``; each part of a join is copied once, to its place."""
    match expression:
        case Joined(parts, axis):
            begin = 0
            for part in parts:
                end = begin + part.shape[axis]
                fill(out[(*[slice(None)] * axis, slice(begin, end))], part, arrays)
                begin = end
        case Reshaped(of) if isinstance(of, Joined) and out.flags.c_contiguous:
            fill(out.reshape(of.shape), of, arrays)
        case _:
            np.copyto(out, evaluate(expression, arrays))


def runs(expression: Expression) -> list[tuple[str, int, int]] | None:
    """Return the ranges of stored arrays that follow each other: (name, first value, values).

    None when the values are not such ranges: rows are taken apart, or dimensions swapped.
    """
    match expression:
        case Stored(name, shape):
            return [(name, 0, math.prod(shape))]
        case Reshaped(of):
            return runs(of)
        case Sliced(of, ranges) if _rows_of(expression) is not None:
            found = runs(of)
            if found is not None and len(found) == 1:
                name, first, _ = found[0]
                start = first + ranges[0].start * math.prod(of.shape[1:])
                return [(name, start, math.prod(expression.shape))]
        case Joined(parts, axis) if axis == 0:
            each = [runs(part) for part in parts]
            if None not in each:
                return [run for one in each for run in one or ()]
    return None
