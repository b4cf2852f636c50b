"""Coding: how another program stored the values of a weight, and how they are decoded.

A coding is a value that says where the bytes of any values lie in the weight's tensors; it reads
nothing itself. codes.py and gguf.py have the codings.

A *change* is what an adapter adds to the values. A BLAS sums in other orders on other machines. So
each row of one factor and each column of the other are rounded to as many bits (25 for rank 8, 23
for 64) as let float64 hold every sum of their products exactly, in any order. The product is then
rounded to float32, as all other results are.

A *band* has bytes of each of a matrix's lines, of which some rows of the model need a few. Where a
matrix lies with its inputs first, a row of outputs has a little of every line, and next to it the
following rows have theirs. To read these pieces one by one takes a system call for each, and to
read whole lines for each run of rows reads the matrix over and over. So a band, of many rows, is
read at once and kept, and the next rows are copied from it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray
from blobstore.source.folders import SourceTensor


class Region(NamedTuple):
    """Bytes ``begin`` to ``end`` of each of some lines of a tensor, by its suffix.

    A line has ``line`` bytes; ``first`` and ``stop`` are the lines' numbers.
    """

    suffix: str
    line: int
    first: int
    stop: int
    begin: int
    end: int

    @classmethod
    def span(cls, suffix: str, begin: int, end: int) -> Region:
        return cls(suffix, 0, 0, 1, begin, end)

    @classmethod
    def lines(cls, suffix: str, line: int, first: int, stop: int) -> Region:
        return cls.span(suffix, first * line, stop * line)

    @property
    def needs(self) -> tuple[int, int]:
        """The bytes that are read, or lie between: whole lines."""
        if not self.line:
            return self.begin, self.end
        return self.first * self.line, self.stop * self.line


ReadRegion = Callable[[Region], Array]
"""Returns a region's bytes as U8 ``[lines, end - begin]``."""


class CodingError(ValueError):
    """What a weight's tensors hold is outside of its coding; `SourceReaders` adds the name."""


class Coding(ABC):
    """A frozen dataclass: its text tells it from every other coding (writing.py).

    Indexes are flat, in the values of all matrices ``[rows, cols]`` of the weight. ``stated``: the
    suffixes of tensors that `states` checks, if the weight has them, before any value is read.
    ``by_columns``: True if the values of a row lie far apart, each beside those of the next rows.
    ``is_quantized``: False if the values are all those of a float type. ``becomes``: the type that
    matrices get if none is asked for; None if they keep codes or floats. ``quantization``: the type
    and groups of ours that hold these codes as they are; None without any. ``rounding``: the
    largest difference that rounded biases make to kept codes' values, in steps between two codes.
    """

    stated: ClassVar[tuple[str, ...]] = ()

    @property
    def by_columns(self) -> bool:
        return False

    @property
    def is_quantized(self) -> bool:
        return True

    @property
    def becomes(self) -> QuantType | None:
        return None

    @property
    def quantization(self) -> Quantization | None:
        return None

    @property
    def rounding(self) -> float:
        return 0.0

    @abstractmethod
    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield what values are made from: a tensor's suffix, and from where to where in bytes."""

    @abstractmethod
    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        """Return ``count`` values from flat index ``start`` on, in float32, rounded once.

        If `quantization` is not None, they are whole groups of it.
        """

    def quantized(self, read: ReadRegion, start: int, count: int) -> QuantizedArray[Array]:
        """Return the same as codes, scales and biases of `quantization`, whole groups of it."""
        raise AssertionError(f"no groups of ours fit {read}, {start}, {count}")

    def states(self, suffix: str, said: Array, shape: tuple[int, ...]) -> bool:
        """Return True unless what a tensor of the weight states contradicts the coding."""
        raise AssertionError(f"no tensor {suffix} states {said} of {shape}")


TALL, WIDE, MAGNITUDE = FACTORS = (".tall", ".wide", ".magnitude")
"""The suffixes of an adapter's tensors among those of a weight."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """``scale * tall @ wide``, or its transpose, is added to each matrix of a weight.

    ``tall`` is ``[n, rank]``, ``wide`` ``[rank, m]``. With a magnitude (DoRA), rows get that norm
    afterwards. ``matrix``: which of the adapter's matrices the weight's first one gets.
    """

    rank: int
    scale: float
    transposed: bool = False
    matrix: int = 0

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's tensors for a weight ``[..., rows, cols]``."""
        *lead, rows, cols = shape
        height, width = (cols, rows) if self.transposed else (rows, cols)
        return {
            TALL: (*lead, height, self.rank),
            WIDE: (*lead, self.rank, width),
            MAGNITUDE: (*lead, rows),
        }

    def regions(
        self, parts: Mapping[str, SourceTensor], matrix: int, rows: range, shape: tuple[int, ...]
    ) -> Iterator[Region]:
        """Yield the bytes of ``parts`` that change ``rows`` of a matrix."""
        axes = {WIDE: 1} if self.transposed else {TALL: 0}
        for suffix, own in self.shapes(shape[-2:]).items():
            if suffix in parts:
                height, width = (*own, 1)[:2]
                spans = [range(height), range(width)]
                if suffix != (TALL if self.transposed else WIDE):
                    spans[axes.get(suffix, 0)] = rows
                item, first = parts[suffix].dtype.bits // 8, (self.matrix + matrix) * height
                lines, columns = spans
                yield Region(
                    suffix,
                    width * item,
                    first + lines.start,
                    first + lines.stop,
                    columns.start * item,
                    columns.stop * item,
                )

    def apply(self, factors: Mapping[str, Array], values: Array, out: Array) -> None:
        """Fill ``out`` with changed rows of values, rounded; their ``factors`` are float32."""
        tall, wide = factors[TALL].reshape(-1, self.rank), factors[WIDE].reshape(self.rank, -1)
        left, right = (wide.T, tall.T) if self.transposed else (tall, wide)
        bits = (53 - (self.rank - 1).bit_length()) // 2
        total = (_rounded(left, bits, 1) @ _rounded(right, bits, 0)).astype(np.float32)
        total *= np.float32(self.scale)
        total += values
        if MAGNITUDE in factors:
            # In one order: `sum` has others on other machines.
            squares = np.add.accumulate(np.square(total, dtype=np.float64), 1)
            norms = np.sqrt(squares[:, -1:]).astype(np.float32)
            norms[np.isinf(norms)] = np.nan  # as sums that are not finite: values are refused
            total *= factors[MAGNITUDE].reshape(-1, 1) / norms
        out[:] = total


def _rounded(factor: Array, bits: int, axis: int) -> Array:
    """Return float64 multiples of powers of two, of ``bits`` beside the largest of each line."""
    _, exponents = np.frexp(np.abs(factor).max(axis, keepdims=True))
    steps = np.ldexp(1.0, exponents - bits)
    rounded: Array = np.rint(factor / steps) * steps
    return rounded


_SIZES = {2**18: 6, 6 * 2**20: 2}
# A band holds the bytes of so many runs of rows, unless no band is that large.
_ROOM = 8
# Whole lines are read together if at most that much of each is not needed. Copying 16 KiB takes as
# long as a call from Python, 3 us (AMD EPYC).
_STRIP, _GAP = 2**18, 2**14


@dataclass(slots=True, eq=False)
class _Band:
    """Bytes from ``begin`` on of each of the lines that ``key`` names; None: nothing yet."""

    memory: Array
    lines: Array
    begin: int = 0
    key: tuple[str, int, int, int] | None = None


class Bands:
    """Reads parts of lines. Safe to share between threads.

    ``read`` fills an array with a tensor's bytes from a byte on. ``sizes``: how many bands are kept
    of each number of bytes, the least first; small ones are for scales and zero points.
    """

    def __init__(
        self,
        read: Callable[[SourceTensor, int, Array], object],
        sizes: Mapping[int, int] = _SIZES,
    ) -> None:
        self._read = read
        # The last one was used last. Memory is not touched before it is needed.
        memories = (np.empty((many, nbytes), np.uint8) for nbytes, many in sizes.items())
        self._bands = [_Band(one, one[None]) for memory in memories for one in memory]
        self._strip = np.empty(_STRIP, np.uint8)
        self._mutex = threading.Lock()

    def fill(self, tensor: SourceTensor, region: Region, out: Array) -> None:
        """Fill ``out``, U8 ``[lines, bytes]``, with those of a region. Raises: as ``read``."""
        count, width = out.shape
        if width == region.line:
            self._read(tensor, region.first * width, out.reshape(-1))
            return
        key = tensor.file.path, tensor.offset, region.first, region.stop
        with self._mutex:
            sizes = sorted({band.memory.size for band in self._bands})
            nbytes = next((size for size in sizes if size >= _ROOM * out.size), sizes[-1])
            if out.size > nbytes:
                self._read_lines(tensor, region, out)
                return
            fit = [band for band in self._bands if band.memory.size == nbytes]
            band = next((one for one in fit if one.key == key), fit[0])
            first = region.begin - band.begin
            if band.key != key or first < 0 or first + width > band.lines.shape[1]:
                end = min(region.begin + nbytes // out.size * width, region.line)
                used = count * (end - region.begin)
                band.key, band.begin, first = None, region.begin, 0
                band.lines = band.memory[:used].reshape(count, -1)
                self._read_lines(tensor, region._replace(end=end), band.lines)
                band.key = key
            self._bands.remove(band)
            self._bands.append(band)
            out[:] = band.lines[:, first : first + width]

    def _read_lines(self, tensor: SourceTensor, region: Region, out: Array) -> None:
        line, width = region.line, region.end - region.begin
        step = max(1, _STRIP // line) if line - width <= _GAP else 1
        for first in range(0, len(out), step):
            lines, at = out[first : first + step], (region.first + first) * line
            if step == 1:
                self._read(tensor, at + region.begin, lines.reshape(-1))
                continue
            strip = self._strip[: len(lines) * line]
            self._read(tensor, at, strip)
            lines[:] = strip.reshape(len(lines), line)[:, region.begin : region.end]
