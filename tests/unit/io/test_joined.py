"""Several readers read as one."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import ShortReadError
from blobstore.io.ranges import BytesReader, JoinedReader, OpenReader, Segment
from blobstore.names import Digest


class Counted(BytesReader):
    opened: list[bytes] = []  # noqa: RUF012
    closed: list[bytes] = []  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        super().__init__(data, "part")
        self.opened.append(data)

    def close(self) -> None:
        self.closed.append(bytes(self._data))


def joined(parts: list[bytes]) -> JoinedReader:
    return JoinedReader(
        "joined", [Segment(len(data), partial(BytesReader, data)) for data in parts]
    )


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 40), st.integers(0, 40))
def test_ranges(parts: list[bytes], begin: int, length: int) -> None:
    whole, reader = b"".join(parts), joined(parts)
    assert reader.size == len(whole)
    if begin + length <= len(whole):
        assert reader.read(begin, length) == whole[begin : begin + length]
    else:
        with pytest.raises(ShortReadError):
            reader.read(begin, length)
    assert reader.digest() == Digest.of(whole)


def test_a_part_begins_at_its_offset() -> None:
    parts = [Segment(2, partial(BytesReader, b"abcde"), offset) for offset in (3, 0, 1)]
    assert JoinedReader("joined", parts).read(1, 5) == b"eabbc"


def test_parts_are_opened_once_and_closed() -> None:
    Counted.opened.clear()
    Counted.closed.clear()
    texts = [b"one", b"", b"two", b"three"]
    with JoinedReader(
        "x", [Segment(len(text), partial(Counted, text)) for text in texts]
    ) as reader:
        for offset in range(reader.size):
            reader.read(offset, 1)
        assert Counted.opened == [b"one", b"two", b"three"]
        assert Counted.closed == [b"one", b"two"]
    reader.close()
    assert Counted.closed == Counted.opened


def test_memory_is_read_as_bytes() -> None:
    reader: OpenReader = BytesReader(memoryview(b"abcdefgh").cast("I"), "memory")
    assert (reader.size, reader.read(2, 3)) == (8, b"cde")
    for read in (lambda: reader.read(6, 3), lambda: reader.readinto(8, memoryview(bytearray(1)))):
        with pytest.raises(ShortReadError):
            read()
