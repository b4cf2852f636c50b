"""Weights of a checkpoint, each of one or more tensors, and their values.

An unquantized weight is one tensor. A quantized one has companions: scales, biases, a global scale.
An FP8 weight has one scale for each block of rows and columns; a whole matrix may be one, or a row.
A coded weight is decoded by its `Coding`.

`SourceReaders` reads the values, decoded, from files that are unchanged since the inventory. A tile
is a range of consecutive values of matrices, cut where rows begin and end. A `Fetcher` reads files
on servers in large ranges, many at once, and bounds the requests at once and their rate.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.io.budget import Cancellation
from blobstore.io.ranges import SourceReader
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.kernels.scales import BlockRun, decoded_scales
from blobstore.source.coding import (
    FACTORS,
    WIDE,
    Bands,
    Coding,
    CodingError,
    LowRank,
    ReadRegion,
    Region,
)
from blobstore.source.folders import SourceFile, SourceTensor

_EXPERT_MARKS = (".experts.", ".mlp.switch_mlp.", ".mlp.shared_experts.", ".mixer.shared_experts.")
_EXPERT_COMPANIONS = (".bias", ".scale", ".qbias")


class Form(enum.Enum):
    """How the values of a weight are stored in the source."""

    PLAIN = "plain"
    CODES = "codes"
    CODED = "coded"
    FP8 = "FP8"


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """One weight: its name in the model, the dtype and shape of its values, and its tensors.

    ``tensor`` is that of the weight itself, ``companions`` are the others by the suffix of the
    array that they become (".scale", ".bias", ".global_scale"). ``producer`` is the program that
    quantized it, by its name in producers.py. ``quantization`` is that of ``CODES``, which are
    copied or dequantized, and of ``CODED`` values, None if ours has no such groups; ``dtype`` is
    then the one that values are dequantized to. ``coding``: how ``CODED`` values are stored.
    ``block``: rows and columns of an ``FP8`` matrix that share a scale. ``inverse_scale``: the
    source stores what values are divided by, as the global scale, or as scales of FP8.
    ``change``: what an adapter adds to the values, rounded once to ``dtype``; its tensors are among
    ``companions``. The values of a ``PLAIN`` tensor of another dtype are rounded to it, too.
    ``transposed``: ``shape``, and the order of the values, have the last two axes of the
    checkpoint's tensor swapped; of ``PLAIN`` values these are swapped as they are read.
    ``stored_dtype``: what values are rounded to if no dtype is asked for; None is ``dtype``.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    tensor: SourceTensor
    companions: Mapping[str, SourceTensor] = field(default_factory=dict)
    form: Form = Form.PLAIN
    producer: str = ""
    quantization: Quantization | None = None
    inverse_scale: bool = False
    transposed: bool = False
    coding: Coding | None = None
    block: tuple[int, int] | None = None
    change: LowRank | None = None
    stored_dtype: DType | None = None

    @classmethod
    def plain(cls, tensor: SourceTensor) -> SourceWeight:
        return cls(tensor.name, tensor.dtype, tensor.shape, tensor)

    @property
    def parts(self) -> dict[str, SourceTensor]:
        return {"": self.tensor, **self.companions}

    @property
    def file(self) -> SourceFile:
        return self.tensor.file

    @property
    def becomes(self) -> QuantType | None:
        """The type that a matrix gets if none is asked for; None if it stays what it is."""
        of_codes = None if self.coding is None else self.coding.becomes
        return QuantType.MXFP8 if self.form is Form.FP8 else of_codes

    @property
    def global_scale_shape(self) -> tuple[int, ...] | None:
        scale = self.companions.get(".global_scale")
        return None if scale is None else scale.shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors, but for an adapter's, which many weights may share."""
        return sum([part.nbytes for suffix, part in self.parts.items() if suffix not in FACTORS])

    @property
    def holds_codes(self) -> bool:
        """True if a type of ours holds its codes as they are."""
        return self.quantization is not None and self.form is not Form.PLAIN and self.change is None

    @property
    def stated(self) -> list[str]:
        """The suffixes of its tensors that are checked before its first value is read."""
        checked = self.coding.stated if self.coding is not None else ()
        return [suffix for suffix in checked if suffix in self.companions]

    def as_transposed(self) -> SourceWeight:
        *lead, rows, cols = self.shape
        change = self.change and replace(self.change, transposed=not self.change.transposed)
        return replace(
            self, shape=(*lead, cols, rows), transposed=not self.transposed, change=change
        )

    def changed_tiles(self, start: int, count: int) -> Iterator[tuple[Tile, list[Region]]]:
        """Yield tiles of whole rows, and the bytes of an adapter that change them."""
        if self.change is not None:
            for tile in tiles_of(start, count, *self.shape[-2:]):
                rows = range(tile.row, tile.stop_row)
                regions = self.change.regions(self.companions, tile.matrix, rows, self.shape)
                yield tile, list(regions)

    def whole_rows(self, start: int, count: int) -> tuple[int, int]:
        """Return where the rows that have these values begin, and how many values they have."""
        cols = self.shape[-1]
        first, stop = start // cols * cols, -(-(start + count) // cols) * cols
        return first, stop - first

    def values_at_once(self, most: int) -> int:
        """Return how many values to read at a time, ``most`` at most.

        For a transposed weight these are whole rows: in the file a row's values lie far apart, so
        reading half a row costs as much. So it does if an adapter changes it.
        """
        in_rows = self.transposed or self.form is Form.CODED or self.change is not None
        most //= 1 if self.change is None else 2  # it is added to what was read, in other memory
        return most - most % self.shape[-1] if in_rows and most > self.shape[-1] else most

    @property
    def by_columns(self) -> bool:
        is_turned = self.transposed and self.form is Form.PLAIN
        return is_turned if self.coding is None else self.coding.by_columns

    def stored_index(self, flat: int) -> tuple[int, ...]:
        """Return the index in the source's tensor for a flat index of the values."""
        index = [*map(int, np.unravel_index(flat, self.shape))]
        if self.transposed and self.form is Form.PLAIN:
            index[-2:] = reversed(index[-2:])
        return tuple(index)

    @property
    def layout(self) -> tuple[object, ...]:
        """The properties that all experts of one projection must share."""
        scale = self.companions.get(".scale")
        return (
            self.tensor.dtype,
            self.dtype,
            self.shape,
            self.quantization,
            self.coding,
            self.block,
            scale and (scale.dtype, scale.shape),
        )

    def block_run(self, start: int, count: int) -> BlockRun:
        """Return ``count`` codes of FP8 from index ``start`` on, and the blocks they are in."""
        (rows, cols), (height, width) = self.shape[-2:], self.block or (1, 1)
        return BlockRun(
            rows=rows,
            cols=cols,
            first=start,
            count=count,
            block_rows=height,
            block_cols=width,
            dtype=self.tensor.dtype,
        )


def named_twice(name: str, one: SourceWeight, other: SourceWeight) -> UnsupportedSourceError:
    """Return the error for two tensors that would both have ``name``."""
    places = [f"{weight.tensor.name!r} of {weight.file.name}" for weight in (one, other)]
    return UnsupportedSourceError(
        f"two tensors would have the name {quoted(name)}: {places[0]} and {places[1]}",
        tensor=name,
        path=other.file.path,
    )


def is_expert(name: str) -> bool:
    """Return True for a weight of a mixture's experts, shared ones included."""
    return any(mark in name for mark in _EXPERT_MARKS) and not name.endswith(_EXPERT_COMPANIONS)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of one matrix; ``at``: where its values begin in the range."""

    matrix: int
    row: int
    stop_row: int
    col: int
    stop_col: int
    at: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop_row - self.row, self.stop_col - self.col

    @property
    def size(self) -> int:
        rows, cols = self.shape
        return rows * cols


def tiles_of(start: int, count: int, rows: int, cols: int) -> Iterator[Tile]:
    """Yield the tiles of ``count`` values from flat index ``start`` on, in order.

    The values are of matrices ``[rows, cols]``; a tile is whole rows of one, or a part of a row.
    """
    done = 0
    while done < count:
        matrix, first = divmod(start + done, rows * cols)
        row, col = divmod(first, cols)
        whole = min(rows - row, (count - done) // cols) if col == 0 else 0
        stop_col = cols if whole else min(cols, col + count - done)
        tile = Tile(matrix, row, row + max(1, whole), col, stop_col, done)
        yield tile
        done += tile.size


class Scratch(threading.local):
    """Memory that a thread uses again: fresh memory is slow where the allocator gives it back."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}  # by its use; called in each thread

    def array(self, use: str, count: int, kind: np.dtype[Any]) -> Array:
        """Return an uninitialized array of ``count`` elements: the same memory for each ``use``."""
        nbytes = count * kind.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(kind)


# Scales of FP8 blocks that are read at a time: 1.5 MiB at most for 4 MiB (`BlockRun.pieces`).
_BLOCK_SCALES = 2**18


class SourceReaders:
    """The source files of an import, opened when they are first read, and unchanged since.

    ``open_file`` opens one.
    """

    def __init__(self, open_file: Callable[[SourceFile], SourceReader] = SourceFile.open) -> None:
        self._open_file = open_file
        self._open: dict[str, SourceReader] = {}
        self._mutex = threading.Lock()
        self._bands = Bands(self._read)
        self.scratch = Scratch()

    def readinto(self, tensor: SourceTensor, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a tensor's bytes from its byte ``start`` on.

        Raises: NotFoundError, CorruptDataError when the file changed since the inventory;
        ShortReadError; StorageError.
        """
        self._reader(tensor.file).readinto(tensor.offset + start, buffer)

    def values(self, weight: SourceWeight, start: int, count: int) -> Array:
        """Return ``count`` values from index ``start`` on, as a flat array of the weight's dtype.

        The array is valid until the thread's next call. Values of a dtype that numpy lacks are
        returned as bytes, and ``start`` and ``count`` then count bytes. For codes, they must be
        whole groups. Raises: as `readinto`; UnsupportedSourceError for a global scale of 0.
        """
        if weight.change is not None:
            return self._changed(weight, weight.change, start, count)
        if weight.form is Form.PLAIN:
            if weight.transposed:
                return self._read_transposed(weight, start, count)
            dtype = weight.tensor.dtype
            kind = numpy_dtype(dtype) if dtype.bits >= 8 else np.dtype(np.uint8)  # noqa: PLR2004
            stored = self._read_stored(weight.tensor, start, count, kind)
            return stored if dtype is weight.dtype else stored.astype(numpy_dtype(weight.dtype))
        if weight.form is Form.FP8:
            return self._decode(weight, start, count)
        if weight.coding is not None:
            with self._coded(weight, start) as read:
                return weight.coding.values(read, start, count, weight.dtype)
        return self._dequantize(weight, start, count)

    def _changed(self, weight: SourceWeight, change: LowRank, start: int, count: int) -> Array:
        """Return values that an adapter has changed. Raises: UnsupportedSourceError."""
        first, needed = weight.whole_rows(start, count)
        exact = weight.form in (Form.CODES, Form.CODED)
        base = replace(weight, change=None, dtype=DType.F32 if exact else weight.dtype)
        values = self.values(base, first, needed).reshape(-1, weight.shape[-1])
        out = self.scratch.array("changed", needed, numpy_dtype(weight.dtype)).reshape(values.shape)
        for tile, regions in weight.changed_tiles(first, needed):
            rows = slice(tile.at // tile.stop_col, (tile.at + tile.size) // tile.stop_col)
            factors = {}
            for region in regions:
                raw = np.ascontiguousarray(self._read_region(weight, region))
                kind = numpy_dtype(weight.companions[region.suffix].dtype)
                factors[region.suffix] = raw.view(kind).astype(np.float32)
            with np.errstate(all="ignore"):
                change.apply(factors, values[rows], out[rows])
        out = out.reshape(-1)[start - first :][:count]
        if not np.isfinite(out).all():
            raise UnsupportedSourceError(
                f"{quoted(weight.companions[WIDE].name)} gives {quoted(weight.name)} values that"
                f" are not finite {weight.dtype} numbers",
                tensor=weight.name,
                path=weight.companions[WIDE].file.path,
            )
        return out

    def quantized(self, weight: SourceWeight, start: int, count: int) -> QuantizedArray[Array]:
        """Return ``count`` values of a coded weight, whole groups of ours, as they are stored.

        Raises: as `values`.
        """
        if weight.coding is None:
            raise AssertionError("only coded weights are stored in another way")
        with self._coded(weight, start) as read:
            return weight.coding.quantized(read, start, count)

    @contextmanager
    def _coded(self, weight: SourceWeight, start: int) -> Iterator[ReadRegion]:
        """Give what reads a coded weight's regions; errors of its coding get its name.

        Raises: UnsupportedSourceError if a weight's tensors state another shape or order.
        """
        for suffix in weight.stated if start == 0 else ():
            tensor = weight.companions[suffix]
            kind = numpy_dtype(tensor.dtype)
            said = self._read(tensor, 0, np.empty(tensor.nbytes // kind.itemsize, kind))
            if weight.coding and not weight.coding.states(suffix, said, weight.shape):
                raise UnsupportedSourceError(
                    f"{quoted(tensor.name)} has {said[:8].tolist()}, which contradicts config.json"
                    f" and the shapes of {quoted(weight.tensor.name)} {list(weight.shape)}",
                    tensor=weight.tensor.name,
                    path=tensor.file.path,
                )
        try:
            yield partial(self._read_region, weight)
        except CodingError as error:
            raise UnsupportedSourceError(
                f"{quoted(weight.tensor.name)} is {weight.producer}: {error}",
                tensor=weight.tensor.name,
                path=weight.file.path,
            ) from None

    def _read_region(self, weight: SourceWeight, region: Region) -> Array:
        """Return bytes of one of the weight's tensors, U8 ``[lines, bytes]``."""
        tensor, width = weight.parts[region.suffix], region.end - region.begin
        if not region.line:
            return self._read(tensor, region.begin, np.empty(width, np.uint8))[None]
        count = region.stop - region.first
        lines = self.scratch.array(f"lines{region.suffix}", count * width, np.dtype(np.uint8))
        self._bands.fill(tensor, region, lines.reshape(count, width))
        return lines.reshape(count, width)

    def global_scale(self, weight: SourceWeight) -> np.float32:
        """Return the factor of a double-scaled weight's values.

        Raises: UnsupportedSourceError when it, or its inverse if that is needed, is not a finite
        number.
        """
        tensor = weight.companions[".global_scale"]
        stored = self._read(tensor, 0, np.empty(1, np.float32))[0]
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.float32(1) / stored if weight.inverse_scale else stored
        if not (np.isfinite(stored) and np.isfinite(scale)):
            raise UnsupportedSourceError(
                f"the global scale {quoted(tensor.name)} is {stored}: no weight can be scaled by"
                " it",
                tensor=tensor.name,
                path=tensor.file.path,
            )
        return np.float32(scale)

    def _read_stored(
        self, tensor: SourceTensor, start: int, count: int, kind: np.dtype[Any]
    ) -> Array:
        """Return elements of a tensor from index ``start`` on, where they lie if that is memory."""
        begin, nbytes = tensor.offset + start * kind.itemsize, count * kind.itemsize
        view = self._reader(tensor.file).view(begin, nbytes)
        if view is not None and count:
            there = np.frombuffer(view, np.uint8)
            if there.ctypes.data % kind.itemsize == 0:  # kernels need aligned memory
                return there.view(kind)
        return self._read(tensor, start, self.scratch.array("stored", count, kind))

    def _read(self, tensor: SourceTensor, start: int, array: Array) -> Array:
        self.readinto(tensor, start * array.itemsize, array.view(np.uint8).data)
        return array

    def _read_transposed(self, weight: SourceWeight, start: int, count: int) -> Array:
        """Return values of matrices ``[rows, cols]`` that the file stores as ``[cols, rows]``."""
        out = self.scratch.array("transposed", count, numpy_dtype(weight.dtype))
        rows, cols = weight.shape[-2:]
        kind = numpy_dtype(weight.tensor.dtype)
        line = rows * kind.itemsize
        for tile in tiles_of(start, count, rows, cols):
            first = tile.matrix * cols
            lines = first + tile.col, first + tile.stop_col
            span = tile.row * kind.itemsize, tile.stop_row * kind.itemsize
            strip = self._read_region(weight, Region("", line, *lines, *span)).view(kind)
            out[tile.at : tile.at + tile.size].reshape(tile.shape)[:] = strip.T
        return out

    def _decode(self, weight: SourceWeight, start: int, count: int) -> Array:
        codes = self._read_stored(weight.tensor, start, count, np.dtype(np.uint8))
        out = self.scratch.array("decoded", count, numpy_dtype(DType.BF16))
        for run in weight.block_run(start, count).pieces(_BLOCK_SCALES):
            place = slice(run.first - start, run.first - start + run.count)
            kernels.decode_blocks_into(codes[place], self._scales(weight, run), out[place], run)
        return out

    def _scales(self, weight: SourceWeight, run: BlockRun) -> Array:
        """Return what the codes of a run of FP8 are multiplied by."""
        tensor, needed = weight.companions[".scale"], run.scales
        is_float = tensor.dtype.is_float
        kind = numpy_dtype(tensor.dtype) if is_float else np.dtype(np.uint8)
        scales = self._read(tensor, needed.start, self.scratch.array("scales", len(needed), kind))
        if not is_float:
            scales = decoded_scales(scales, QuantType.MXFP8)
        if weight.inverse_scale:
            with np.errstate(divide="ignore"):
                scales = np.float32(1) / scales.astype(np.float32)
        return scales

    def _dequantize(self, weight: SourceWeight, start: int, count: int) -> Array:
        quantization = weight.quantization
        if quantization is None:
            raise AssertionError("codes are quantized")
        arrays = {}
        for part in quantization.parts((count,), weight.companions[".scale"].dtype):
            first = start * math.prod(part.shape) // count
            scratch = self.scratch.array(part.suffix, part.shape[0], numpy_dtype(part.dtype))
            arrays[part.suffix] = self._read(weight.parts[part.suffix], first, scratch)
        scale = (
            np.array([self.global_scale(weight)]) if ".global_scale" in weight.companions else None
        )
        array = QuantizedArray(
            arrays[""], arrays[".scale"], arrays.get(".bias"), scale, quantization
        )
        return kernels.dequantize(array, weight.dtype)

    def _reader(self, file: SourceFile) -> SourceReader:
        reader = self._open.get(file.path)
        if reader is None:
            with self._mutex:
                reader = self._open.get(file.path)
                if reader is None:
                    reader = self._open[file.path] = self._open_file(file)
        return reader

    def check_unchanged(self) -> None:
        for reader in self._open.values():
            reader.check_unchanged()

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


CONNECTIONS = 8
"""Requests at once: they bring 1 GB/s where a connection brings 125 MB/s."""
SLOWEST_LIMIT = 16 * 2**10
_LEAST_PIECE = 64 * 2**10
_BURST_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How files are fetched.

    ``connections``: requests at once; None is `CONNECTIONS`. ``limit_rate``: bytes a second of all
    connections together; None is as many as come. Raises: UsageError for less than one of either,
    or a rate with which no request would end in time.
    """

    connections: int | None = None
    limit_rate: int | None = None

    def __post_init__(self) -> None:
        limits = (
            ("connections", self.connections, 1),
            ("limit_rate", self.limit_rate, SLOWEST_LIMIT),
        )
        for name, value, least in limits:
            if value is not None and value < least:
                raise UsageError(f"{name} is at least {least:,}, not {value:,}")


class Fetcher:
    """Fills memory with ranges of source files, several at once. Safe to share between threads.

    ``at_once``: how many ranges are fetched at once; more threads are of no use. ``stop``: calls of
    `fill` raise RemoteError soon after it is set.
    """

    def __init__(self, options: FetchOptions) -> None:
        self.at_once = options.connections or CONNECTIONS
        self._slots = threading.Semaphore(self.at_once)
        self.stop = Cancellation()
        rate = options.limit_rate
        self._limit = RateLimit(rate, wait=self.stop.wait) if rate is not None else None

    def fill(self, file: SourceFile, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from byte ``begin`` on.

        The call waits until one more request may run. At a limited rate each request is for a part
        of a second. Raises: CorruptDataError when the file has another identity now; NotFoundError;
        ShortReadError; RemoteError; StorageError.
        """
        step = len(buffer) if self._limit is None else max(_LEAST_PIECE, self._limit.rate // 4)
        for at in range(0, len(buffer), step):
            piece = buffer[at : at + step]
            with self._slots:
                if self._limit is not None:
                    self._limit.take(len(piece))
                self.stop.check(file.path)
                file.folder.fill(file.name, file.identity, begin + at, piece, self.stop)


class RateLimit:
    """A token bucket. Safe to share between threads.

    ``rate``: bytes a second. ``wait`` waits at most that many seconds.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._wait = wait
        self._paid_until = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        with self._lock:
            now = self._clock()
            start = max(self._paid_until, now - _BURST_S)
            self._paid_until = start + nbytes / self.rate
            left = self._paid_until - now
        if left > 0:
            self._wait(left)


@contextmanager
def open_fetcher(files: Iterable[SourceFile], options: FetchOptions) -> Iterator[Fetcher]:
    """Give a fetcher of these files, which is cancelled at the end of the block."""
    fetcher = Fetcher(options)
    for file in files:
        file.folder.allow(fetcher.at_once)
    try:
        yield fetcher
    finally:
        fetcher.stop.set()
