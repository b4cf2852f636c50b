"""Parts of files that are written in one call."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.io import _native, durable

LIMITED = """
import resource, sys
from blobstore.io._native import write_parts
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with open(sys.argv[1], "wb") as file:
    try:
        write_parts([(file.fileno(), 0, b"a" * 600), (file.fileno(), 600, b"b" * 600)])
    except OSError as error:
        sys.exit(error.errno)
"""


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def test_all_parts_are_written(tmp_path: Path, fd: int) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    _native.write_parts([(fd, 4, b"efg"), (other, 0, b"z"), (fd, 2**32, b""), (fd, 0, b"abcd")])
    os.close(other)
    assert (tmp_path / "file").read_bytes() == b"abcdefg"
    assert (tmp_path / "other").read_bytes() == b"z"


def test_a_write_of_a_part_of_the_bytes_goes_on(tmp_path: Path) -> None:
    """The system writes up to the limit of a file's size, and fails then."""
    path = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", LIMITED, path], check=False)
    assert done.returncode == errno.EFBIG
    assert path.read_bytes() == b"a" * 600 + b"b" * 400


def test_the_first_error_ends_it_and_releases_all_memory(tmp_path: Path, fd: int) -> None:
    parts = [bytearray(b"a"), bytearray(b"b"), bytearray(b"c")]
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        _native.write_parts([(fd, 0, parts[0]), (-1, 0, parts[1]), (fd, 1, parts[2])])
    assert caught.value.errno == errno.EBADF
    assert (tmp_path / "file").read_bytes() == b"a"
    for part in parts:
        part.clear()  # fails while something holds its memory


@pytest.mark.parametrize(
    "part",
    [(0, 0), (0, 0, "text"), ("0", 0, b""), (0, 2**64, b""), (0, 0, memoryview(b"abc")[::2])],
)
def test_what_is_not_a_part_is_refused(part: tuple[int, int, bytes]) -> None:
    with pytest.raises((TypeError, ValueError, BufferError, RuntimeError, OverflowError)):
        _native.write_parts([part])


def test_where_the_page_cache_can_not_be_passed_it_is_used(
    tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open a file with O_DIRECT, and then refuse to write (EINVAL)."""
    real = _native.write_parts

    def write_parts(parts: list[tuple[int, int, memoryview]]) -> None:
        if any(part[0] == direct for part in parts):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(parts)

    monkeypatch.setattr(_native, "write_parts", write_parts)
    monkeypatch.setattr(durable, "DIRECT_FROM", 1)
    direct = os.dup(fd)
    data = memoryview(bytes(range(256)) * 64)
    durable.write_aligned(fd, direct, 100, data, [(20_000, b"beside")])
    os.close(direct)
    found = (tmp_path / "file").read_bytes()
    assert (found[100 : 100 + len(data)], found[20_000:]) == (bytes(data), b"beside")
    with pytest.raises(OSError, match="Invalid argument"):
        durable.write_aligned(fd, -1, -5, data)
