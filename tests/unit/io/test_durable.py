"""Durable file operations, where a file system or the kernel does less than usual."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import StorageError
from blobstore.io import _native, durable


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system of the kernel's own")
def test_syncfs_is_trusted_only_where_it_is_known_to_sync() -> None:
    """On FUSE it does nothing: then, and on any unknown one, each file is synced by itself."""
    number = os.open("/proc/self", os.O_RDONLY)
    assert not durable.syncs_whole(number)
    os.close(number)


def test_half_a_write_goes_on(tmp_path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        return real(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    durable.write_all_at(fd, 3, memoryview(b"0123456789"))
    assert (tmp_path / "file").read_bytes() == b"\0\0\x000123456789"


def test_another_mount_of_the_same_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bind mount of the same file system: only a rename shows it."""

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StorageError, match="same file system"):
        durable.check_one_mount(tmp_path, tmp_path)


def test_a_file_gets_its_size_before_anything_is_written(tmp_path: Path, fd: int) -> None:
    durable.reserve(fd, 100_000)
    assert (tmp_path / "file").stat().st_size == 100_000
    with pytest.raises(OSError, match=r"No space|too large|Invalid"):
        durable.reserve(fd, 2**62)


# Parts of files that are written in one call


def test_all_parts_are_written(tmp_path: Path, fd: int) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    _native.write_parts([(fd, 4, b"efg"), (other, 0, b"z"), (fd, 2**32, b""), (fd, 0, b"abcd")])
    os.close(other)
    assert (tmp_path / "file").read_bytes() == b"abcdefg"
    assert (tmp_path / "other").read_bytes() == b"z"


def test_a_write_of_a_part_of_the_bytes_goes_on(tmp_path: Path, fd: int) -> None:
    """The system writes up to the limit of a file's size, and fails then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            _native.write_parts([(fd, 0, b"a" * 600), (fd, 600, b"b" * 600)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").read_bytes() == b"a" * 600 + b"b" * 400


def test_the_first_error_ends_it_and_releases_all_memory(tmp_path: Path, fd: int) -> None:
    parts = [bytearray(b"a"), bytearray(b"b"), bytearray(b"c")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.write_parts([(fd, 0, parts[0]), (-1, 0, parts[1]), (fd, 1, parts[2])])
    assert (tmp_path / "file").read_bytes() == b"a"
    for part in parts:
        part.clear()  # fails while something holds its memory


@pytest.mark.parametrize("part", [(0, 0), (0, 0, "text"), (0, 2**64, b"")])
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
