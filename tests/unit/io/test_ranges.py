"""Readers that are made of others, and the digests of several of them at once."""

import hashlib
import random
from functools import partial

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import CorruptDataError, ShortReadError
from blobstore.io.ranges import BytesReader, JoinedReader, Segment, digests_of
from blobstore.names import Digest


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
