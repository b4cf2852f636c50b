"""Reading: the values of source weights, decoded, from files that are checked to be those of the inventory.

A tile is a range of consecutive values of matrices, cut where rows begin and end.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore import kernels
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.dtypes import DType
from blobstore.kernels.arrays import QuantizedArray, numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.folders import SourceReader
from blobstore.source.inventory import SourceFile, SourceTensor
from blobstore.source.weights import Form, SourceWeight


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of one matrix, each from the first to before the last; ``at``: its place in the range it is of."""

    matrix: int
    row: int
    stop_row: int
    col: int
    stop_col: int
    at: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.stop_row - self.row, self.stop_col - self.col

    @property
    def size(self) -> int:
        """Number of values."""
        rows, cols = self.shape
        return rows * cols


def tiles_of(start: int, count: int, rows: int, cols: int) -> Iterator[Tile]:
    """Yield ``count`` values from flat index ``start`` on, of matrices ``[rows, cols]`` that follow each other.

    In their order, each tile whole rows of a matrix, or a part of one row.
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


_BLOCK_SCALES = 2**18
"""Scales of FP8 blocks that are read at a time: at most 1.5 MiB for a run of 4 MiB (`BlockRun.pieces`)."""

Array = np.ndarray[Any, Any]


class _Scratch(threading.local):
    """Memory that a thread reads into again and again."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def array(self, use: str, count: int, kind: np.dtype[Any]) -> Array:
        """Return an array of ``count`` elements with whatever is in it: the same memory for every ``use``."""
        nbytes = count * kind.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.size < nbytes:
            memory = self._memory[use] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(kind)


class SourceReaders:
    """The source files of an import, opened when they are first read, and checked to be those of the inventory."""

    def __init__(self) -> None:
        self._open: dict[str, SourceReader] = {}
        self._mutex = threading.Lock()
        self._scratch = _Scratch()

    def readinto(self, tensor: SourceTensor, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a tensor's bytes from its byte ``start`` on.

        Raises: NotFoundError, CorruptDataError when the file changed since the inventory;
        ShortReadError; StorageError.
        """
        self._reader(tensor.file).readinto(tensor.offset + start, buffer)

    def values(self, weight: SourceWeight, start: int, count: int) -> Array:
        """Return ``count`` values from index ``start`` on, as a flat array of the weight's dtype.

        It is valid until the thread's next call. Those of a dtype that numpy has not are returned
        as bytes, and ``start`` and ``count`` are then bytes; of codes, they are whole groups.
        Raises: as `readinto`; UnsupportedSourceError for a global scale of 0.
        """
        if weight.form is Form.PLAIN:
            if weight.transposed:
                return self._transposed(weight, start, count)
            bits = weight.dtype.bits
            kind = numpy_dtype(weight.dtype) if bits >= 8 else np.dtype(np.uint8)  # noqa: PLR2004
            return self._read(weight.tensor, start, self._scratch.array("stored", count, kind))
        if weight.form is Form.BLOCK_FP8:
            return self._decoded(weight, start, count)
        return self._dequantized(weight, start, count)

    def global_scale(self, weight: SourceWeight) -> np.float32:
        """Return what a double-scaled weight's values are multiplied by.

        Raises: UnsupportedSourceError when it, or its inverse where that is needed, is not a finite
        number.
        """
        tensor = weight.parts[".global_scale"]
        stored = self._read(tensor, 0, np.empty(1, np.float32))[0]
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.float32(1) / stored if weight.inverse_global_scale else stored
        if not (np.isfinite(stored) and np.isfinite(scale)):
            message = (
                f"the global scale {quoted(tensor.name)} is {stored}: no weight can be scaled by it"
            )
            raise UnsupportedSourceError(message, tensor=tensor.name, path=tensor.file.path)
        return np.float32(scale)

    def _read(self, tensor: SourceTensor, start: int, array: Array) -> Array:
        """Fill the array with a tensor's elements from index ``start`` on, and return it."""
        self.readinto(tensor, start * array.itemsize, array.view(np.uint8).data)
        return array

    def _transposed(self, weight: SourceWeight, start: int, count: int) -> Array:
        """Return values of matrices that the file has as ``[cols, rows]``, where the weight is ``[rows, cols]``."""
        out = self._scratch.array("transposed", count, numpy_dtype(weight.dtype))
        for tile in tiles_of(start, count, *weight.shape[-2:]):
            strip = self._strip(weight, tile)
            out[tile.at : tile.at + tile.size].reshape(tile.shape)[:] = strip.T
        return out

    def _strip(self, weight: SourceWeight, tile: Tile) -> Array:
        """Return the values of a tile as the file has them: a line for each column, which is a part of a line there."""
        tensor, (rows, cols) = weight.tensor, weight.shape[-2:]
        height, width = tile.shape
        strip = self._scratch.array("stored", tile.size, numpy_dtype(tensor.dtype)).reshape(
            width, height
        )
        first = (tile.matrix * cols + tile.col) * rows + tile.row
        if height == rows:
            self._read(tensor, first, strip.reshape(-1))
            return strip
        reader, raw = self._reader(tensor.file), strip.reshape(-1).view(np.uint8).data
        line, begin = height * strip.itemsize, tensor.offset + first * strip.itemsize
        for number in range(width):
            reader.readinto(
                begin + number * rows * strip.itemsize, raw[number * line : (number + 1) * line]
            )
        return strip

    def _decoded(self, weight: SourceWeight, start: int, count: int) -> Array:
        codes = self._read(
            weight.tensor, start, self._scratch.array("stored", count, np.dtype(np.uint8))
        )
        out = self._scratch.array("decoded", count, numpy_dtype(DType.BF16))
        tensor = weight.parts[".scale"]
        *_, rows, cols = weight.shape
        for run in BlockRun(rows=rows, cols=cols, first=start, count=count).pieces(_BLOCK_SCALES):
            needed, place = run.scales, slice(run.first - start, run.first - start + run.count)
            scales = self._scratch.array("scales", len(needed), numpy_dtype(tensor.dtype))
            self._read(tensor, needed.start, scales)
            kernels.decode_blocks_into(codes[place], scales, out[place], run)
        return out

    def _dequantized(self, weight: SourceWeight, start: int, count: int) -> Array:
        quantization = weight.quantization
        if quantization is None:
            raise AssertionError("codes are quantized")
        arrays = {}
        for part in quantization.parts((count,), weight.parts[".scale"].dtype):
            first = start * math.prod(part.shape) // count
            scratch = self._scratch.array(part.suffix, part.shape[0], numpy_dtype(part.dtype))
            arrays[part.suffix] = self._read(weight.parts[part.suffix], first, scratch)
        scale = np.array([self.global_scale(weight)]) if ".global_scale" in weight.parts else None
        array = QuantizedArray(
            arrays[""], arrays[".scale"], arrays.get(".bias"), scale, quantization
        )
        return kernels.dequantize(array, weight.dtype)

    def _reader(self, file: SourceFile) -> SourceReader:
        with self._mutex:
            reader = self._open.get(file.path)
            if reader is None:
                reader = self._open[file.path] = file.open()
            return reader

    def check_unchanged(self) -> None:
        """Raise when a file that was read has been written to, replaced or removed meanwhile."""
        for reader in self._open.values():
            reader.check_unchanged()

    def close(self) -> None:
        """Close all files."""
        for reader in self._open.values():
            reader.close()
