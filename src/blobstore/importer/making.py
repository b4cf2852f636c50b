"""Making: a planned blob is cut into runs, and each run's bytes are made from the source's bytes.

A run is a consecutive range of a blob's bytes; one thread makes it in one buffer. It holds whole
tensors when they are small, and a part of one when it is large. The scales and biases of a large
tensor follow its weight, in a gap between two runs: they are written as its weight's runs are
made, and hashed later. Nothing is decided or written here.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import (
    BlobStoreError,
    NonFiniteWeightError,
    UnsupportedSourceError,
)
from blobstore.formats.dtypes import DType, Quantization
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import OutputTensor, PlannedBlob
from blobstore.kernels.arrays import Array, QuantizedArray, dtype_of, numpy_dtype
from blobstore.kernels.scales import ScaleChoice
from blobstore.source.folders import SourceTensor
from blobstore.source.weights import Scratch, SourceReaders, SourceWeight

_BYTE = np.dtype(np.uint8)


class _Place:
    def __init__(self, data: memoryview, begin: int, scratch: Scratch) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._scratch = scratch
        self._begin = begin
        self._copied: list[tuple[int, Array]] = []
        self.outside: list[tuple[int, Array]] = []

    def array(self, at: int, count: int, kind: np.dtype[Any]) -> Array:
        """Return an array to fill, for ``count`` elements at offset ``at`` of the blob."""
        start, nbytes = at - self._begin, count * kind.itemsize
        inside = start >= 0 and start + nbytes <= self._data.size
        if inside and at % kind.itemsize == 0:
            return self._data[start : start + nbytes].view(kind)
        if inside:
            array = np.empty(count, kind)  # kernels need aligned memory
            self._copied.append((start, array.view(np.uint8)))
        else:
            array = self._scratch.array(f"outside {len(self.outside)}", count, kind)
            self.outside.append((at, array.view(np.uint8)))
        return array

    def settle(self) -> None:
        for start, raw in self._copied:
            self._data[start : start + raw.size] = raw


class RunMaker:
    """Makes runs. What it remembers of a tensor is one number, its global scale."""

    def __init__(self, readers: SourceReaders) -> None:
        self._readers = readers
        self._global_scales: dict[str, np.float32] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def make(self, run: Run, data: memoryview, options: ImportOptions) -> list[tuple[int, Array]]:
        """Fill ``data``, the run's bytes.

        Return ``(offset in the blob, bytes)`` of what follows it. The bytes are valid until
        the thread's next call.

        Raises: NonFiniteWeightError, UnsupportedSourceError with tensor and index; as
        `SourceReaders.readinto`.
        """
        place = _Place(data, run.begin, self._readers.scratch)
        for step in run.steps:
            match step:
                case Constant(text, at):
                    place.array(at, len(text), _BYTE)[:] = np.frombuffer(text, np.uint8)
                case Copy(tensor, start, nbytes, at):
                    self._readers.readinto(tensor, start, place.array(at, nbytes, _BYTE).data)
                case GlobalScale(output, at):
                    place.array(at, 1, np.dtype(np.float32))[0] = self._global_scale(output)
                case Values():
                    self._make_values(step, place, options)
        place.settle()
        return place.outside

    def _make_values(self, step: Values, place: _Place, options: ImportOptions) -> None:
        output, source = step.output, step.source
        # First: finding it reads through the memory that the values will lie in.
        if output.copies_codes:
            made = self._readers.quantized(source, step.start, step.count)
            kept = [part for part in (made.weight, made.scale, made.bias) if part is not None]
            for suffix, array in zip(step.at, kept, strict=True):
                place.array(step.at[suffix], array.size, array.dtype)[:] = array
            return
        factor = float(self._global_scale(output)) if output.global_scale is not None else 1.0
        values = self._cast_values(output, source, step.start, step.count)
        if output.quantization is None:
            place.array(step.at[""], values.size, values.dtype)[:] = values
            return
        arrays = [
            place.array(step.at[part.suffix], part.shape[0], numpy_dtype(part.dtype))
            for part in output.stored_of(values.size).parts
        ]
        column = step.start % source.shape[-1]
        choice = ScaleChoice(options.method, options.importance_of(source.name), column, factor)
        bad = kernels.quantize_into(values, stored_parts(arrays, output.quantization), choice)
        if bad < 0:
            return
        if not math.isfinite(values[bad]):
            raise non_finite(source, step.start + bad, values[bad])
        # MLX stores such a scale as infinity, and the group would come back as NaN.
        raise _error_at(
            UnsupportedSourceError,
            source,
            step.start + bad,
            f"the first of a group whose range is too large for a {dtype_of(values)} scale",
        )

    def _cast_values(
        self, output: OutputTensor, source: SourceWeight, start: int, count: int
    ) -> Array:
        values = self._readers.values(source, start, count)
        return (
            values if source.dtype is output.dtype else _cast(values, output.dtype, source, start)
        )

    def _global_scale(self, output: OutputTensor) -> np.float32:
        if output.copies_codes:
            return self._readers.global_scale(output.sources[0])
        with self._locks[output.name]:
            if output.name not in self._global_scales:
                largest = max(
                    (self._largest(output, source) for source in output.sources), default=0.0
                )
                self._global_scales[output.name] = np.float32(kernels.global_scale_of(largest))
            return self._global_scales[output.name]

    def _largest(self, output: OutputTensor, source: SourceWeight) -> float:
        most = source.values_at_once(CHUNK // 4)
        chunks = (
            self._cast_values(output, source, start, min(most, source.elements - start))
            for start in range(0, source.elements, most)
        )
        return max((kernels.largest_magnitude(chunk) for chunk in chunks), default=0.0)


def _cast(values: Array, dtype: DType, source: SourceWeight, start: int) -> Array:
    """Return ``values`` rounded to ``dtype``.

    Raises: UnsupportedSourceError when a finite value would become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        cast: Array = values.astype(numpy_dtype(dtype))
        overflows = np.isinf(cast) & np.isfinite(values)
    if overflows.any():
        first = int(np.argmax(overflows))
        raise _error_at(
            UnsupportedSourceError,
            source,
            start + first,
            f"{values[first]}, which does not fit {dtype}",
        )
    return cast


def stored_parts(
    arrays: Iterable[Array], quantization: Quantization, global_scale: Array | None = None
) -> QuantizedArray[Array]:
    """Return arrays, in stored order, as the parts of a quantized one."""
    weight, scale, *rest = arrays
    return QuantizedArray(weight, scale, rest[0] if rest else None, global_scale, quantization)


def non_finite(source: SourceWeight, flat: int, value: float) -> BlobStoreError:
    """Return the error that a weight, ``value`` at that flat index, is not finite."""
    return _error_at(
        NonFiniteWeightError, source, flat, f"{value}, and only finite weights can be quantized"
    )


def _error_at(
    kind: type[BlobStoreError], source: SourceWeight, flat: int, what: str
) -> BlobStoreError:
    index = source.stored_index(flat)
    message = f"{source.name!r}: the weight at {list(index)} is {what} ({source.file.path})"
    return kind(message, tensor=source.name, index=index, path=source.file.path)


CHUNK = 4 * 2**20
"""Bytes of source values that are read at a time at most."""
RUN = 2**20
"""Bytes of a run at most."""
# Values of fewer bits are not read in larger chunks than BF16 values.
_VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that are known: the header. ``at`` is an offset in the blob."""

    data: bytes
    at: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of a source tensor, from its byte ``start`` on."""

    tensor: SourceTensor
    start: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Values:
    """``count`` values of a source from index ``start`` on, decoded, cast and quantized.

    ``at``: offsets in the blob by array suffix.
    """

    output: OutputTensor
    source: SourceWeight
    start: int
    count: int
    at: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GlobalScale:
    """The one F32 of a double-scaled tensor."""

    output: OutputTensor
    at: int


Step = Constant | Copy | Values | GlobalScale


@dataclass(frozen=True, slots=True)
class Run:
    """The bytes from ``begin`` to ``end`` of a blob; earlier steps fill the ``gap`` after them."""

    begin: int
    end: int
    gap: int
    steps: tuple[Step, ...]
    source_bytes: int


def runs_of(blob: PlannedBlob) -> Iterator[Run]:
    """Yield the runs of a blob, in the order of their bytes.

    With their gaps they cover it exactly once.
    """
    pieces: list[Run] = []
    for piece in _pieces(blob):
        if pieces and (pieces[-1].gap or piece.end - pieces[0].begin > RUN):
            yield _merge(pieces)
            pieces = []
        pieces.append(piece)
    yield _merge(pieces)


def _merge(pieces: Sequence[Run]) -> Run:
    last = pieces[-1]
    return Run(
        pieces[0].begin,
        last.end,
        last.gap,
        tuple([step for piece in pieces for step in piece.steps]),
        sum([piece.source_bytes for piece in pieces]),
    )


def _pieces(blob: PlannedBlob) -> Iterator[Run]:
    """Yield runs that are not divided, in the order of their bytes."""
    header = blob.header
    for start in range(0, len(header), RUN):
        part = header[start : start + RUN]
        yield Run(start, start + len(part), 0, (Constant(part, start),), 0)
    end = len(header)
    for tensor in blob.tensors:
        begins = {}
        for suffix, nbytes in tensor.stored.sizes.items():
            begins[suffix], end = end, end + nbytes
        if tensor.copies:
            yield from _copies(tensor, begins)
            continue
        values = list(_values(tensor, begins))
        at = begins.get(".global_scale")
        scale = (GlobalScale(tensor, at),) if at is not None else ()
        if tensor.nbytes > RUN:
            yield from _large(tensor, values, scale, end)
        else:
            read = sum(source.nbytes for source in tensor.sources)
            yield Run(end - tensor.nbytes, end, 0, (*values, *scale), read)


def _copies(tensor: OutputTensor, begins: Mapping[str, int]) -> Iterator[Run]:
    for suffix, begin in begins.items():
        if suffix == ".global_scale":
            yield Run(begin, begin + 4, 0, (GlobalScale(tensor, begin),), 4)
            continue
        at = begin
        for source in tensor.sources:
            part = source.parts[suffix]
            for start in range(0, part.nbytes, RUN):
                nbytes = min(RUN, part.nbytes - start)
                step = Copy(part, start, nbytes, at + start)
                yield Run(step.at, step.at + nbytes, 0, (step,), nbytes)
            at += part.nbytes


def _values(tensor: OutputTensor, begins: Mapping[str, int]) -> Iterator[Values]:
    at = {suffix: begin for suffix, begin in begins.items() if suffix != ".global_scale"}
    for source in tensor.sources:
        most = _values_at_once(tensor, source)
        elements = source.elements
        for start in range(0, elements, most):
            count = min(most, elements - start)
            yield Values(tensor, source, start, count, dict(at))
            for suffix, nbytes in tensor.stored_of(count).sizes.items():
                at[suffix] += nbytes


def _values_at_once(tensor: OutputTensor, source: SourceWeight) -> int:
    read = max(_VALUE_BYTES, source.tensor.dtype.bits // 8, tensor.dtype.bits // 8)
    quantized = tensor.quantization
    stored_bits = tensor.dtype.bits if quantized is None else quantized.quant_type.bits
    return source.values_at_once(min(CHUNK // read, RUN * 8 // stored_bits))


def _large(
    tensor: OutputTensor, values: Sequence[Values], scale: tuple[GlobalScale, ...], end: int
) -> Iterator[Run]:
    """Yield a tensor that no run holds: its weight in parts, its companions in the gap after it."""
    for step in values:
        read, elements = step.source.nbytes, step.source.elements
        source_bytes = read * (step.start + step.count) // elements - read * step.start // elements
        begin = step.at[""]
        part_end = begin + tensor.stored_of(step.count).sizes[""]
        if step is values[-1]:
            yield Run(begin, part_end, end - part_end, (step, *scale), source_bytes)
        else:
            yield Run(begin, part_end, 0, (step,), source_bytes)
