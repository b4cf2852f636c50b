"""One store by two mounts: as on NFS, locks on files are shared, those on folders are not."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores import commit_model

from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
BINDFS = ("bindfs", "--multithreaded", "--enable-lock-forwarding")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """The same store, as two machines see it."""
    shared, *mounts = (tmp_path / name for name in ("shared", "a", "b"))
    for folder in (shared, *mounts):
        folder.mkdir()
    try:
        for mount in mounts:
            if subprocess.run([*BINDFS, shared, mount], check=False).returncode:
                pytest.skip("bindfs can't mount here: there is no FUSE")
        assert locks(mounts, "file", os.O_RDWR | os.O_CREAT) == 1
        assert locks(mounts, "", os.O_RDONLY) == 2  # otherwise the tests would show nothing
        yield Store(mounts[0]), Store(mounts[1])
    finally:
        for mount in mounts:
            subprocess.run(["umount", mount], check=False)


def locks(mounts: list[Path], name: str, flags: int) -> int:
    """Return how many mounts have a lock on the same file at once."""
    opened = [os.open(mount / name, flags) for mount in mounts]
    try:
        for count, fd in enumerate(opened):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return count
        return len(opened)
    finally:
        for fd in opened:
            os.close(fd)


def test_a_session_is_not_taken_for_one_of_a_killed_import(hosts: tuple[Store, Store]) -> None:
    here, there = hosts
    with here.session() as session:
        made: list[Any] = []
        writer = session.writer(2, made.append)
        writer.put(0, b"a")
        commit_model(there, "of-another-machine", b"x")  # cleans up what killed imports left
        writer.put(1, b"b")
        (blob,) = made
        assert blob.path.read_bytes() == b"ab"
