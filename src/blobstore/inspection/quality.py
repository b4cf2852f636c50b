"""Quality: the error of a stored model's weights against the checkpoint that it was made from.

Both are read in chunks side by side, so memory does not grow with the model. A tensor that is
stored as it was must have the source's bytes; one that was quantized or converted is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

from blobstore.errors import (
    CorruptDataError,
    NonFiniteWeightError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.checkpoint import DRAFT_PREFIX
from blobstore.formats.dtypes import DType, QuantType
from blobstore.importer.options import Experts
from blobstore.importer.outputs import OutputTensor
from blobstore.importer.run import outputs_of
from blobstore.inspection.comparison import (
    CHUNK_WEIGHTS,
    Errors,
    Figure,
    as_float64,
    errors_between,
)
from blobstore.io.workers import Progress, results_of, start_progress, threads
from blobstore.kernels.arrays import Array
from blobstore.kernels.scales import code_type
from blobstore.model.loader import Model, Tensor, open_model, run_of
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import Source
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import Form, SourceReaders, SourceWeight
from blobstore.store.places import StorePlace
from blobstore.store.ports import Readable

MOST_VALUES = 2**20
"""Values that are read of one tensor."""
BINS = 64
ValueReader = Callable[[int, int], Array]
"""Returns a number of values of a tensor from an index on, flat."""
# Values of a run: whole groups of every type.
_RUN = 2**12


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
    def edges(self) -> list[float]:
        bins = max(1, len(self.counts))
        return [
            self.low * (1 - index / bins) + self.high * (index / bins) for index in range(bins)
        ] + [self.high]


@dataclass(frozen=True, slots=True)
class ValueDistribution:
    """The distribution of a stored tensor.

    ``values`` and ``source`` (the values to compare with, such as its source's, or None) have
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
        return self.read < self.size


def distribution_of(
    tensor: Tensor, other: ValueReader | None = None, *, most: int = MOST_VALUES
) -> ValueDistribution:
    """Return the distribution of a stored tensor, and of those of ``other``, to compare.

    ``other`` reads as many values as the tensor has (`source_values`, `stored_values`). ``most``:
    values to read, at least 4096; of a larger tensor a sample is read.

    Raises: UnsupportedSourceError for complex values and for F4 and F6, whose values are not read;
    UsageError for a smaller ``most``; CorruptDataError when the blob's file was cut; as ``other``.
    """
    if most < _RUN:
        raise UsageError(f"{most} values are too few for a sample", hint=f"Use at least {_RUN}.")
    if tensor.dtype is DType.C64:
        raise UnsupportedSourceError(
            f"{quoted(tensor.name)} is complex: it has no histogram", tensor=tensor.name
        )
    stored, size = tensor.numpy(), math.prod(tensor.shape)
    runs = list(_runs(size, most))
    parts = [run_of(stored, *run) for run in runs]
    values = np.concatenate([as_float64(part) for part in parts])
    source = None if other is None else np.concatenate([as_float64(other(*run)) for run in runs])
    low, high = _range([values] if source is None else [values, source])
    kind = tensor.quant_type
    return ValueDistribution(
        name=tensor.name,
        type_name=tensor.type_text,
        shape=tensor.shape,
        size=size,
        read=sum(count for _, count in runs),
        values=_histogram(values, low, high),
        source=None if source is None else _histogram(source, low, high),
        codes=None if kind is None else _codes(parts, kind),
        code_values=None if kind is None else _code_values(kind),
    )


def _runs(size: int, most: int) -> Iterator[tuple[int, int]]:
    if size <= most:
        yield 0, size
        return
    units, wanted = -(-size // _RUN), most // _RUN
    for index in range(wanted):
        start = index * units // wanted * _RUN
        yield start, min(_RUN, size - start)


def source_values(made_from: OutputTensor, readers: SourceReaders) -> ValueReader:
    """Return the reader of the weights that a tensor is made from.

    It raises as `SourceReaders.values`.
    """

    def read(start: int, count: int) -> Array:
        found, done = [np.empty(0)], 0
        for source in made_from.sources:
            first, last = max(start, done), min(start + count, done + source.elements)
            if first < last:
                found.append(as_float64(readers.values(_exact(source), first - done, last - first)))
            done += source.elements
        return np.concatenate(found)

    return read


def _exact(source: SourceWeight) -> SourceWeight:
    """Return what codes stand for, not rounded to the dtype in which they are quantized again."""
    return replace(source, dtype=DType.F32) if source.form is Form.CODES else source


def _range(arrays: list[Array]) -> tuple[float, float]:
    samples = [kept for values in arrays if (kept := values[np.isfinite(values)]).size]
    if not samples:
        return 0.0, 0.0
    return float(min(v.min() for v in samples)), float(max(v.max() for v in samples))


def _histogram(values: Array, low: float, high: float) -> Histogram:
    finite = values[np.isfinite(values)]
    infinite = int(np.count_nonzero(np.isinf(values)))
    nan = values.size - finite.size - infinite
    counts = [finite.size] if finite.size else []
    largest = float(np.abs(finite).max(initial=0)) or 1.0
    mean = np.square(finite / largest).sum() / max(1, finite.size)
    if counts and low < high:
        unit = 1.0 if math.isfinite(high - low) else 0.5  # the width may exceed a float64
        place = (finite * unit - low * unit) / (high * unit - low * unit)
        bins = np.minimum((place * BINS).astype(np.int64), BINS - 1)
        counts = np.bincount(bins, minlength=BINS).tolist()
    return Histogram(low, high, tuple(counts), infinite, nan, float(np.sqrt(mean)) * largest)


def _codes(parts: list[Any], kind: QuantType) -> tuple[int, ...]:
    counts = np.zeros(2**kind.bits, np.int64)
    for part in parts:
        occurrences = np.bincount(
            np.ascontiguousarray(part.weight).reshape(-1).view(np.uint8), minlength=256
        )
        # The first code of two is in the lower bits.
        table = occurrences.reshape(16, 16) if kind.bits == 4 else None  # noqa: PLR2004
        counts += occurrences if table is None else table.sum(axis=0) + table.sum(axis=1)
    return tuple(counts.tolist())


def _code_values(kind: QuantType) -> tuple[float, ...]:
    codes = np.arange(2**kind.bits, dtype=np.uint8)
    values = codes if kind.is_affine else codes.view(code_type(kind))
    return tuple(values.astype(np.float64).tolist())


@dataclass(frozen=True, slots=True)
class TensorQuality:
    """What quantization or conversion changed of a tensor.

    ``kept``: it is stored as it was, and not counted.
    """

    KEYS = (
        "name",
        "quant_type",
        "dtype",
        "kept",
        "shape",
        "weights=errors.count",
        "rmse=errors.rmse",
        "relative_rmse=errors.relative_rmse",
        "max_error=errors.max_error",
        "cosine=errors.cosine",
        "saturated=errors.saturated",
    )

    name: str
    quant_type: str | None
    dtype: str | None
    kept: bool
    shape: tuple[int, ...]
    errors: Errors

    @property
    def type_name(self) -> str:
        return self.quant_type or self.dtype or ""

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        return self.quant_type is not None


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """What quantization changed: tensors by relative rmse, the largest first.

    ``manifest``: the digest of its manifest when it was opened.
    """

    KEYS = ("name", "tensors", "model=errors")

    name: ModelName
    manifest: Digest
    tensors: tuple[TensorQuality, ...] = field(repr=False)

    @property
    def errors(self) -> Errors:
        """The errors of all quantized and converted tensors together."""
        return sum((tensor.errors for tensor in self.tensors), Errors())


def measure_quality(
    name: str | ModelName,
    source: Source,
    *,
    store: Readable | StorePlace = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ModelQuality:
    """Return the errors of the stored model ``name`` against the checkpoint ``source``.

    Nothing is written.

    ``jobs``: threads (None: one per core). Each reads and compares chunks of 2^19 weights in
    float64. Infinities and NaN of a converted tensor count as no error where they come back.

    The tensors of a draft model are of another checkpoint, and left out.

    Raises: as `open_model` and `plan_import`; UsageError for jobs under 1; TensorNotFoundError when
    the source lacks a tensor of the model; UnsupportedSourceError when one has another shape or
    dtype there than it can have been made from; CorruptDataError when one that is stored as it was
    has other bytes there, or a value comes back infinite or NaN; NonFiniteWeightError when one that
    is quantized is not finite there.
    """
    workers = threads(jobs)
    with closing(SourceReaders()) as readers, open_model(name, store=store) as model:
        pairs = list(sources_of(model, source))
        report = start_progress(
            progress, sum(source.nbytes for _, output in pairs for source in output.sources)
        )
        tensors = results_of(
            pairs, lambda pair: _measure(*pair, readers, report), workers, name="quality"
        )
        readers.check_unchanged()
        tensors.sort(key=_order)
        return ModelQuality(model.name, model.manifest.digest, tuple(tensors))


def _order(tensor: TensorQuality) -> tuple[float, str]:
    relative = tensor.errors.relative_rmse
    return -math.inf if relative is None else -relative, tensor.name


def sources_of(model: Model, source: Source) -> Iterator[tuple[Tensor, OutputTensor]]:
    """Yield each tensor of the model with its source, by the names of packed or stacked experts.

    Raises: as `measure_quality`, for what doesn't need values.
    """
    inventory = read_inventory(source)
    outputs = outputs_of(inventory, Experts.PACKED)
    has_draft = model.manifest.config is not None and model.config.draft is not None
    if any(name not in outputs for name in model):
        outputs = outputs_of(inventory, Experts.STACKED) | outputs
    for tensor in model.values():
        if has_draft and tensor.name.startswith(DRAFT_PREFIX):
            continue  # of another checkpoint
        made_from = outputs.get(tensor.name)
        if made_from is None:
            raise TensorNotFoundError(
                f"{inventory.path} has no tensor {quoted(tensor.name)}: model {model.name} was not"
                " made from it",
                tensor=tensor.name,
                model=str(model.name),
            )
        if tensor.transposed and not made_from.transposed and len(made_from.shape) > 1:
            made_from = made_from.as_quantized({made_from.name})
        if not _can_be_made_from(tensor, made_from):
            raise UnsupportedSourceError(
                f"{quoted(tensor.name)} is {tensor.type_name} {list(tensor.shape)} in the model,"
                f" which can't be made from the source's {made_from.dtype} {list(made_from.shape)}",
                tensor=tensor.name,
                model=str(model.name),
            )
        yield tensor, made_from


def _can_be_made_from(tensor: Tensor, made_from: OutputTensor) -> bool:
    if tensor.shape != made_from.shape:
        return False
    from_float = made_from.dtype.is_float or made_from.dtype is DType.F64
    return (
        from_float
        if tensor.quant_type is not None
        else tensor.dtype is made_from.dtype or (tensor.dtype.is_float and from_float)
    )


def _measure(
    tensor: Tensor, made_from: OutputTensor, readers: SourceReaders, progress: Progress
) -> TensorQuality:
    kept = tensor.quant_type is None and made_from.copies and tensor.dtype is made_from.dtype
    errors, stored = Errors(), None if kept else tensor.numpy()
    for start, chunk in _chunks(made_from, readers):
        if stored is None:
            _check_same(tensor, start, chunk)
        else:
            errors += errors_between(
                chunk, run_of(stored, start, chunk.size), partial(_check_odd, tensor, start)
            )
        progress(chunk.nbytes, tensor.name)
    quant_type = None if tensor.quant_type is None else str(tensor.quant_type)
    dtype = str(tensor.dtype) if quant_type is None else None
    return TensorQuality(tensor.name, quant_type, dtype, kept, tensor.shape, errors)


def _chunks(made_from: OutputTensor, readers: SourceReaders) -> Iterator[tuple[int, Array]]:
    """Yield ``(index of the first weight in the output tensor, weights)``.

    Of a dtype that numpy has not, the bytes are yielded, and the index counts bytes.
    """
    done = 0
    for source in made_from.sources:
        count = source.elements if source.dtype.bits >= 8 else source.nbytes  # noqa: PLR2004
        exact = _exact(source)
        most = exact.values_at_once(CHUNK_WEIGHTS)
        for start in range(0, count, most):
            yield done + start, readers.values(exact, start, min(most, count - start))
        done += count


def _check_same(tensor: Tensor, start: int, chunk: Array) -> None:
    begin = start * chunk.itemsize
    stored = np.frombuffer(tensor.raw()[begin : begin + chunk.nbytes], np.uint8)
    if not np.array_equal(stored, chunk.view(np.uint8)):
        raise CorruptDataError(
            f"{quoted(tensor.name)} is stored unquantized, but its bytes differ from the source's",
            tensor=tensor.name,
            blob=str(tensor.blob),
        )


def _check_odd(tensor: Tensor, start: int, weights: Array, read: Array, wrong: Array) -> None:
    if tensor.quant_type is not None:
        wrong = wrong | ~np.isfinite(weights)
    if wrong.any():
        first = int(np.argmax(wrong))
        index = tuple(int(i) for i in np.unravel_index(start + first, tensor.shape))
        kind = CorruptDataError if np.isfinite(weights[first]) else NonFiniteWeightError
        raise kind(
            f"{quoted(tensor.name)}: the value at {list(index)} is {weights[first]} in the source"
            f" and {read[first]} in the model",
            tensor=tensor.name,
            index=index,
        )
