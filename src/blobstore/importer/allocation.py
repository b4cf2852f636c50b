"""Allocation: each type's error is measured, and the types with least error in a budget are chosen.

Choosing knows no tensors: it makes one choice for each item, with little total error in a number of
bytes. It is the multiple-choice knapsack problem. Two steps:

1. Greedy. All items start with their smallest choice. Then the change that saves most error a byte
   is made, of those that fit, until none does. Were changes divisible this would be the optimum
   (Sinha and Zoltners 1979).
2. Reach. A dynamic program over all items looks for the selection with the least error between
   `NEAR` of the budget and the budget, or under the budget when none is so near; it is taken when
   it is better, or nearer than `NEAR`. It keeps one selection, the best, for each of `_BUCKETS`
   ranges of bytes, so a sum that only few selections have can be missed. It is half a millisecond
   an item; more items than `_MOST_REACHED` are not tried: they leave no such gap unless one of them
   is a large part of all.

Time is that of sorting all choices. Ties go to the earlier item; nothing depends on the machine.

Measuring reads weights and decides nothing. The error of a type is relative: the squared errors of
the weights over the squared weights, each times its column's importance where that is given. All
sums are taken in float64, in an order that neither threads nor the machine change, and what comes
out is rounded to `_DIGITS` significant digits.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.importer.making import non_finite, stored_parts
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import OutputTensor
from blobstore.importer.segments import LoadedBytes, LoadedFile, Span, merge_spans, needed_for
from blobstore.io.workers import Progress, results_of
from blobstore.kernels.arrays import Array, QuantizedArray, dtype_of, numpy_dtype
from blobstore.kernels.scales import ScaleChoice
from blobstore.source.folders import SourceFile
from blobstore.source.weights import (
    Fetcher,
    FetchOptions,
    SourceReaders,
    SourceWeight,
    open_fetcher,
)

AT_ONCE = 8
"""Threads that measure at the same time, where the processor's cores are fewer."""
# Bytes that are fetched rather than asked for around: a request takes about as long.
_GAP = 2**20
_MOST = 8 * 2**20


class SampleReaders(SourceReaders):
    """The source files that are measured; some of them are on servers if it ``is_far``."""

    def __init__(self, fetcher: Fetcher, *, is_far: bool) -> None:
        self._fetcher = fetcher
        self._is_far = is_far
        self._loaded = LoadedBytes(fetcher.fill)
        super().__init__(partial(LoadedFile, loaded=self._loaded) if is_far else SourceFile.open)

    @contextmanager
    def reading_ahead(
        self, source: SourceWeight, starts: Iterable[int], count: int
    ) -> Iterator[None]:
        """Read ``count`` values from each start within the block; servers get few requests.

        Raises: as `Fetcher.fill`.
        """
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        if self._is_far and not source.transposed:
            for start in starts:
                for path, begin, end in needed_for(source, start, count):
                    spans[path].append((begin, end))
        files = {part.file.path: part.file for part in source.parts.values()}
        parts = {
            path: [self._part(files[path], *span) for span in merge_spans(wanted, _GAP, _MOST)]
            for path, wanted in spans.items()
        }
        with self._loaded.using(parts):
            yield

    def _part(self, file: SourceFile, begin: int, end: int) -> tuple[int, memoryview]:
        data = memoryview(bytearray(end - begin))
        self._fetcher.fill(file, begin, data)
        return begin, data


SAMPLE = 2**22
"""Weights that are measured of a tensor, or of all of a group of experts, when there are more."""
# Weights that a thread works on at a time: a whole number of groups of every type.
_CHUNK = 2**18
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be measured: a tensor, the types, and how many of its weights.

    At least one row of each source is measured.
    """

    tensor: OutputTensor
    types: tuple[Quantization, ...]
    sample: int

    @property
    def source_bytes(self) -> int:
        return sum(source.nbytes for source in self.tensor.sources)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Weights that are worked on together: runs of ``count`` from each of ``starts`` on."""

    source: SourceWeight
    starts: Sequence[int]
    count: int


def measure(
    questions: Sequence[Question],
    options: ImportOptions,
    jobs: int,
    progress: Progress,
    fetch: FetchOptions | None = None,
) -> list[dict[Quantization, float]]:
    """Return for each question the relative squared error of each type.

    Types whose scales would overflow are missing.

    ``progress`` is called with the bytes of each tensor's sources once measured. A thread
    works in 20 MB. ``fetch``: how sources on servers are fetched.

    Raises: NonFiniteWeightError with tensor and index; as `SourceReaders.readinto`.
    """
    files = {
        part.file.path: part.file
        for question in questions
        for source in question.tensor.sources
        for part in source.parts.values()
    }
    is_far = any(file.folder.is_remote for file in files.values())
    with (
        open_fetcher(files.values(), fetch or FetchOptions()) as fetcher,
        closing(SampleReaders(fetcher, is_far=is_far)) as readers,
    ):

        def answer(question: Question) -> dict[Quantization, float]:
            errors = _measure(question, options, readers)
            progress(question.source_bytes, f"measuring {question.tensor.name}")
            return errors

        workers = max(jobs, min(AT_ONCE, fetcher.at_once)) if is_far else jobs
        errors = results_of(questions, answer, workers, name="measure", stop=fetcher.stop)
        readers.check_unchanged()
    return errors


def _measure(
    question: Question, options: ImportOptions, readers: SampleReaders
) -> dict[Quantization, float]:
    tensor = question.tensor
    factor = _global_scale(question, readers) if options.global_scale else None
    errors, whole = dict.fromkeys(question.types, 0.0), 0.0
    for batch in _batches(question):
        values = _values(batch, tensor, readers)
        choice = ScaleChoice(
            options.method,
            options.importance_of(batch.source.name),
            batch.starts[0] % batch.source.shape[-1],
        )
        squares = 0.0
        for quantization in question.types:
            own_factor = factor if quantization.quant_type is QuantType.NVFP4 else None
            parts = _quantize(values, quantization, choice, own_factor, batch)
            error, squares = _squares(values, parts, choice)
            errors[quantization] += error
        whole += squares
    relative = {quantization: _relative(error, whole) for quantization, error in errors.items()}
    return {quantization: error for quantization, error in relative.items() if math.isfinite(error)}


def _batches(question: Question) -> Iterator[_Batch]:
    """Yield what is read of a tensor, at most a chunk at a time.

    A source is read whole, or in rows as far apart as they can be: row ``i * rows // k`` for i from
    0 to k - 1.
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
        else:
            yield from (
                _Batch(source, starts[first : first + together], cols)
                for first in range(0, count, together)
            )


def _values(batch: _Batch, tensor: OutputTensor, readers: SampleReaders) -> Array:
    values = np.empty((len(batch.starts), batch.count), numpy_dtype(tensor.dtype))
    with (
        readers.reading_ahead(batch.source, batch.starts, batch.count),
        np.errstate(over="ignore", invalid="ignore"),
    ):  # what does not fit the dtype is refused as infinite
        for row, start in zip(values, batch.starts, strict=True):
            row[:] = readers.values(batch.source, start, batch.count)
    return values.reshape(-1)


def _quantize(
    values: Array,
    quantization: Quantization,
    choice: ScaleChoice,
    factor: float | None,
    batch: _Batch,
) -> QuantizedArray[Array]:
    """Return the quantized weights. Raises: NonFiniteWeightError.

    An infinite scale is not refused: its type then has no finite error, and is not chosen.
    """
    arrays = (
        np.empty(part.shape, numpy_dtype(part.dtype))
        for part in quantization.parts(values.shape, dtype_of(values))
    )
    parts = stored_parts(
        arrays, quantization, None if factor is None else np.array([factor], np.float32)
    )
    bad = kernels.quantize_into(
        values, parts, replace(choice, global_scale=1.0 if factor is None else factor)
    )
    if bad >= 0 and not math.isfinite(values[bad]):
        run, offset = divmod(bad, batch.count)
        raise non_finite(batch.source, batch.starts[run] + offset, values[bad])
    return parts


def _squares(
    values: Array, parts: QuantizedArray[Array], choice: ScaleChoice
) -> tuple[float, float]:
    """Return the sums of the squared errors and of the squared weights.

    Each square counts as often as its column's importance. Infinity or NaN if a value is.
    """
    if choice.importance is None:
        compared = kernels.compare(values, parts)
        return compared.squared_error, compared.squared_weight
    weights = values.astype(np.float64)
    columns = choice.importance.astype(np.float64)
    if weights.size % columns.size or choice.first_column:
        columns = columns[choice.first_column :][: weights.size]  # a piece of a row
    return _weighted_error(weights - kernels.dequantize(parts), columns), _weighted_error(
        weights, columns
    )


def _weighted_error(values: Array, columns: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(values).reshape(-1, columns.size) * columns
        # Not BLAS, whose sums depend on the machine: numpy adds in pairs, in one order.
        return float(np.sum(squares.reshape(-1)))


def _relative(error: float, whole: float) -> float:
    """Return the quotient, rounded so that no machine's last bit decides which type is better."""
    if error == 0:
        return 0.0
    return float(f"{error / whole:.{_DIGITS - 1}e}") if whole else math.inf


def _global_scale(question: Question, readers: SampleReaders) -> float:
    values = (_values(batch, question.tensor, readers) for batch in _batches(question))
    return kernels.global_scale_of(
        max((kernels.largest_magnitude(part) for part in values), default=0.0)
    )


NEAR = 0.99
"""The part of a budget that is to be used."""
_BUCKETS = 4096
_MOST_REACHED = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """What an item may be: the bytes that it then takes, and its error, finite and at least 0."""

    nbytes: int
    error: float


Item = Sequence[Choice]


def least_bytes(items: Sequence[Item]) -> int:
    """Return the bytes of all items' smallest choices."""
    return sum(min(choice.nbytes for choice in item) for item in items)


def allocate(items: Sequence[Item], budget: int) -> list[int]:
    """Return the index of each item's choice, so that together they take at most ``budget`` bytes.

    Raises: UsageError when the smallest choices take more.
    """
    fronts = [_front(item) for item in items]
    chosen = [front[0] for front in fronts]
    left = budget - sum(item[index].nbytes for item, index in zip(items, chosen, strict=True))
    if left < 0:
        raise UsageError(f"the smallest choices take {budget - left:,} bytes, more than {budget:,}")
    _spend(items, fronts, chosen, left)
    reached = _reach(items, fronts, budget) if len(items) <= _MOST_REACHED else None
    return min(chosen, reached or chosen, key=lambda selection: _rank(items, selection, budget))


def _rank(items: Sequence[Item], chosen: list[int], budget: int) -> tuple[bool, float]:
    """Return a selection's rank, less for a better one: first near the budget, then the error."""
    choices = [item[index] for item, index in zip(items, chosen, strict=True)]
    return sum(choice.nbytes for choice in choices) < NEAR * budget, math.fsum(
        choice.error for choice in choices
    )


def _front(item: Item) -> list[int]:
    """Return the indices of the choices that no other one beats, by rising bytes."""
    order = sorted(
        range(len(item)), key=lambda index: (item[index].nbytes, item[index].error, index)
    )
    front = [order[0]]
    for index in order[1:]:
        if item[index].error < item[front[-1]].error:
            front.append(index)
    return front


def _spend(items: Sequence[Item], fronts: list[list[int]], chosen: list[int], left: int) -> None:
    """Spend the bytes that are left, the most saving change first, until nothing fits."""

    def best(number: int) -> list[tuple[float, int, int]]:
        item, now = items[number], items[number][chosen[number]]
        changes = [
            ((item[index].error - now.error) / (item[index].nbytes - now.nbytes), number, index)
            for index in fronts[number]
            if 0 < item[index].nbytes - now.nbytes <= left
        ]
        return sorted(changes)[:1]

    changes = [change for number in range(len(items)) for change in best(number)]
    heapify(changes)
    while changes:
        _, number, index = heappop(changes)
        more = items[number][index].nbytes - items[number][chosen[number]].nbytes
        if more <= left:
            chosen[number] = index
            left -= more
        for change in best(number):
            heappush(changes, change)


def _reach(items: Sequence[Item], fronts: list[list[int]], budget: int) -> list[int] | None:
    """Return a selection of between `NEAR` of the budget and the budget.

    When none is found one of less, or None.
    """
    width = budget // _BUCKETS + 1
    nbytes, errors = np.full(_BUCKETS, -1, np.int64), np.full(_BUCKETS, np.inf)
    nbytes[0], errors[0] = 0, 0.0
    history = []
    for item, front in zip(items, fronts, strict=True):
        nbytes, errors, taken, before = _extend(item, front, nbytes, errors, width, budget)
        history.append((taken, before))
    if not np.isfinite(errors).any():
        return None  # what was kept of each bucket was too large for the rest
    near = np.where(nbytes >= NEAR * budget, errors, np.inf)
    bucket = int(np.argmin(near if np.isfinite(near).any() else errors))
    chosen = []
    for taken, before in reversed(history):
        chosen.append(int(taken[bucket]))
        bucket = int(before[bucket])
    return chosen[::-1]


def _extend(
    item: Item, front: list[int], nbytes: Array, errors: Array, width: int, budget: int
) -> tuple[Array, Array, Array, Array]:
    """Return the selections with one more item, by bucket.

    Four arrays: bytes, errors, the item's choice, the bucket without the item.
    """
    known = np.flatnonzero(nbytes >= 0)
    sums = np.concatenate([nbytes[known] + item[index].nbytes for index in front])
    totals = np.concatenate([errors[known] + item[index].error for index in front])
    choices, origins = np.repeat(np.array(front), known.size), np.tile(known, len(front))
    # The best of each bucket is written last, and of equal ones the largest, which is the nearest
    # to what is wanted.
    order = np.lexsort((sums, -totals))
    order = order[sums[order] <= budget]
    buckets = sums[order] // width
    new_nbytes, new_errors = np.full(_BUCKETS, -1, np.int64), np.full(_BUCKETS, np.inf)
    taken, before = np.zeros(_BUCKETS, np.int32), np.zeros(_BUCKETS, np.int32)
    new_nbytes[buckets], new_errors[buckets] = sums[order], totals[order]
    taken[buckets], before[buckets] = choices[order], origins[order]
    return new_nbytes, new_errors, taken, before
