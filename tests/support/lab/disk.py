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

from support.lab.fuse import FLUSH, MARK, RECORD, WRITE, serve
from support.lab.mounts import mount

_KEPT = (0.0, 1.0, 0.5, 0.1, 0.9)


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
    """Write either nothing or one of its states of each block, with one of several chances."""
    kept = moments.choice(_KEPT)
    states: dict[int, list[memoryview]] = defaultdict(list)
    for event in pending:
        for start in range(0, len(event.data), size):
            states[event.offset + start].append(event.data[start : start + size])
    for offset, data in states.items():
        if moments.random() < kept:
            chosen = data[-1] if kept == 1 else moments.choice(data)
            disk[offset : offset + len(chosen)] = chosen
