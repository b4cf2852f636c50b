"""Parts of a matrix's lines are those of the file, whatever was read before."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.errors import ShortReadError
from blobstore.source.coding import Bands, Region
from blobstore.source.folders import SourceTensor

Array = np.ndarray[Any, Any]


class File:
    """A matrix of random bytes as the one tensor of a file; ``nbytes`` were read of it."""

    tensor: Any = SimpleNamespace(file=SimpleNamespace(path="f"), offset=8)

    def __init__(self, lines: int, line: int) -> None:
        self.bytes = np.random.default_rng(line).integers(0, 256, (lines, line), dtype=np.uint8)
        self.nbytes = 0

    def read(self, _tensor: SourceTensor, start: int, out: Array) -> None:
        out[:] = self.bytes.reshape(-1)[start : start + out.size]
        self.nbytes += out.size

    def check(self, bands: Bands, first: int, stop: int, begin: int, end: int) -> None:
        out = np.empty((stop - first, end - begin), np.uint8)
        bands.fill(self.tensor, Region("", self.bytes.shape[1], first, stop, begin, end), out)
        np.testing.assert_array_equal(out, self.bytes[first:stop, begin:end])


# Short lines are read together, and pieces of long ones each by itself.
@pytest.mark.parametrize(("lines", "line"), [(1, 64), (50, 40), (9, 5000), (7, 40_000)])
def test_parts_in_any_order_and_by_many_threads(lines: int, line: int) -> None:
    file = File(lines, line)
    bands = Bands(file.read, {64: 2, 4096: 2})
    columns = np.sort(np.random.default_rng(lines).integers(0, line + 1, (300, 2)))
    ranges = [(0, lines), (0, -(-lines // 2)), (lines // 2, lines)]

    def check(number: int) -> None:
        begin, end = map(int, columns[number])
        if begin < end:
            file.check(bands, *ranges[number % 3], begin, end)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(len(columns))))


def test_rows_that_follow_each_other_are_read_once() -> None:
    file = File(16, 40_000)
    bands = Bands(file.read, {2**14: 2})
    for begin in range(0, 40_000, 50):
        file.check(bands, 0, 16, begin, begin + 50)
    assert file.nbytes == file.bytes.size


def test_a_band_that_could_not_be_read_is_read_again() -> None:
    file, failed = File(4, 100), iter([ShortReadError("cut")])

    def read(tensor: SourceTensor, start: int, out: Array) -> None:
        for error in failed:
            raise error
        file.read(tensor, start, out)

    bands = Bands(read, {2**14: 1})
    with pytest.raises(ShortReadError):
        file.check(bands, 0, 4, 10, 20)
    file.check(bands, 0, 4, 10, 20)
