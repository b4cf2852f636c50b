"""CRC-32: the checksums of zlib, for any length, place in memory and number of pieces."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import numpy as np
import pytest

from blobstore import hashing

DATA = random.Random(1).randbytes(2**17)
LENGTHS = [*range(300), 1023, 4096, 65_537, 2**17 - 16]


@pytest.mark.parametrize("begin", [0, 1, 7, 15])
def test_it_is_that_of_zlib(begin: int) -> None:
    for length in LENGTHS:
        piece = DATA[begin : begin + length]
        assert hashing.crc32([piece]) == zlib.crc32(piece), length


@pytest.mark.parametrize("crc", [1, 0x80000000, 0xFFFFFFFF])
def test_it_goes_on_behind_other_bytes(crc: int) -> None:
    for length in LENGTHS:
        assert hashing.crc32([DATA[:length]], crc) == zlib.crc32(DATA[:length], crc), length


def test_pieces_are_one_stream() -> None:
    chance = random.Random(2)
    for _ in range(200):
        cuts = sorted(chance.choices(range(2000), k=chance.randrange(6)))
        bounds = [0, *cuts, 2000]
        pieces = [DATA[begin:end] for begin, end in pairwise(bounds)]
        assert hashing.crc32(pieces) == zlib.crc32(DATA[:2000]), cuts


def test_no_bytes_change_nothing() -> None:
    assert (hashing.crc32([]), hashing.crc32([], 7), hashing.crc32([b"", b""], 7)) == (0, 7, 7)


def test_any_memory_is_taken_and_given_back() -> None:
    data = bytearray(DATA[:100])
    array = np.frombuffer(DATA, np.uint8)
    assert hashing.crc32([data, array.data]) == zlib.crc32(DATA, zlib.crc32(data))
    data.clear()  # fails while something holds its memory
    with pytest.raises(TypeError):
        hashing.crc32([bytearray(1), "text"])  # type: ignore[list-item]
    with pytest.raises(BufferError):
        hashing.crc32([memoryview(DATA)[::2]])
