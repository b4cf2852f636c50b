"""Write: carry an import plan out. Nothing is decided here.

Each blob is written in one pass: rows are read in chunks, cast and quantized, hashed and appended. Blobs are independent,
so several threads take one each; the result does not depend on their number.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from blobstore import kernels
from blobstore.arrays import QuantizedArray, dtype_of, numpy_dtype
from blobstore.dtypes import DType
from blobstore.errors import NonFiniteWeightError, UnsupportedSourceError
from blobstore.importer.inventory import SourceFile, SourceTensor
from blobstore.importer.options import ImportOptions
from blobstore.importer.plan import ImportPlan, OutputTensor, PlannedBlob
from blobstore.kernels import ScaleChoice
from blobstore.quant import Quantization
from blobstore.ranges import FileReader
from blobstore.store import BlobWriter, FinishedBlob, Ingest

CHUNK = 4 * 2**20
"""Source bytes that one thread reads and quantizes at a time; a whole number of groups of every type and dtype."""

Array = np.ndarray[Any, Any]


class Progress(Protocol):
    """Told after every chunk: how many more source bytes are done, and of which blob or tensor. Called from any thread."""

    def __call__(self, nbytes: int, blob: str) -> None:
        """Take note of ``nbytes`` more source bytes."""


class SourceReaders:
    """The source files of an import, opened when they are first read, and checked to be those of the inventory."""

    def __init__(self) -> None:
        self._open: dict[str, FileReader] = {}
        self._mutex = threading.Lock()

    def reader(self, file: SourceFile) -> FileReader:
        """Return the reader for ``file``. Raises: NotFoundError, CorruptDataError when it changed since the inventory."""
        with self._mutex:
            reader = self._open.get(file.path)
            if reader is None:
                reader = FileReader(file.path)
                self._open[file.path] = reader
                reader.check_is(file.identity)
            return reader

    def check_unchanged(self) -> None:
        """Raise when a file that was read has been written to, replaced or removed meanwhile."""
        for reader in self._open.values():
            reader.check_unchanged()

    def close(self) -> None:
        """Close all files."""
        for reader in self._open.values():
            reader.close()


def write_blobs(plan: ImportPlan, ingest: Ingest, jobs: int, progress: Progress) -> list[FinishedBlob]:
    """Write the plan's tensor blobs with ``jobs`` threads; return them in plan order, complete but not yet visible.

    Raises: the error of the first blob in plan order that fails, whatever the number of threads: it names the tensor or
    the file; StorageError. Nothing is committed here.
    """
    work = _Work(ingest, progress)
    try:
        with ThreadPoolExecutor(jobs, thread_name_prefix="import") as pool:
            futures = [pool.submit(work.write_blob, number, blob) for number, blob in enumerate(plan.blobs)]
            try:
                wait(futures)
            except BaseException:
                work.stop_after(-1)
                raise
        blobs = [future.result() for future in futures]
        work.readers.check_unchanged()
        return blobs
    finally:
        work.readers.close()


class _StoppedError(Exception):
    """A blob was given up because an earlier one in the plan failed, or the import was interrupted."""


class _Work:
    """What the threads of one import share."""

    def __init__(self, ingest: Ingest, progress: Progress) -> None:
        self.readers = SourceReaders()
        self._ingest = ingest
        self._progress = progress
        self._mutex = threading.Lock()
        self._last: float = math.inf

    def stop_after(self, number: int) -> None:
        """Let the blobs behind ``number`` in the plan stop; those before it go on, since theirs may be the first error."""
        with self._mutex:
            self._last = min(self._last, number)

    def _check_wanted(self, number: int) -> None:
        if number > self._last:
            raise _StoppedError

    def write_blob(self, number: int, blob: PlannedBlob) -> FinishedBlob:
        """Write the plan's blob of that number. Raises: what went wrong; _StoppedError."""
        try:
            self._check_wanted(number)
            header = blob.header
            with self._ingest.writer(len(header) + blob.data_size) as writer:
                writer.write(header)
                for tensor in blob.tensors:
                    self._write_tensor(number, tensor, writer, blob)
                return writer.finish()
        except BaseException:
            self.stop_after(number)
            raise

    def _write_tensor(self, number: int, tensor: OutputTensor, writer: BlobWriter, blob: PlannedBlob) -> None:
        companions: list[list[Array]] = []
        factor = self._global_scale(number, tensor)
        for source in tensor.sources:
            for start, chunk in self._chunks(number, source):
                weights = chunk if source.dtype is tensor.dtype else _cast(chunk, tensor.dtype, source, start)
                if tensor.quantization is None:
                    writer.write(_bytes(weights))
                else:
                    choice = _choice(blob.options, source, start, factor)
                    words, *rest = _quantize(weights, tensor.quantization, choice, source, start)
                    writer.write(_bytes(words))
                    companions.append(rest)
                self._progress(chunk.nbytes, blob.name)
        # The weight comes first in a blob, so its scales and biases wait here: for int4/32, an eighth of what is stored.
        for arrays in zip(*companions, strict=True):
            for array in arrays:
                writer.write(_bytes(array))
        if tensor.global_scale:
            writer.write(_bytes(np.array([factor], np.float32)))

    def _global_scale(self, number: int, tensor: OutputTensor) -> float:
        """Return what the tensor's weights are divided by first: for one with a global scale, that costs a read of it."""
        if not tensor.global_scale:
            return 1.0
        largest = 0.0
        for source in tensor.sources:
            for start, chunk in self._chunks(number, source):
                weights = chunk if source.dtype is tensor.dtype else _cast(chunk, tensor.dtype, source, start)
                largest = max(largest, kernels.largest_magnitude(weights))
        return kernels.global_scale_of(largest)

    def _chunks(self, number: int, source: SourceTensor) -> Iterator[tuple[int, Array]]:
        """Yield ``(index of the first element, elements)`` of a tensor; each chunk lives until the next one."""
        reader = self.readers.reader(source.file)
        buffer = memoryview(bytearray(min(CHUNK, source.nbytes)))
        for done in range(0, source.nbytes, CHUNK):
            self._check_wanted(number)
            view = buffer[: min(CHUNK, source.nbytes - done)]
            reader.readinto(source.offset + done, view)
            yield done * 8 // source.dtype.bits, _elements(view, source.dtype)


def _bytes(array: Array) -> Array:
    # ml_dtypes' types have no buffer protocol of their own.
    return array.view(np.uint8)


def _elements(view: memoryview, dtype: DType) -> Array:
    """Return the bytes as elements; types that numpy has not are left as bytes, which can only be copied."""
    return np.frombuffer(view, numpy_dtype(dtype) if dtype.bits >= 8 else np.uint8)  # noqa: PLR2004


def _cast(chunk: Array, dtype: DType, source: SourceTensor, start: int) -> Array:
    """Return ``chunk`` rounded to ``dtype``. Raises: UnsupportedSourceError when a finite value would become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        cast: Array = chunk.astype(numpy_dtype(dtype))
    overflows = np.isinf(cast) & np.isfinite(chunk)
    if overflows.any():
        first = int(np.argmax(overflows))
        index = _index(source, start + first)
        raise UnsupportedSourceError(
            f"{source.name!r}: the value {chunk[first]} at {list(index)} does not fit {dtype}",
            tensor=source.name,
            index=index,
        )
    return cast


def _choice(options: ImportOptions, source: SourceTensor, start: int, global_scale: float) -> ScaleChoice:
    importance = options.importance.vectors.get(source.name) if options.importance is not None else None
    return ScaleChoice(options.method, importance, start % source.shape[-1], global_scale)


def _quantize(
    weights: Array, quantization: Quantization, choice: ScaleChoice, source: SourceTensor, start: int
) -> list[Array]:
    """Return the stored arrays of a flat run of whole groups.

    Raises: NonFiniteWeightError with tensor and index; UnsupportedSourceError when a group's range overflows its scale,
    which MLX stores as infinity, and which would come back as NaN.
    """
    described = quantization.parts(weights.shape, dtype_of(weights))
    weight, scale, *rest = (np.empty(part.shape, numpy_dtype(part.dtype)) for part in described)
    parts = QuantizedArray(weight, scale, rest[0] if rest else None, None, quantization)
    bad = kernels.quantize_into(weights, parts, choice)
    if bad >= 0:
        index = _index(source, start + bad)
        raise NonFiniteWeightError(
            f"{source.name!r}: the weight at {list(index)} is {weights[bad]}, and only finite weights can be quantized",
            tensor=source.name,
            index=index,
            path=source.file.path,
        )
    if not all(np.isfinite(part).all() for part in (scale, *rest)):
        group = int(np.argmin(np.isfinite(scale))) * quantization.group_size
        index = _index(source, start + group)
        raise UnsupportedSourceError(
            f"{source.name!r}: the weights from {list(index)} on span more than {dtype_of(weights)} can scale",
            tensor=source.name,
            index=index,
            path=source.file.path,
        )
    return [weight, scale, *rest]


def _index(source: SourceTensor, flat: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, source.shape))
