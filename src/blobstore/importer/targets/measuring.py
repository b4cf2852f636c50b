"""Measuring: what quantizing a tensor to each of several types would lose. Weights are read; nothing is decided.

The error of a type is relative: the squared errors of the weights over the squared weights, each times its column's
importance where that is given. All sums are taken in float64, in an order that neither threads nor the machine change, and
what comes out is rounded to `_DIGITS` significant digits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, dtype_of, numpy_dtype
from blobstore.errors import NonFiniteWeightError
from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.outputs import OutputTensor
from blobstore.kernels import ScaleChoice
from blobstore.quant import Quantization, QuantType
from blobstore.source.reading import SourceReaders
from blobstore.source.weights import SourceWeight

SAMPLE = 2**22
"""Weights that are measured of a tensor, or of all of a group of experts, when there are more."""
_CHUNK = 2**18
"""Weights that a thread works on at a time: a whole number of groups of every type."""
_DIGITS = 6

Array = np.ndarray[Any, Any]
Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be measured: a tensor, the types, and how many of its weights (but at least a row of each source)."""

    tensor: OutputTensor
    types: tuple[Quantization, ...]
    sample: int = SAMPLE


@dataclass(frozen=True, slots=True)
class _Batch:
    """Weights that are worked on together: runs of ``count`` from each of ``starts`` on."""

    source: SourceWeight
    starts: Sequence[int]
    count: int

    def index(self, number: int) -> tuple[int, ...]:
        """Return the index in the source of the batch's weight ``number``."""
        run, offset = divmod(number, self.count)
        return self.source.stored_index(self.starts[run] + offset)


def measure(
    questions: Sequence[Question], options: ImportOptions, jobs: int, progress: Progress | None = None
) -> list[dict[Quantization, float]]:
    """Return for each question the relative squared error of each type, but for those whose scales would overflow.

    ``progress`` is told the bytes of each tensor's sources when it has been measured. A thread works in 20 MB.

    Raises: NonFiniteWeightError with tensor and index; as `SourceReaders.readinto`.
    """
    readers = SourceReaders()
    stop = threading.Event()

    def answer(question: Question) -> dict[Quantization, float]:
        found = {} if stop.is_set() else _measure(question, options, readers)
        if progress is not None:
            progress(sum(source.nbytes for source in question.tensor.sources), question.tensor.name)
        return found

    try:
        with ThreadPoolExecutor(jobs, thread_name_prefix="measure") as pool:
            try:
                found = list(pool.map(answer, questions))
            except BaseException:
                stop.set()
                raise
        readers.check_unchanged()
    finally:
        readers.close()
    return found


def _measure(question: Question, options: ImportOptions, readers: SourceReaders) -> dict[Quantization, float]:
    tensor = question.tensor
    factor = _global_scale(question, readers) if options.global_scale else None
    errors, whole = dict.fromkeys(question.types, 0.0), 0.0
    for batch in _batches(question):
        values = _values(batch, tensor, readers)
        weights = values.astype(np.float64)
        importance = options.importance.vectors.get(batch.source.name) if options.importance is not None else None
        choice = ScaleChoice(options.method, importance, batch.starts[0] % batch.source.shape[-1])
        whole += _weighed(weights, choice)
        for quantization in question.types:
            own_factor = factor if quantization.quant_type is QuantType.NVFP4 else None
            read = _quantized(values, quantization, choice, own_factor, batch)
            errors[quantization] += _weighed(weights - read, choice)
    relative = {quantization: _relative(error, whole) for quantization, error in errors.items()}
    return {quantization: error for quantization, error in relative.items() if math.isfinite(error)}


def _batches(question: Question) -> Iterator[_Batch]:
    """Yield what is read of a tensor, at most a chunk at a time.

    A source is read whole, or in rows as far apart as they can be: row ``i * rows // k`` for i from 0 to k - 1.
    """
    for source in question.tensor.sources:
        cols = source.shape[-1]
        rows = source.elements // cols
        count = max(1, min(rows, question.sample // len(question.tensor.sources) // cols))
        starts = [number * rows // count * cols for number in range(count)]
        together = _CHUNK // cols
        if not together:
            yield from (
                _Batch(source, [start + begin], min(_CHUNK, cols - begin))
                for start in starts
                for begin in range(0, cols, _CHUNK)
            )
        elif count == rows:
            for first in range(0, rows, together):
                yield _Batch(source, [starts[first]], min(together, rows - first) * cols)
        else:
            yield from (_Batch(source, starts[first : first + together], cols) for first in range(0, count, together))


def _values(batch: _Batch, tensor: OutputTensor, readers: SourceReaders) -> Array:
    """Return the batch's weights, flat, in the dtype that is quantized."""
    values = np.empty((len(batch.starts), batch.count), numpy_dtype(tensor.dtype))
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit the dtype is refused as infinite
        for row, start in zip(values, batch.starts, strict=True):
            row[:] = readers.values(batch.source, start, batch.count)
    return values.reshape(-1)


def _quantized(values: Array, quantization: Quantization, choice: ScaleChoice, factor: float | None, batch: _Batch) -> Array:
    """Return the weights as they are read back after quantization. Raises: NonFiniteWeightError."""
    described = quantization.parts(values.shape, dtype_of(values))
    weight, scale, *rest = (np.empty(part.shape, numpy_dtype(part.dtype)) for part in described)
    scaled = None if factor is None else np.array([factor], np.float32)
    parts = QuantizedArray(weight, scale, rest[0] if rest else None, scaled, quantization)
    bad = kernels.quantize_into(values, parts, replace(choice, global_scale=1.0 if factor is None else factor))
    if bad >= 0:
        source, index = batch.source, batch.index(bad)
        raise NonFiniteWeightError(
            f"{source.name!r}: the weight at {list(index)} is {values[bad]}, and only finite weights can be quantized",
            tensor=source.name,
            index=index,
            path=source.file.path,
        )
    return kernels.dequantize(parts)


def _weighed(values: Array, choice: ScaleChoice) -> float:
    """Return the sum of the squares, each column's times its importance; infinity or NaN if one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(values)
        if choice.importance is not None:
            columns = choice.importance.astype(np.float64)
            if squares.size % columns.size == 0 and choice.first_column == 0:
                squares = squares.reshape(-1, columns.size)
            else:
                columns = columns[choice.first_column :][: squares.size]
            squares = squares * columns
        # Not BLAS, whose sums depend on the machine: numpy adds in pairs, in one order.
        return float(np.sum(squares.reshape(-1)))


def _relative(error: float, whole: float) -> float:
    """Return the quotient, rounded so that no machine's last bit decides which type is better."""
    if error == 0:
        return 0.0
    return float(f"{error / whole:.{_DIGITS - 1}e}") if whole else math.inf


def _global_scale(question: Question, readers: SourceReaders) -> float:
    """Return the global scale of the weights that are measured, for a read of them."""
    values = (_values(batch, question.tensor, readers) for batch in _batches(question))
    return kernels.global_scale_of(max((kernels.largest_magnitude(part) for part in values), default=0.0))
