"""Durable file operations, where a file system or the kernel does less than usual."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model

from blobstore.errors import StorageError
from blobstore.io import durable as files
from blobstore.names import ModelName
from blobstore.store.local.store import Store

FUSE, NFS, EXT4 = 0x65735546, 0x6969, 0xEF53


@pytest.mark.parametrize(
    ("kind", "is_trusted"),
    [(FUSE, False), (NFS, False), (0x12345678, False), (None, False), (EXT4, True)],
)
def test_syncfs_is_trusted_where_it_is_known_to_sync(
    monkeypatch: pytest.MonkeyPatch, kind: int | None, is_trusted: bool
) -> None:
    """On FUSE it does nothing: then every file has to be synced by itself."""
    monkeypatch.setattr(files, "_file_system", lambda _fd: kind)
    assert files.syncs_whole(0) is is_trusted


def test_a_write_of_half_the_bytes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda fd, data, offset: real(fd, bytes(data)[: max(1, len(data) // 2)], offset),
    )
    fd = files.create_file(tmp_path / "file")
    files.write_all_at(fd, 3, memoryview(b"0123456789"))
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"\0\0\x000123456789"


def test_a_folder_on_another_mount_with_the_same_device_number_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bind mount of the same file system: only a rename tells."""

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StorageError, match="is on another file system than"):
        files.check_one_mount(tmp_path, tmp_path)


def test_a_blob_of_an_old_ollama_is_removed_with_its_model(store: Store) -> None:
    """The first Ollamas called it ``sha256:…``."""
    commit_model(store, "m", b"one")
    new = blob_path(store, b"one")
    old = new.rename(new.with_name(new.name.replace("-", ":")))
    assert [
        blob.size for blob in store.remove(ModelName.parse("m")).removed if blob.size == len(b"one")
    ] == [3]
    assert not old.exists()


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
    ("codes", "has_place"),
    [
        ([], True),
        ([errno.EINTR, errno.EINTR], True),
        ([errno.EOPNOTSUPP], False),
        ([errno.EINTR, errno.ENOSYS], False),
        (None, False),
    ],
)
def test_a_file_gets_its_size_and_its_place_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int] | None, *, has_place: bool
) -> None:
    monkeypatch.setattr(files, "_libc", None if codes is None else Refusing(*codes))
    fd = files.create_file(tmp_path / "file")
    files.reserve(fd, 100_000)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == 100_000
    assert (512 * status.st_blocks >= 100_000) is has_place
    assert (tmp_path / "file").read_bytes() == bytes(100_000)


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_libc", Refusing(errno.ENOSPC))
    fd = files.create_file(tmp_path / "file")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        files.reserve(fd, 100_000)
    os.close(fd)
    assert caught.value.errno == errno.ENOSPC
