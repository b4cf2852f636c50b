"""Power cuts: a file system on a recorded disk, and the disks that a power cut at any moment may leave of it.

A disk with a write cache promises that what was written before a flush is there after it. Of what was written since, it
may keep all, nothing, or any of it: block by block, in any order. So a recording gives as many cuts as one likes: the writes
up to the last flush, and of each block written since then one of its states.

Where a block is a sector of 512 bytes, ext4's own superblock may be torn: it lies in two sectors under one checksum, which
the mount checks before it replays the journal. A machine repairs that at its start, from the superblock's backup, and so
does `repair_superblock`.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.lab.figures import NotShownError
from support.lab.fuse import FLUSH, MARK, RECORD, WRITE, serve
from support.lab.mounts import mount

_SIZE = 48 * 2**20
_BLOCK = 4096
_GROUP = 8192  # blocks: a second group, and with it a backup of the superblock, on a disk this small
_SUPERBLOCK = slice(1024, 2048)
_CRC32C = 0x82F63B78
_BLOCKS = (4096, 4096, 4096, 512)
_KEPT = (0.0, 1.0, 0.5, 0.1, 0.9)


@dataclass(frozen=True, slots=True)
class Event:
    """One record: ``kind`` is WRITE, FLUSH or MARK; ``data`` is a view of the recording."""

    kind: int
    offset: int
    data: memoryview


def empty_image(path: Path) -> bytes:
    """Return the bytes of an empty ext4 file system, made at ``path``. Raises: NotShownError without mkfs.ext4."""
    path.write_bytes(b"")
    os.truncate(path, _SIZE)
    shape = ["-b", f"{_BLOCK}", "-g", f"{_GROUP}", "-O", "metadata_csum", "-J", "size=4"]
    line = ["mkfs.ext4", "-q", "-F", *shape, "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", path]
    try:
        subprocess.run(line, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise NotShownError("mkfs.ext4 is not installed") from error
    return path.read_bytes()


def has_torn_superblock(disk: bytes | bytearray) -> bool:
    """Return True when the superblock is not the one of its checksum (linux fs/ext4/super.c ext4_superblock_csum)."""
    *data, stored = struct.unpack("<1020BI", disk[_SUPERBLOCK])
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum >> 1 ^ (_CRC32C if checksum & 1 else 0)
    return checksum != stored


def repair_superblock(path: Path) -> None:
    """Repair a disk by the backup of its superblock, and nothing that would need a decision (e2fsck -p)."""
    subprocess.run(["e2fsck", "-p", "-b", f"{_GROUP}", "-B", f"{_BLOCK}", path], check=False, capture_output=True)


@contextmanager
def recorded(folder: Path, image: bytes, log: Path, options: str) -> Iterator[tuple[Path, Path]]:
    """Yield a mounted file system whose disk is recorded to ``log``, and the file that takes marks."""
    (served := folder / "served").mkdir(exist_ok=True)
    (target := folder / "mounted").mkdir(exist_ok=True)
    server = serve(image, log, served)
    try:
        with mount("ext4", target, f"loop,{options}", served / "disk"):
            yield target, served / "marks"
    finally:
        subprocess.run(["umount", served], check=True)
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

    def __init__(self, image: bytes, events: Sequence[Event]) -> None:
        """Start before the first event."""
        self._events = events
        self._durable = bytearray(image)
        self._flushed = 0
        self.marks: list[str] = []
        self._marked = 0

    def cut(self, position: int, moments: random.Random) -> bytearray:
        """Return a disk as it may be found after a power cut between two events; ``marks`` are those before it."""
        flush = max((index for index in range(self._flushed, position) if self._events[index].kind == FLUSH), default=None)
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
        _write_some(disk, pending, moments)
        return disk


def _write_some(disk: bytearray, pending: Sequence[Event], moments: random.Random) -> None:
    """Write of each block either nothing or one of its states, with one of several chances."""
    size, kept = moments.choice(_BLOCKS), moments.choice(_KEPT)
    states: dict[int, list[memoryview]] = defaultdict(list)
    for event in pending:
        for start in range(0, len(event.data), size):
            states[event.offset + start].append(event.data[start : start + size])
    for offset, data in states.items():
        if moments.random() < kept:
            chosen = data[-1] if kept == 1 else moments.choice(data)
            disk[offset : offset + len(chosen)] = chosen
