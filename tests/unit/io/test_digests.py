"""Digests of several files at once: those of hashlib, or the error of each file."""

from __future__ import annotations

import hashlib
import random
import threading

import pytest

from blobstore.errors import BlobStoreError, CorruptDataError
from blobstore.io.ranges import (
    _LEAST_PIECE as PIECE,
    _TOGETHER as BUFFER,
    BytesReader,
    digests_of,
)
from blobstore.names import Digest

SIZES = (0, 1, 63, 64, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5, BUFFER + 1)
DATA = random.Random(5).randbytes(max(SIZES))


class Failing(BytesReader):
    """A reader that fails behind its first piece."""

    def readinto(self, offset: int, buffer: memoryview) -> None:
        if offset:
            raise CorruptDataError("a bad sector")
        super().readinto(offset, buffer)


@pytest.mark.parametrize("count", [1, 2, 5, len(SIZES), 20])
def test_digests(count: int) -> None:
    chosen = [DATA[: SIZES[number % len(SIZES)]] for number in range(count)]
    told: list[tuple[int, str]] = []
    names = [f"blob {number}" for number in range(count)]
    found = digests_of(
        [BytesReader(data) for data in chosen], names, progress=lambda *args: told.append(args)
    )
    assert found == [Digest(hashlib.sha256(data).hexdigest()) for data in chosen]
    for name, data in zip(names, chosen, strict=True):
        assert sum(nbytes for nbytes, blob in told if blob == name) == len(data)


def test_a_file_that_can_not_be_read_is_an_error_of_its_own() -> None:
    data = DATA
    found = digests_of([BytesReader(data), Failing(data), BytesReader(data)])
    assert found[0] == found[2] == Digest.of(data)
    assert isinstance(found[1], BlobStoreError)
    assert found[1].message == "a bad sector"


def test_nothing_is_read_after_a_stop() -> None:
    stop = threading.Event()
    told: list[int] = []

    def progress(nbytes: int, _name: str) -> None:
        told.append(nbytes)
        stop.set()

    digests_of([BytesReader(DATA)], progress=progress, stop=stop)
    assert told == [BUFFER]


def test_no_files() -> None:
    assert digests_of([]) == []
