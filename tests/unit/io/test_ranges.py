"""Readers that are made of others, and the digests of several of them at once."""

from __future__ import annotations

import hashlib
import random
import threading
from functools import partial

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import CorruptDataError, ShortReadError
from blobstore.io.ranges import BytesReader, JoinedReader, Segment, digests_of
from blobstore.names import Digest


class Counted(BytesReader):
    """Bytes that note in a list when they are opened and closed."""

    def __init__(self, data: bytes, events: list[str]) -> None:
        super().__init__(data, "part")
        self._events = events
        events.append(f"open {data.decode()}")

    def close(self) -> None:
        self._events.append(f"close {bytes(self._data).decode()}")


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 40), st.integers(0, 40))
def test_a_joined_reader_reads_its_parts_as_one(
    parts: list[bytes], begin: int, length: int
) -> None:
    whole = b"".join(data[len(data) // 2 :] for data in parts)
    segments = [
        Segment(len(data) - len(data) // 2, partial(BytesReader, data), len(data) // 2)
        for data in parts
    ]
    reader = JoinedReader("joined", segments)
    assert reader.size == len(whole)
    if begin + length <= len(whole):
        assert reader.read(begin, length) == whole[begin : begin + length]
    else:
        with pytest.raises(ShortReadError):
            reader.read(begin, length)
    assert reader.digest() == Digest.of(whole)


def test_parts_are_opened_when_they_are_read_and_closed_after_it() -> None:
    events: list[str] = []
    segments = [
        Segment(len(text), partial(Counted, text, events)) for text in (b"one", b"", b"two")
    ]
    with JoinedReader("x", segments) as reader:
        for offset in range(reader.size):
            reader.read(offset, 1)
    assert events == ["open one", "close one", "open two", "close two"]


# Digests

DATA = random.Random(5).randbytes(3_000_001)


def test_digests_of_files_of_any_size_are_those_of_hashlib() -> None:
    sizes = (0, 1, 64, 2**18 + 1, len(DATA))
    names = [f"blob {size}" for size in sizes]
    seen: list[tuple[int, str]] = []
    found = digests_of(
        [BytesReader(DATA[:size]) for size in sizes],
        names,
        progress=lambda nbytes, name: seen.append((nbytes, name)),
    )
    assert found == [Digest(hashlib.sha256(DATA[:size]).hexdigest()) for size in sizes]
    for name, size in zip(names, sizes, strict=True):
        assert sum(nbytes for nbytes, blob in seen if blob == name) == size
    assert digests_of([]) == []


def test_a_file_that_can_not_be_read_is_an_error_of_its_own() -> None:
    class Failing(BytesReader):
        def readinto(self, offset: int, buffer: memoryview) -> None:
            if offset:
                raise CorruptDataError("a bad sector")
            super().readinto(offset, buffer)

    first, failed, last = digests_of([BytesReader(DATA), Failing(DATA), BytesReader(DATA)])
    assert first == last == Digest.of(DATA)
    assert isinstance(failed, CorruptDataError)


def test_no_digest_reads_on_after_a_stop() -> None:
    stop = threading.Event()
    pieces: list[int] = []

    def progress(nbytes: int, _name: str) -> None:
        pieces.append(nbytes)
        stop.set()

    digests_of([BytesReader(DATA)], progress=progress, stop=stop)
    assert len(pieces) == 1
    assert pieces[0] < len(DATA)
