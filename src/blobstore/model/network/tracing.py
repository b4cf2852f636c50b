"""Tracing: what mlx-lm's ``sanitize`` makes of a checkpoint's tensors, as expressions.

No value is computed.

``sanitize`` renames, stacks, splits and transposes the tensors that it knows, and computes some. It
is called with stand-ins, and MLX records each operation (`mx.export_function` with a callback, mlx
0.32.4, mlx/export.cpp): operations that only move values become nodes of an `Expression`, all
others `Computed`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from blobstore.model.network.expressions import (
    Computed,
    Expression,
    Stored,
    joined,
    leaves,
    reshaped,
    sliced,
    transposed,
)

Sanitize = Callable[[dict[str, Any]], Mapping[str, Any]]

_tracing = threading.Lock()


def trace(sanitize: Sanitize, stand_ins: Mapping[str, Any]) -> dict[str, Expression]:
    """Return what ``sanitize`` makes of mlx arrays by their names: an expression over them for each name that it gives.

    ``stand_ins`` have the shapes and dtypes of the tensors; they are not evaluated. Raises: what
    ``sanitize`` raises, and ValueError when it reads values.
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
    return _read(events, list(stand_ins), names)


@contextmanager
def _without_contiguous(mx: Any) -> Iterator[None]:
    """Let ``mx.contiguous`` return its argument: MLX can't record it (0.32.4), and it changes no value."""
    contiguous = mx.contiguous
    mx.contiguous = lambda a, *_, **__: a
    try:
        yield
    finally:
        mx.contiguous = contiguous


def _read(
    events: Iterable[Mapping[str, Any]], given: Iterable[str], names: Iterable[str]
) -> dict[str, Expression]:
    made: dict[str, Expression] = {}
    constants: dict[str, Any] = {}
    outputs: list[str] = []
    for event in events:
        match event["type"]:
            case "inputs":
                inputs = zip(event["inputs"], given, strict=True)
                made = {key: Stored(name, tuple(shape)) for (key, shape, _), name in inputs}
            case "outputs":
                outputs = [key for key, _, _ in event["outputs"]]
            case "constants":
                constants = dict(event["constants"])
            case "primitive":
                made.update(_outputs(event, made, constants))
    nothing = frozenset[str]()
    return {
        name: made[key] if key in made else Computed(nothing, tuple(constants[key].shape))
        for name, key in zip(names, outputs, strict=True)
    }


def _outputs(
    event: Mapping[str, Any], made: Mapping[str, Expression], constants: Mapping[str, Any]
) -> Iterator[tuple[str, Expression]]:
    """Yield the outputs of one operation: what it moves, or what it computes from the leaves of all its inputs."""
    inputs = [made[key] for key, _, _ in event["inputs"] if key in made]
    outputs = [(key, tuple(shape)) for key, shape, _ in event["outputs"]]
    keys = [key for key, _, _ in event["inputs"]]
    moved = _moved(
        event["name"], event["arguments"], inputs, outputs, [constants.get(key) for key in keys]
    )
    if [one.shape for one in moved] == [shape for _, shape in outputs]:
        yield from zip((key for key, _ in outputs), moved, strict=True)
        return
    needed = frozenset(name for one in inputs for name in leaves(one))
    yield from ((key, Computed(needed, shape)) for key, shape in outputs)


def _moved(
    name: str,
    arguments: list[Any],
    inputs: list[Expression],
    outputs: list[tuple[str, tuple[int, ...]]],
    constants: list[Any],
) -> list[Expression]:
    """Return the outputs of an operation that only moves values; none of any other."""
    if not inputs or any(isinstance(one, Computed) for one in inputs):
        return []
    first, shape = inputs[0], outputs[0][1]
    match name:
        case "Reshape" | "Flatten" | "Unflatten" | "ExpandDims" | "Squeeze":
            moved = [reshaped(first, shape)]
        case "Copy" | "StopGradient":
            moved = [first]
        case "Transpose":
            moved = [transposed(first, arguments[0])]
        case "Slice" if all(stride > 0 for stride in arguments[2]):
            moved = [sliced(first, *arguments)]
        case "Concatenate" if len(inputs) == len(constants):
            moved = [joined(inputs, arguments[0] % len(shape))]
        case "Split":
            moved = list(_split(first, *arguments))
        case "Gather" if len(inputs) == 1 and tuple(arguments[0]) == (0,):
            moved = _rows(first, constants[1], shape)
        case _:
            moved = []
    return moved


def _split(of: Expression, places: Iterable[int], axis: int) -> Iterator[Expression]:
    for begin, end in itertools.pairwise([0, *places, of.shape[axis]]):
        begins, ends = [0] * len(of.shape), list(of.shape)
        begins[axis], ends[axis] = begin, end
        yield sliced(of, begins, ends, [1] * len(of.shape))


def _rows(of: Expression, index: Any, shape: tuple[int, ...]) -> list[Expression]:
    """Return the rows that a constant names, one after the other; none for others."""
    numbers = index.reshape(-1).tolist() if index is not None else []
    first = numbers[0] if numbers else 0
    if not numbers or numbers != list(range(first, first + len(numbers))) or first < 0:
        return []
    rest = of.shape[1:]
    rows = sliced(
        of, (first, *(0 for _ in rest)), (first + len(numbers), *rest), tuple(1 for _ in of.shape)
    )
    return [reshaped(rows, shape)] if math.prod(rows.shape) == math.prod(shape) else []
