"""Sanitize: the tensors that mlx-lm's ``sanitize`` is given, and what it makes of them.

``sanitize`` knows the layout of an architecture's published checkpoints. An import may have stacked
numbered experts, or transposed a weight so that its groups run along the inputs; a layout reverts
that, as expressions (`layouts`).

``sanitize`` renames, stacks, splits and transposes the tensors that it knows, and computes some. It
is called with stand-ins, and MLX records each operation (`mx.export_function` with a callback, mlx
0.32.4, mlx/export.cpp): operations that only move values become nodes of an `Expression`, all
others `Computed` (`trace`). No value is computed.

Falcon-H1's multiplies most weights, row by row (mlx_lm 0.32.2 models/falcon_h1.py). It is run on
probes instead of weights; where it is a product with one number a row, that number is read off, so
that affine codes can keep their place under other scales (`row_factors`).

An expression is a tree. Its leaves are stored arrays; its nodes reshape, transpose, slice and join.
`Computed` stands for everything else: values that no stored array contains. `evaluate` and `fill`
follow a tree with NumPy, where all nodes but `Concatenation` are views if NumPy can make them. The
same tree holds for the arrays of a quantized tensor when no node splits a group: `in_units` gives
it for codes and for scales.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.formats.dtypes import DType
from blobstore.kernels.arrays import Array
from blobstore.model.facts import TensorFacts

Shape = tuple[int, ...]
Arrays = Callable[[str], Array]
"""Returns a stored array by the name of its leaf."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole stored array."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same values in the same order, in another shape."""

    of: Expression
    shape: Shape


@dataclass(frozen=True, slots=True)
class Transposition:
    """Dimension ``i`` is dimension ``axes[i]`` of ``of``."""

    of: Expression
    axes: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Slice:
    """The indices that ``ranges`` give, one range a dimension."""

    of: Expression
    ranges: tuple[range, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Arrays one after the other along ``axis``."""

    parts: tuple[Expression, ...]
    axis: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Computed:
    """Values that arithmetic makes from the leaves ``of``."""

    of: frozenset[str]
    shape: Shape


Expression = Stored | Reshape | Transposition | Slice | Concatenation | Computed


def reshape(of: Expression, shape: Sequence[int]) -> Expression:
    """Return ``of`` in another shape."""
    shape = tuple(shape)
    if shape == of.shape:
        return of
    return reshape(of.of, shape) if isinstance(of, Reshape) else Reshape(of, shape)


def transpose(of: Expression, axes: Sequence[int]) -> Expression:
    """Return ``of`` with its dimensions in the order of ``axes``."""
    axes = tuple(axes)
    if isinstance(of, Transposition):
        return transpose(of.of, [of.axes[axis] for axis in axes])
    shape = tuple(of.shape[axis] for axis in axes)
    return of if axes == tuple(range(len(axes))) else Transposition(of, axes, shape)


def take(of: Expression, ranges: Sequence[range]) -> Expression:
    """Return a part of ``of``: the indices of ``ranges``, in steps of at least 1.

    Slicing moves inside a transposition, so that a second transposition cancels the first: mlx-lm
    slices fused experts and then transposes them (models/llama4.py, qwen3_vl_moe.py, dbrx.py), and
    imports store them transposed.
    """
    shape = tuple(map(len, ranges))
    if shape == of.shape:
        return of
    if isinstance(of, Transposition):
        inner = take(of.of, [ranges[of.axes.index(axis)] for axis in range(len(of.axes))])
        return transpose(inner, of.axes)
    return Slice(of, tuple(ranges), shape)


def row_range(of: Expression, begin: int, end: int) -> Expression:
    """Return ``of[begin:end]``."""
    return take(of, (range(begin, end), *map(range, of.shape[1:])))


def join(parts: Sequence[Expression], axis: int) -> Expression:
    """Return ``parts`` one after the other along ``axis``.

    Consecutive rows of one array become one slice of it again.
    """
    merged: list[Expression] = []
    for part in parts:
        whole = _rows_together(merged[-1], part) if merged and axis == 0 else None
        if whole is not None:
            merged.pop()
        merged.append(whole or part)
    if len(merged) == 1:
        return merged[0]
    shape = list(merged[0].shape)
    shape[axis] = sum(part.shape[axis] for part in merged)
    return Concatenation(tuple(merged), axis, tuple(shape))


def _rows_together(one: Expression, other: Expression) -> Expression | None:
    first, second = _rows_of(one), _rows_of(other)
    if first is None or second is None or first[0] != second[0] or first[1].stop != second[1].start:
        return None
    return row_range(first[0], first[1].start, second[1].stop)


def _rows_of(expression: Expression) -> tuple[Expression, range] | None:
    # An expert is a row that lost its first dimension, and gets it back when it is stacked.
    if (
        isinstance(expression, Reshape)
        and isinstance(expression.of, Slice)
        and expression.shape == expression.of.shape
    ):
        expression = expression.of
    if not isinstance(expression, Slice):
        return None
    of, rows = expression.of, expression.ranges[0]
    return (of, rows) if expression.shape[1:] == of.shape[1:] and rows.step == 1 else None


def leaves(expression: Expression) -> Iterator[str]:
    """Yield the names of the leaves, in order, a repeated leaf as often as it occurs."""
    match expression:
        case Stored(name):
            yield name
        case Computed(of):
            yield from sorted(of)
        case Concatenation(parts):
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
    if isinstance(expression, Concatenation):
        scaled = [in_units(part, group, unit) for part in expression.parts]
        whole = [part for part in scaled if part is not None]
        return join(whole, expression.axis) if len(whole) == len(scaled) else None
    inner = in_units(expression.of, group, unit)
    if inner is None:
        return None
    made: Expression | None = None
    match expression:
        case Reshape():
            made = reshape(inner, shape)
        case Transposition(_, axes) if axes[-1] == len(axes) - 1:
            made = transpose(inner, axes)
        case Slice(_, (*rest, last)) if last.step == 1 and not (
            last.start % group or last.stop % group
        ):
            made = take(inner, (*rest, range(last.start // unit, last.stop // unit)))
    return made


def evaluate(expression: Expression, arrays: Arrays) -> Array:
    """Return the array: a view of stored ones where NumPy can make one."""
    match expression:
        case Stored(name):
            return arrays(name)
        case Reshape(of, shape):
            return evaluate(of, arrays).reshape(shape)
        case Transposition(of, axes):
            return evaluate(of, arrays).transpose(axes)
        case Slice(of, ranges):
            return evaluate(of, arrays)[
                tuple(slice(one.start, one.stop, one.step) for one in ranges)
            ]
        case Concatenation(parts, axis):
            return np.concatenate([evaluate(part, arrays) for part in parts], axis)
        case Computed():
            raise ValueError("computed values are not in any stored array")


def fill(out: Array, expression: Expression, arrays: Arrays) -> None:
    """Write the array into ``out``; each part of a join is copied once, to its place."""
    match expression:
        case Concatenation(parts, axis):
            begin = 0
            for part in parts:
                end = begin + part.shape[axis]
                fill(out[(*[slice(None)] * axis, slice(begin, end))], part, arrays)
                begin = end
        case Reshape(of) if isinstance(of, Concatenation) and out.flags.c_contiguous:
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
        case Reshape(of):
            return runs(of)
        case Slice(of, ranges) if _rows_of(expression) is not None:
            pieces = runs(of)
            if pieces is not None and len(pieces) == 1:
                name, first, _ = pieces[0]
                start = first + ranges[0].start * math.prod(of.shape[1:])
                return [(name, start, math.prod(expression.shape))]
        case Concatenation(parts, axis) if axis == 0:
            each = [runs(part) for part in parts]
            if None not in each:
                return [run for one in each for run in one or ()]
    return None


Sanitize = Callable[[dict[str, Any]], Mapping[str, Any]]

_STACK = re.compile(r"(?P<group>.+\.experts)\.(?P<projection>[^.]+\.weight)", re.DOTALL)
_WEIGHT = ".weight"
_tracing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Offer:
    """One tensor of a layout: its name there, its expression over stored tensors, its dtype."""

    name: str
    expression: Expression
    dtype: DType

    @property
    def stand_in(self) -> Any:
        """An mlx array of that shape and dtype, which is never evaluated, so never made."""
        import mlx.core as mx

        return mx.zeros(self.expression.shape, mlx_dtype(self.dtype))


def mlx_dtype(dtype: DType) -> Any:
    """Return the dtype that MLX has for values: uint8 where it has none of its own."""
    import mlx.core as mx

    return getattr(mx, dtype.mlx_name or "uint8")


def layouts(
    tensors: Iterable[TensorFacts], source_names: Container[str] | None
) -> Iterator[list[Offer]]:
    """Yield the layouts to try.

    First the source's, then those with ``.weight`` after the names of quantized tensors.
    ``source_names``: the names of the source's tensors, where they are known; otherwise a stack
    called ``….experts.PROJECTION.weight`` is taken for numbered experts first, and then as it is.
    """
    stored = list(tensors)
    in_source = [list(_as_in_source(one, source_names)) for one in stored]
    yield [offered for each in in_source for offered in each]
    yield [
        offered
        for one, each in zip(stored, in_source, strict=True)
        for offered in ([_whole(one)] if _is_bare(one) else each)
    ]
    yield [_whole(one) for one in stored]


def _as_in_source(tensor: TensorFacts, source_names: Container[str] | None) -> Iterator[Offer]:
    whole: Expression = Stored(tensor.name, tensor.shape)
    if tensor.transposed:
        rank = len(tensor.shape)
        whole = transpose(whole, (*range(rank - 2), rank - 1, rank - 2))
    experts = _expert_names(tensor, source_names)
    if not experts:
        yield Offer(tensor.name, whole, tensor.dtype)
    for number, name in enumerate(experts):
        expert = reshape(row_range(whole, number, number + 1), whole.shape[1:])
        yield Offer(name, expert, tensor.dtype)


def _whole(tensor: TensorFacts) -> Offer:
    name = tensor.name + (_WEIGHT if _is_bare(tensor) else "")
    return Offer(name, Stored(tensor.name, tensor.shape), tensor.dtype)


def _is_bare(tensor: TensorFacts) -> bool:
    return tensor.quantization is not None and not tensor.name.endswith(_WEIGHT)


def _expert_names(tensor: TensorFacts, source_names: Container[str] | None) -> list[str]:
    """Return the names of the experts that a stack was made of; nothing for any other tensor."""
    match = _STACK.fullmatch(tensor.name)
    if match is None or len(tensor.shape) < 3 or not tensor.shape[0]:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [
        f"{match['group']}.{number}.{match['projection']}" for number in range(tensor.shape[0])
    ]
    if source_names is not None and (tensor.name in source_names or names[0] not in source_names):
        return []
    return names


def trace(
    sanitize: Sanitize, stand_ins: Mapping[str, Any], given: Mapping[str, Expression]
) -> dict[str, Expression]:
    """Return what ``sanitize`` makes of named mlx arrays, by name.

    ``stand_ins`` have the shapes and dtypes of the arrays; they are not evaluated. ``given``: the
    expressions that the arrays are, over stored ones. Raises: what ``sanitize`` raises, and
    ValueError when it reads values.
    """
    import mlx.core as mx

    names: list[str] = []
    events: list[dict[str, Any]] = []

    def sanitized(*arrays: Any) -> tuple[Any, ...]:
        made = sanitize(dict(zip(stand_ins, arrays, strict=True)))
        names.extend(made)
        return tuple(made.values())

    with _tracing, _without_contiguous(mx):
        # A tuple: keyword arguments would be 1024 at most.
        mx.export_function(events.append, sanitized, tuple(stand_ins.values()))
    return _read(events, [given[name] for name in stand_ins], names)


@contextmanager
def _without_contiguous(mx: Any) -> Iterator[None]:
    """Let ``mx.contiguous`` return its argument.

    MLX can't record it (0.32.4), and it changes no value.
    """
    contiguous = mx.contiguous
    mx.contiguous = lambda a, *_, **__: a
    try:
        yield
    finally:
        mx.contiguous = contiguous


def _read(
    events: Iterable[Mapping[str, Any]], given: Iterable[Expression], names: Iterable[str]
) -> dict[str, Expression]:
    made: dict[str, Expression] = {}
    constants: dict[str, Any] = {}
    outputs: list[str] = []
    for event in events:
        match event["type"]:
            case "inputs":
                made = {key: one for (key, _, _), one in zip(event["inputs"], given, strict=True)}
            case "outputs":
                outputs = [key for key, _, _ in event["outputs"]]
            case "constants":
                constants = dict(event["constants"])
            case "primitive":
                made.update(_outputs(event, made, constants))
    return {
        name: made[key] if key in made else Computed(frozenset(), tuple(constants[key].shape))
        for name, key in zip(names, outputs, strict=True)
    }


def _outputs(
    event: Mapping[str, Any], made: Mapping[str, Expression], constants: Mapping[str, Any]
) -> Iterator[tuple[str, Expression]]:
    """Yield the outputs of an operation: `Computed` unless it only moves values."""
    keys = [key for key, _, _ in event["inputs"]]
    inputs = [made[key] for key in keys if key in made]
    outputs = [(key, tuple(shape)) for key, shape, _ in event["outputs"]]
    arguments, shape, moved = event["arguments"], outputs[0][1], list[Expression]()
    is_known = inputs and not any(isinstance(one, Computed) for one in inputs)
    match event["name"] if is_known else "":
        case "Reshape" | "Flatten" | "Unflatten" | "ExpandDims" | "Squeeze":
            moved = [reshape(inputs[0], shape)]
        case "Copy" | "StopGradient":
            moved = inputs[:1]
        case "Transpose":
            moved = [transpose(inputs[0], arguments[0])]
        case "Slice" if all(stride > 0 for stride in arguments[2]):
            moved = [take(inputs[0], list(map(range, *arguments)))]
        case "Concatenate" if len(inputs) == len(keys):
            moved = [join(inputs, arguments[0] % len(shape))]
        case "Split":
            moved = list(_split(inputs[0], *arguments))
        case "Gather" if len(inputs) == 1 and tuple(arguments[0]) == (0,):
            moved = _rows(inputs[0], constants.get(keys[1]), shape)
    if [one.shape for one in moved] == [shape for _, shape in outputs]:
        yield from zip((key for key, _ in outputs), moved, strict=True)
        return
    needed = frozenset(name for one in inputs for name in leaves(one))
    yield from ((key, Computed(needed, shape)) for key, shape in outputs)


def _split(of: Expression, places: Iterable[int], axis: int) -> Iterator[Expression]:
    for begin, end in itertools.pairwise([0, *places, of.shape[axis]]):
        ranges = [*map(range, of.shape)]
        ranges[axis] = range(begin, end)
        yield take(of, ranges)


def _rows(of: Expression, index: Any, shape: Shape) -> list[Expression]:
    """Return the consecutive rows that a constant names; nothing for any other index."""
    numbers = index.reshape(-1).tolist() if index is not None else []
    first = numbers[0] if numbers else -1
    if first < 0 or numbers != list(range(first, first + len(numbers))):
        return []
    rows = row_range(of, first, first + len(numbers))
    return [reshape(rows, shape)] if math.prod(rows.shape) == math.prod(shape) else []


# The relative difference of float32 products that counts as none.
_SAME = 1e-5


def row_factors(
    make_network: Callable[[], Any], stand_ins: Mapping[str, Any], weights: Mapping[str, str]
) -> dict[str, Array]:
    """Return the float32 factors of the rows of parameters that are products of one weight.

    ``weights``: by parameter, the name of the only tensor that it is computed from. ``stand_ins``:
    all tensors. A parameter is left out if its values are not such a product, or if its shape is
    not that of the tensor.
    """
    import mlx.core as mx

    if not weights:
        return {}
    shapes = {name: stand_ins[name].shape for name in weights.values()}
    made = []
    for most in (1, 7):  # ones, and 1 to 7 again and again
        probes = {
            name: mx.broadcast_to((mx.arange(shape[-1]) % most + 1).astype(mx.float32), shape)
            for name, shape in shapes.items()
        }
        made.append(make_network().sanitize({**stand_ins, **probes}))
    factors_of: dict[str, Array] = {}
    for parameter, tensor in weights.items():
        ones, ramp = (np.array(arrays[parameter].astype(mx.float32)) for arrays in made)
        if ones.shape != shapes[tensor]:
            continue
        factors = ones[..., :1]
        products = factors * (np.arange(ones.shape[-1], dtype=np.float32) % 7 + 1)
        if np.allclose(ones, factors, _SAME, 0) and np.allclose(ramp, products, _SAME, 0):
            factors_of[parameter] = factors[..., 0]
    return factors_of
