"""Durable file operations, where a file system or the kernel does less than usual."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from blobstore.errors import StorageError
from blobstore.io import durable

FUSE, NFS, UNKNOWN, EXT4 = 0x65735546, 0x6969, 0x12345678, 0xEF53


def test_syncfs_is_trusted_where_it_is_known_to_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """On FUSE it does nothing: then every file has to be synced by itself."""
    trusted = {}
    for kind in (FUSE, NFS, UNKNOWN, None, EXT4):
        monkeypatch.setattr(durable, "_file_system", lambda _fd, kind=kind: kind)
        trusted[kind] = durable.syncs_whole(0)
    assert trusted == {FUSE: False, NFS: False, UNKNOWN: False, None: False, EXT4: True}


def test_a_write_of_half_the_bytes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        return real(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    fd = durable.create_file(tmp_path / "file")
    durable.write_all_at(fd, 3, memoryview(b"0123456789"))
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"\0\0\x000123456789"


def test_a_folder_on_another_mount_of_the_same_device_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bind mount of the same file system: only a rename shows it."""

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StorageError, match="is on another file system than"):
        durable.check_one_mount(tmp_path, tmp_path)


class Refusing:
    """A C library whose fallocate fails with these error numbers, one after the other."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def fallocate(self, fd: int, _mode: int, start: ctypes.c_int64, size: ctypes.c_int64) -> int:
        if not self.codes:
            os.posix_fallocate(fd, start.value, size.value)
            return 0
        ctypes.set_errno(self.codes.pop(0))
        return -1


@pytest.mark.parametrize(
    ("library", "has_blocks"),
    [
        (Refusing(errno.EINTR, errno.EINTR), True),
        (Refusing(errno.EOPNOTSUPP), False),
        (None, False),
    ],
    ids=["interrupted", "not supported", "no fallocate"],
)
def test_a_file_gets_its_size_and_its_blocks_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Refusing | None, has_blocks: bool
) -> None:
    monkeypatch.setattr(durable, "_libc", library)
    fd = durable.create_file(tmp_path / "file")
    durable.reserve(fd, 100_000)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == 100_000
    assert (512 * status.st_blocks >= 100_000) is has_blocks


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_libc", Refusing(errno.ENOSPC))
    fd = durable.create_file(tmp_path / "file")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        durable.reserve(fd, 100_000)
    os.close(fd)
