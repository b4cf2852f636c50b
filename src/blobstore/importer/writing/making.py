"""Making: the bytes of one run, from the source's bytes. Any thread; nothing is decided or written here."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, dtype_of, numpy_dtype
from blobstore.dtypes import DType
from blobstore.errors import BlobStoreError, NonFiniteWeightError, UnsupportedSourceError
from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.outputs import OutputTensor
from blobstore.importer.writing.runs import CHUNK, Constant, Copy, GlobalScale, Run, Values
from blobstore.kernels import ScaleChoice
from blobstore.quant import Quantization
from blobstore.source.reading import SourceReaders
from blobstore.source.weights import SourceWeight

Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)


class _Place:
    """Where a run's arrays go: into its buffer, or, what belongs elsewhere in the blob, into arrays of their own."""

    def __init__(self, data: memoryview, begin: int) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._begin = begin
        self._copied: list[tuple[int, Array]] = []
        self.outside: list[tuple[int, Array]] = []

    def array(self, at: int, count: int, kind: np.dtype[Any]) -> Array:
        """Return an array to fill, for ``count`` elements at offset ``at`` of the blob."""
        start, nbytes = at - self._begin, count * kind.itemsize
        inside = start >= 0 and start + nbytes <= self._data.size
        if inside and at % kind.itemsize == 0:
            return self._data[start : start + nbytes].view(kind)
        array = np.empty(count, kind)
        if inside:
            self._copied.append((start, array.view(np.uint8)))  # kernels need aligned memory
        else:
            self.outside.append((at, array.view(np.uint8)))
        return array

    def settle(self) -> None:
        """Move into the buffer what could not be made there."""
        for start, raw in self._copied:
            self._data[start : start + raw.size] = raw


class RunMaker:
    """Makes runs. What it remembers of a tensor is one number, its global scale."""

    def __init__(self, readers: SourceReaders) -> None:
        self._readers = readers
        self._global_scales: dict[str, np.float32] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def make(self, run: Run, data: memoryview, options: ImportOptions) -> list[tuple[int, Array]]:
        """Fill ``data``, the run's bytes; return ``(offset in the blob, bytes)`` of what belongs behind it.

        Raises: NonFiniteWeightError, UnsupportedSourceError with tensor and index; as `SourceReaders.readinto`.
        """
        place = _Place(data, run.begin)
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
        factor = float(self._global_scale(output)) if output.global_scale is not None else 1.0
        values = self._cast_values(output, source, step.start, step.count)
        if output.quantization is None:
            place.array(step.at[""], values.size, values.dtype)[:] = values
            return
        parts = (part for part in output.quantization.parts(values.shape, output.dtype))
        arrays = [place.array(step.at[part.suffix], part.shape[0], numpy_dtype(part.dtype)) for part in parts]
        _quantize(values, arrays, output.quantization, _choice(options, source, step.start, factor), step)

    def _cast_values(self, output: OutputTensor, source: SourceWeight, start: int, count: int) -> Array:
        values = self._readers.values(source, start, count)
        return values if source.dtype is output.dtype else _cast(values, output.dtype, source, start)

    def _global_scale(self, output: OutputTensor) -> np.float32:
        """Return a tensor's global scale: the source's, or what its weights are divided by first, for a read of them all."""
        if output.copies_codes:
            return self._readers.global_scale(output.sources[0])
        with self._locks[output.name]:
            if output.name not in self._global_scales:
                largest = max((self._largest(output, source) for source in output.sources), default=0.0)
                self._global_scales[output.name] = np.float32(kernels.global_scale_of(largest))
            return self._global_scales[output.name]

    def _largest(self, output: OutputTensor, source: SourceWeight) -> float:
        most = source.values_at_once(CHUNK // 4)
        starts = range(0, source.elements, most)
        chunks = (self._cast_values(output, source, start, min(most, source.elements - start)) for start in starts)
        return max((kernels.largest_magnitude(chunk) for chunk in chunks), default=0.0)


def _cast(values: Array, dtype: DType, source: SourceWeight, start: int) -> Array:
    """Return ``values`` rounded to ``dtype``. Raises: UnsupportedSourceError when a finite value would become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast: Array = values.astype(numpy_dtype(dtype))
    overflows = np.isinf(cast) & np.isfinite(values)
    if overflows.any():
        first = int(np.argmax(overflows))
        raise _error_at(UnsupportedSourceError, source, start + first, f"{values[first]}, which does not fit {dtype}")
    return cast


def _choice(options: ImportOptions, source: SourceWeight, start: int, global_scale: float) -> ScaleChoice:
    importance = options.importance.vectors.get(source.name) if options.importance is not None else None
    return ScaleChoice(options.method, importance, start % source.shape[-1], global_scale)


def _quantize(weights: Array, arrays: list[Array], quantization: Quantization, choice: ScaleChoice, step: Values) -> None:
    """Quantize a flat run of whole groups into its stored arrays.

    Raises: NonFiniteWeightError with tensor and index; UnsupportedSourceError when a group's range overflows its scale,
    which MLX stores as infinity, and which would come back as NaN.
    """
    weight, scale, *rest = arrays
    parts = QuantizedArray(weight, scale, rest[0] if rest else None, None, quantization)
    bad = kernels.quantize_into(weights, parts, choice)
    if bad >= 0:
        what = f"{weights[bad]}, and only finite weights can be quantized"
        raise _error_at(NonFiniteWeightError, step.source, step.start + bad, what)
    if not all(np.isfinite(part).all() for part in (scale, *rest)):
        group = int(np.argmin(np.isfinite(scale))) * quantization.group_size
        what = f"the first of a group that spans more than {dtype_of(weights)} can scale"
        raise _error_at(UnsupportedSourceError, step.source, step.start + group, what)


def _error_at(kind: type[BlobStoreError], source: SourceWeight, flat: int, what: str) -> BlobStoreError:
    """Return the error that says ``what`` the weight of that flat index is; it names tensor, index and file."""
    index = source.stored_index(flat)
    message = f"{source.name!r}: the weight at {list(index)} is {what} ({source.file.path})"
    return kind(message, tensor=source.name, index=index, path=source.file.path)
