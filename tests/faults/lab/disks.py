"""Power cuts: a file system on a recorded disk, and the disks that a cut may leave.

A disk with a write cache promises that what was written before a flush is there after it. Of what
was written since, it may keep all, nothing, or any of it: block by block, in any order. So a
recording gives as many cuts as one likes: the writes up to the last flush, and of each block
written since then one of its states.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.lab.fuse import FLUSH, MARK, RECORD, WRITE, serve
from support.mounts import NotShownError, mount

_KEPT = (0.0, 1.0, 0.5, 0.1, 0.9)
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Format:
    """A journaling file system of ``nbytes``, made by ``make``, mounted with each of ``options``.

    ``blocks``: bytes that the disk writes as a whole or not at all, one of them chosen for each
    cut. Only ext4 is made for sectors of 512 bytes: XFS does not replay its log into a block whose
    first sector is as new as the log (linux fs/xfs/xfs_buf_item_recover.c
    `xlog_recover_get_buf_lsn`), and the superblock of Btrfs has 4,096 bytes under one checksum.
    """

    name: str
    nbytes: int
    make: tuple[str, ...]
    options: tuple[str, ...]
    blocks: tuple[int, ...] = (_BLOCK,)

    def empty_image(self, path: Path) -> bytes:
        """Return the bytes of an empty file system, made at ``path``.

        Raises: NotShownError without the tool for it.
        """
        path.write_bytes(b"")
        os.truncate(path, self.nbytes)
        try:
            subprocess.run([*self.make, path], check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            raise NotShownError(f"{self.make[0]} can't make such a disk: {error}") from error
        return path.read_bytes()


FORMATS = {
    made.name: made
    for made in (
        Format(
            "ext4",
            48 * 2**20,
            (
                *("mkfs.ext4", "-q", "-F", "-b", f"{_BLOCK}", "-O", "metadata_csum"),
                *("-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"),
            ),
            ("commit=1", "commit=5", "defaults", "noauto_da_alloc,data=writeback"),
            (_BLOCK, _BLOCK, _BLOCK, 512),
        ),
        Format(
            "xfs",
            64 * 2**20,
            ("mkfs.xfs", "-q", "-f", "-K", "--unsupported"),  # smaller than 300 MB
            ("defaults", "logbsize=256k", "wsync", "allocsize=64k"),
        ),
        Format(
            "btrfs",
            112 * 2**20,
            ("mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single"),
            ("commit=1", "defaults", "notreelog", "nodatacow"),
        ),
    )
}
"""Formats by the names that mount(8) knows them by."""


@dataclass(frozen=True, slots=True)
class Event:
    """One record: ``kind`` is WRITE, FLUSH or MARK; ``data`` is a view of the recording."""

    kind: int
    offset: int
    data: memoryview


@contextmanager
def recorded(
    folder: Path, image: bytes, log: Path, kind: str, options: str
) -> Iterator[tuple[Path, Path]]:
    """Yield a mounted file system whose disk is recorded to ``log``, and the file for marks."""
    (served := folder / "served").mkdir(exist_ok=True)
    (target := folder / "mounted").mkdir(exist_ok=True)
    server = serve(image, log, served)
    try:
        with mount(kind, target, f"loop,{options}", served / "disk"):
            yield target, served / "marks"
    finally:
        subprocess.run(["umount", "-l", served], check=True)  # when the loop device lets go of it
        os.waitpid(server, 0)


def read_events(log: Path) -> list[Event]:
    """Return the records of a log."""
    events = []
    with log.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    position = 0
    while position < len(view):
        kind, offset, length = RECORD.unpack_from(view, position)
        position += RECORD.size
        events.append(Event(kind, offset, view[position : position + length]))
        position += length
    return events


class Replay:
    """The disk after so many events, moved forward only."""

    def __init__(self, image: bytes, events: Sequence[Event], blocks: Sequence[int]) -> None:
        """Start before the first event.

        ``blocks``: what the disk writes at once or not at all, one chosen for each cut.
        """
        self._blocks = blocks
        self._events = events
        self._durable = bytearray(image)
        self._flushed = 0
        self.marks: list[str] = []
        self._marked = 0

    def cut(self, position: int, moments: random.Random) -> bytearray:
        """Return a disk after a power cut between two events; ``marks`` are those before it."""
        flush = max(
            (
                index
                for index in range(self._flushed, position)
                if self._events[index].kind == FLUSH
            ),
            default=None,
        )
        if flush is not None:
            for event in self._events[self._flushed : flush]:
                if event.kind == WRITE:
                    self._durable[event.offset : event.offset + len(event.data)] = event.data
            self._flushed = flush
        for event in self._events[self._marked : position]:
            if event.kind == MARK:
                self.marks.append(bytes(event.data).decode())
        self._marked = max(self._marked, position)
        disk = bytearray(self._durable)
        pending = [event for event in self._events[self._flushed : position] if event.kind == WRITE]
        _write_some(disk, pending, moments.choice(self._blocks), moments)
        return disk


def _write_some(
    disk: bytearray, pending: Sequence[Event], size: int, moments: random.Random
) -> None:
    """Write either nothing or one of its states of each block, with one of several chances.

    The first block is written as a whole: a torn superblock of ext4 can't be mounted, and needs the
    repair that a machine does at its start (e2fsck).
    """
    kept = moments.choice(_KEPT)
    states: dict[int, list[memoryview]] = defaultdict(list)
    for event in pending:
        whole = _BLOCK if event.offset < _BLOCK else size
        for start in range(0, len(event.data), whole):
            states[event.offset + start].append(event.data[start : start + whole])
    for offset, data in states.items():
        if moments.random() < kept:
            chosen = data[-1] if kept == 1 else moments.choice(data)
            disk[offset : offset + len(chosen)] = chosen
