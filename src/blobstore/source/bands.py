"""Bands: bytes of each of a matrix's lines, of which some rows of the model need a few.

Where a matrix lies with its inputs first, a row of outputs has a little of every line, and next to
it the following rows have theirs. To read these pieces one by one takes a system call for each, and
to read whole lines for each run of rows reads the matrix over and over. So a band, of many rows, is
read at once and kept, and the next rows are copied from it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from blobstore.kernels.arrays import Array
from blobstore.source.coding import Region
from blobstore.source.folders import SourceTensor

_SIZES = MappingProxyType({2**18: 6, 6 * 2**20: 2})
# A band holds the bytes of so many runs of rows, unless no band is that large.
_ROOM = 8
_STRIP, _GAP = 2**18, 2**14
"""Whole lines are read together if at most that much of each is not needed.

Copying 16 KiB takes as long as a call from Python, 3 us (AMD EPYC).
"""


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
