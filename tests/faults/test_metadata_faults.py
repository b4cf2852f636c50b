"""Killed or failing edits of metadata: the file has the old metadata or the new, complete.

The calls are counted in an undisturbed run; then each is made to kill the process or to fail,
through strace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from support.checkpoints import raw_safetensors
from support.faults import CLEANING, MUTATING, calls, file_system, leave_room, remount, run, strace

import blobstore

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux"),
]
DATA = bytes(range(256)) * 40
OLD = {"k": "o" * 2000, "other": "1"}
VALUES = {
    "one sector": "o" * 1990 + "n" * 10,
    "several sectors": "n" * 2000,
    "longer header": "n" * 9000,
}
"""What ``k`` becomes; each takes another way to the disk."""


class Case:
    """A file, and an edit of it."""

    def __init__(self, folder: Path, way: str) -> None:
        """Write the file to ``folder``."""
        self.folder, self.way = folder, way
        self.new = {**OLD, "k": VALUES[way]}
        self.original = folder / "original"
        entry = '"x":{"dtype":"U8","shape":[10240],"data_offsets":[0,10240]}'
        metadata = json.dumps(OLD, separators=(",", ":"))
        self.original.write_bytes(
            raw_safetensors(f'{{"__metadata__":{metadata},{entry}}}'.ljust(3000).encode(), DATA)
        )
        self._number = 0

    def file(self) -> Path:
        """Return a new copy of the file in a folder of its own."""
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        return Path(shutil.copy(self.original, folder / "m.safetensors"))

    def run(self, file: Path, *rules: str) -> subprocess.CompletedProcess[str]:
        """Edit ``file`` under strace, with faults by ``rules``."""
        return run(
            "metadata", "set", file, "k", self.new["k"], prefix=strace(self.folder / "log", *rules)
        )

    def points(self) -> list[tuple[str, int]]:
        """Return every call of an undisturbed run that changes the disk."""
        file = self.file()
        done = self.run(file)
        assert (done.returncode, done.stderr) == (0, "")
        assert self.check(file)
        counts = calls(self.folder / "log")
        assert ("copy_file_range" in counts) == (self.way != "one sector")
        assert counts["pwrite64"] == 1
        return [
            (name, number)
            for name in (*MUTATING, *CLEANING)
            for number in range(1, counts.get(name, 0) + 1)
        ]

    def check(self, file: Path) -> bool:
        """Assert that the file is sound, for others and for us.

        Return whether it has the new metadata.
        """
        with safe_open(file, "np") as opened:  # before anything of ours has looked at it
            found = opened.metadata()
            assert opened.get_tensor("x").tobytes() == DATA
        assert found in (OLD, self.new)
        assert blobstore.read_metadata(file) == found
        return bool(found == self.new)

    def check_again(self, file: Path) -> None:
        """Assert that a second edit succeeds and leaves nothing beside the file."""
        blobstore.edit_metadata(file, {"k": self.new["k"]})
        assert self.check(file)
        assert [path for path in file.parent.iterdir() if not path.name.endswith("-new")] == [file]


ALL = [pytest.param(way, None, marks=pytest.mark.long) for way in VALUES]
LAST = {way: ("fsync", 1 if way == "one sector" else 2) for way in VALUES}
"""The last call of each way: the new metadata are there, but may be lost in a power cut."""


@pytest.mark.parametrize(
    ("way", "points"),
    [
        ("one sector", [("pwrite64", 1), ("fsync", 1)]),
        ("several sectors", [("pwrite64", 1), LAST["several sectors"]]),
        ("longer header", [("copy_file_range", 1), LAST["longer header"]]),
        *ALL,
    ],
)
def test_killed_at_a_system_call(
    tmp_path: Path, way: str, points: list[tuple[str, int]] | None
) -> None:
    case = Case(tmp_path, way)
    seen = set()
    for name, number in points or case.points():
        file = case.file()
        done = case.run(file, f"{name}:signal=SIGKILL:when={number}")
        assert done.returncode == -9, (name, number, done.stderr)
        seen.add(case.check(file))
        case.check_again(file)
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("way", "points"), [("one sector", [("fsync", 1)]), ("several sectors", [("fsync", 1)]), *ALL]
)
def test_a_failing_system_call_is_an_error(
    tmp_path: Path, way: str, points: list[tuple[str, int]] | None
) -> None:
    case = Case(tmp_path, way)
    for name, number in points or case.points():
        if name in ("unlink", "write", "flock"):
            continue
        file = case.file()
        done = case.run(file, f"{name}:error=EIO:when={number}")
        assert (done.returncode, done.stdout) == (1, ""), (name, number)
        assert done.stderr.startswith("Error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert case.check(file) == ((name, number) == LAST[way] and way != "one sector"), (
            name,
            number,
        )
        case.check_again(file)


@pytest.mark.parametrize(
    "way", ["several sectors", *(pytest.param(way, marks=pytest.mark.long) for way in VALUES)]
)
def test_a_full_disk(tmp_path: Path, way: str) -> None:
    case = Case(tmp_path, way)
    with file_system(tmp_path / "disk", "size=16m,nr_inodes=1000") as mount:
        file = Path(shutil.copy(case.original, mount / "m.safetensors"))
        leave_room(mount, blocks=0)
        done = run("metadata", "set", file, "k", case.new["k"])
        if way == "one sector":  # which takes no space
            assert (done.returncode, done.stderr) == (0, "")
            assert case.check(file)
        else:
            assert (done.returncode, done.stdout) == (1, "")
            assert "no space left on device" in done.stderr
            assert not case.check(file)
        assert list(mount.iterdir()) == [file]


def test_a_read_only_file_system(tmp_path: Path) -> None:
    case = Case(tmp_path, "several sectors")
    with file_system(tmp_path / "disk", "size=16m") as mount:
        file = Path(shutil.copy(case.original, mount / "m.safetensors"))
        remount(mount, "ro")
        done = run("metadata", "set", file, "k", "v")
        assert (done.returncode, done.stdout) == (1, "")
        assert "read-only file system" in done.stderr
        assert blobstore.read_metadata(file) == OLD
