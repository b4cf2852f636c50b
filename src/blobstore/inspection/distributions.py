"""Distributions: histograms of a tensor's values, and of its codes.

Of a large tensor a sample is read: runs of whole groups, evenly spread over the tensor, so that two
calls read the same. Runs are dequantized one by one, and memory does not grow with the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import OutputTensor
from blobstore.inspection.comparison import Figure, as_float64, stored_run
from blobstore.kernels.arrays import Array, QuantizedArray
from blobstore.kernels.scales import code_type
from blobstore.model.tensors import StoredArray, Tensor
from blobstore.source.weights import Form, SourceReaders

MOST_VALUES = 2**20
"""Values that are read of one tensor."""
BINS = 64
ValueReader = Callable[[int, int], Array]
"""Returns values of a tensor, flat: so many from an index on."""
_RUN = 2**12
"""Values of a run: whole groups of every type."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values counted in bins of one width between ``low`` and ``high``.

    ``counts``: by bin; one bin if all finite values are equal, none without a finite value.
    ``infinite`` and ``nan`` are counted apart. ``rms``: the root mean square of the finite values.
    """

    low: Figure
    high: Figure
    counts: tuple[int, ...]
    infinite: int
    nan: int
    rms: Figure

    @property
    def total(self) -> int:
        """All values, finite or not."""
        return sum(self.counts) + self.infinite + self.nan

    @property
    def edges(self) -> list[float]:
        """The borders of the bins, one more than there are bins."""
        bins = max(1, len(self.counts))
        return [
            self.low * (1 - index / bins) + self.high * (index / bins) for index in range(bins)
        ] + [self.high]


@dataclass(frozen=True, slots=True)
class ValueDistribution:
    """The distribution of a stored tensor.

    ``values`` and ``source`` (the values beside it, such as those of its source; None without) have
    the same bins. ``code_values``: NaN for E4M3's codes of NaN.
    """

    name: str
    type_name: Annotated[str, "int4/64, or a dtype"]
    shape: Annotated[tuple[int, ...], "before packing"]
    size: Annotated[int, "values of the tensor"]
    read: Annotated[int, "values that were read: all, or a sample"]
    values: Histogram
    source: Histogram | None = None
    codes: Annotated[
        tuple[int, ...] | None, "how often each code occurs; null if not quantized"
    ] = None
    code_values: Annotated[tuple[Figure, ...] | None, "what each code stands for, unscaled"] = None

    @property
    def is_sample(self) -> bool:
        """True if not all values were read."""
        return self.read < self.size


def distribution_of(
    tensor: Tensor, beside: ValueReader | None = None, *, most: int = MOST_VALUES
) -> ValueDistribution:
    """Return the distribution of a stored tensor, and of the values ``beside`` it.

    ``beside`` reads as many values as the tensor has (`source_values`, `stored_values`). ``most``:
    values to read, at least 4096; of a larger tensor a sample is read.

    Raises: UnsupportedSourceError for complex values and for F4 and F6, whose values are not read;
    UsageError for a smaller ``most``; CorruptDataError when the blob's file was cut; as ``beside``.
    """
    if most < _RUN:
        raise UsageError(f"{most} values are too few for a sample", hint=f"Use at least {_RUN}.")
    if tensor.dtype is DType.C64:
        raise UnsupportedSourceError(
            f"{quoted(tensor.name)} is complex: it has no histogram", tensor=tensor.name
        )
    stored, size = tensor.numpy(), math.prod(tensor.shape)
    runs = list(_runs(size, most))
    parts = [stored_run(stored, start, count) for start, count in runs]
    values = _joined([as_float64(part) for part in parts])
    source = None if beside is None else _joined([as_float64(beside(*run)) for run in runs])
    low, high = _range([values] if source is None else [values, source])
    kind = tensor.quant_type
    return ValueDistribution(
        name=tensor.name,
        type_name=str(tensor.dtype) if kind is None else f"{kind}/{tensor.group_size}",
        shape=tensor.shape,
        size=size,
        read=sum(count for _, count in runs),
        values=_histogram(values, low, high),
        source=None if source is None else _histogram(source, low, high),
        codes=None if kind is None else _codes(parts, kind),
        code_values=None if kind is None else _code_values(kind),
    )


def _runs(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield start and count of the runs to read: one of all values, or many, evenly spread."""
    if size <= most:
        yield 0, size
        return
    units, wanted = -(-size // _RUN), most // _RUN
    for index in range(wanted):
        start = index * units // wanted * _RUN
        yield start, min(_RUN, size - start)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0)


def source_values(made_from: OutputTensor, readers: SourceReaders) -> ValueReader:
    """Return the reader of the weights that a tensor is made from.

    It raises as `SourceReaders.values`.
    """

    def read(start: int, count: int) -> Array:
        found, done = [], 0
        for source in made_from.sources:
            first, last = max(start, done), min(start + count, done + source.elements)
            if first < last:
                # What codes stand for, and not rounded to the dtype of the quantized tensor.
                codes = source.form is Form.CODES
                exact = replace(source, dtype=DType.F32) if codes else source
                found.append(as_float64(readers.values(exact, first - done, last - first)))
            done += source.elements
        return _joined(found)

    return read


def _range(arrays: list[Array]) -> tuple[float, float]:
    """Return the smallest and the largest finite value; 0 and 0 without one."""
    finite = [values[np.isfinite(values)] for values in arrays]
    found = [values for values in finite if values.size]
    if not found:
        return 0.0, 0.0
    return float(min(v.min() for v in found)), float(max(v.max() for v in found))


def _histogram(values: Array, low: float, high: float) -> Histogram:
    finite = values[np.isfinite(values)]
    infinite = int(np.count_nonzero(np.isinf(values)))
    nan = values.size - finite.size - infinite
    if not finite.size:
        return Histogram(low, high, (), infinite, nan, 0.0)
    largest = float(np.abs(finite).max()) or 1.0
    rms = float(np.sqrt(np.mean(np.square(finite / largest)))) * largest
    if low == high:
        return Histogram(low, high, (finite.size,), infinite, nan, rms)
    unit = 1.0 if math.isfinite(high - low) else 0.5  # the width may be more than a float64 holds
    place = (finite * unit - low * unit) / (high * unit - low * unit)
    bins = np.minimum((place * BINS).astype(np.int64), BINS - 1)
    counts = tuple(np.bincount(bins, minlength=BINS).tolist())
    return Histogram(low, high, counts, infinite, nan, rms)


def _codes(parts: list[StoredArray], kind: QuantType) -> tuple[int, ...]:
    counts = np.zeros(2**kind.bits, np.int64)
    for part in parts:
        if not isinstance(part, QuantizedArray):
            raise TypeError(f"{kind} is stored as one array")
        stored = np.ascontiguousarray(part.weight).reshape(-1).view(np.uint8)
        found = np.bincount(stored, minlength=256)
        # The first code of two is in the lower bits.
        table = found.reshape(16, 16) if kind.bits == 4 else None  # noqa: PLR2004
        counts += found if table is None else table.sum(axis=0) + table.sum(axis=1)
    return tuple(counts.tolist())


def _code_values(kind: QuantType) -> tuple[float, ...]:
    codes = np.arange(2**kind.bits, dtype=np.uint8)
    values = codes if kind.is_affine else codes.view(code_type(kind))
    return tuple(values.astype(np.float64).tolist())
