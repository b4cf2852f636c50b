"""A killed or failing export leaves the whole folder or no folder, and never claims success.

The calls are counted in an undisturbed run; then each is made to kill the process or to fail,
through strace.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.exports import raw_tensors
from support.faults import (
    CLEANING,
    MUTATING,
    READING,
    calls,
    file_system,
    leave_room,
    remount,
    run,
    strace,
)

import blobstore
from blobstore.errors import StorageError
from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux"),
]
ALL = pytest.param(None, marks=pytest.mark.long, id="all")
LAST = ("fsync", 6)
"""The sync of the new folder's parent, after those of four files and the folder."""


class Case:
    """A stored model, exported into new folders as two shards."""

    def __init__(self, store: Store, folder: Path) -> None:
        """Import a small model."""
        self.store, self.folder = store, folder
        self.source = write_checkpoint(folder / "in")
        blobstore.import_model(self.source, "m", store=store)
        blobstore.export_model("m", folder / "wanted", store=store, max_shard_size=50_000)
        self.wanted = files_of(folder / "wanted")
        assert len(self.wanted) == 4
        self._number = 0

    def target(self) -> Path:
        """Return a folder that does not exist, in one of its own."""
        self._number += 1
        (self.folder / str(self._number)).mkdir()
        return self.folder / str(self._number) / "out"

    def run(self, target: Path, *rules: str) -> tuple[int, str]:
        """Export under strace, with faults by ``rules``.

        Return the exit code and what was printed.
        """
        options = ["--max-shard-size", 50_000, "--jobs", 1, "--store", self.store.root]
        done = run("export", "m", target, *options, prefix=strace(self.folder / "log", *rules))
        assert done.returncode == 0 or done.stdout == ""
        return done.returncode, done.stderr

    def points(self) -> list[tuple[str, int]]:
        """Return every call of an undisturbed run that changes the disk."""
        target = self.target()
        assert self.run(target) == (0, "")
        assert self.check(target)
        counts = calls(self.folder / "log")
        return [
            (name, number)
            for name in (*MUTATING, *CLEANING)
            for number in range(1, counts.get(name, 0) + 1)
        ]

    def check(self, target: Path) -> bool:
        """Assert that the folder is whole or not there; return whether it is there."""
        assert not target.exists() or files_of(target) == self.wanted
        return target.exists()

    def check_again(self, target: Path) -> None:
        """Assert that an export elsewhere succeeds, and into this folder if it is missing."""
        if not target.exists():
            blobstore.export_model("m", target, store=self.store, max_shard_size=50_000)
        assert self.check(target)
        assert list(target.parent.iterdir()) == [target]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("points", [[("copy_file_range", 2), LAST], ALL])
def test_killed_at_a_system_call(
    store: Store, tmp_path: Path, points: list[tuple[str, int]] | None
) -> None:
    case = Case(store, tmp_path)
    seen = set()
    for name, number in points or case.points():
        target = case.target()
        assert case.run(target, f"{name}:signal=SIGKILL:when={number}")[0] == -9, (name, number)
        seen.add(case.check(target))
        case.check_again(target)
    assert seen == {False, True}


@pytest.mark.parametrize("points", [[("copy_file_range", 3)], ALL])
def test_a_failing_system_call_is_an_error(
    store: Store, tmp_path: Path, points: list[tuple[str, int]] | None
) -> None:
    case = Case(store, tmp_path)
    for name, number in points or case.points():
        if name in ("flock", "write", *CLEANING):
            continue
        target = case.target()
        code, error = case.run(target, f"{name}:error=EIO:when={number}")
        assert (code, error.count("\n")) == (1, 1), (name, number, error)
        assert error.startswith("Error: "), error
        assert case.check(target) == ((name, number) == LAST), (name, number)
        assert target.exists() or list(target.parent.iterdir()) == [], (name, number)
        case.check_again(target)


def test_without_copy_file_range_bytes_are_read_and_written(store: Store, tmp_path: Path) -> None:
    case = Case(store, tmp_path)
    read = []
    for rule in ([], ["copy_file_range:error=ENOSYS"]):
        target = case.target()
        assert case.run(target, *rule) == (0, "")
        assert case.check(target)
        read.append(sum(calls(tmp_path / "log").get(name, 0) for name in READING))
    assert read[0] == 0 < read[1]


def test_a_full_disk(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "in"), "m", store=store)
    with file_system(tmp_path / "disk", "size=16m,nr_inodes=1000") as mount:
        for blocks in (1, 2, 10):  # a document, a header, half of the data
            leave_room(mount, blocks=blocks)
            with pytest.raises(StorageError, match="no space left on device"):
                blobstore.export_model("m", mount / "out", store=store)
            assert list(mount.iterdir()) == []
        leave_room(mount, blocks=30)
        blobstore.export_model("m", mount / "out", store=store)
        assert raw_tensors(mount / "out") == raw_tensors(tmp_path / "in")
        remount(mount, "ro")
        with pytest.raises(StorageError, match="read-only file system"):
            blobstore.export_model("m", mount / "other", store=store)
