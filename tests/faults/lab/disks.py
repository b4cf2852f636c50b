"""Power cuts: an ext4 on a recorded disk, and the disks that a cut may leave.

A disk with a write cache promises that what was written before a flush is there after it. Of what
was written since, it may keep all, nothing, or any of it: block by block, in any order. So a
recording gives as many cuts as one likes: the writes up to the last flush, and of each block
written since then one of its states.
"""

import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.lab.fuse import FLUSH, MARK, RECORD, WRITE, serve
from faults.mounts import NotShownError, mount

_KEPT = (0.0, 1.0, 0.5, 0.1, 0.9)
_BLOCK = 4096
_ATOMIC = (_BLOCK, _BLOCK, _BLOCK, 512)
"""Bytes that the disk writes as a whole or not at all, one of them chosen for each cut."""
_NBYTES = 48 * 2**20
_MAKE = (
    *("mkfs.ext4", "-q", "-F", "-b", f"{_BLOCK}", "-O", "metadata_csum"),
    *("-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"),
)


def empty_image(path: Path) -> bytes:
    """Return the bytes of an empty ext4, made at ``path``. Raises: NotShownError without mkfs."""
    path.write_bytes(b"")
    os.truncate(path, _NBYTES)
    try:
        subprocess.run([*_MAKE, path], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NotShownError(f"{_MAKE[0]} can't make such a disk: {error}") from error
    return path.read_bytes()


@dataclass(frozen=True, slots=True)
class Event:
    """One record: ``kind`` is WRITE, FLUSH or MARK."""

    kind: int
    offset: int
    data: bytes


@contextmanager
def recorded(folder: Path, image: bytes, log: Path, options: str) -> Iterator[tuple[Path, Path]]:
    """Yield a mounted file system whose disk is recorded to ``log``, and the file for marks."""
    (served := folder / "served").mkdir(exist_ok=True)
    (target := folder / "mounted").mkdir(exist_ok=True)
    server = serve(image, log, served)
    try:
        with mount("ext4", target, f"loop,{options}", served / "disk"):
            yield target, served / "marks"
    finally:
        subprocess.run(["umount", "-l", served], check=True)  # when the loop device lets go of it
        os.waitpid(server, 0)


def read_events(log: Path) -> list[Event]:
    events, view, position = [], memoryview(log.read_bytes()), 0
    while position < len(view):
        kind, offset, length = RECORD.unpack_from(view, position)
        position += RECORD.size
        events.append(Event(kind, offset, bytes(view[position : position + length])))
        position += length
    return events


class Replay:
    """The disk after so many events, moved forward only; ``mark`` is the last before the cut."""

    def __init__(self, image: bytes, events: Sequence[Event]) -> None:
        """Start before the first event."""
        self._events = events
        self._durable = bytearray(image)
        self._pending: list[Event] = []
        self._position = 0
        self.mark = b""

    def cut(self, position: int, chance: random.Random) -> bytearray:
        for event in self._events[self._position : position]:
            if event.kind == MARK:
                self.mark = event.data
            elif event.kind == WRITE:
                self._pending.append(event)
            elif event.kind == FLUSH:
                for write in self._pending:
                    self._durable[write.offset : write.offset + len(write.data)] = write.data
                self._pending.clear()
        self._position = position
        disk = bytearray(self._durable)
        _write_some(disk, self._pending, chance.choice(_ATOMIC), chance)
        return disk


def _write_some(
    disk: bytearray, pending: Sequence[Event], size: int, chance: random.Random
) -> None:
    """Write either nothing or one of its states of each block, with one of several chances.

    The first block is written as a whole: a torn superblock of ext4 can't be mounted, and needs the
    repair that a machine does at its start (e2fsck).
    """
    kept = chance.choice(_KEPT)
    states: dict[int, list[bytes]] = defaultdict(list)
    for event in pending:
        whole = _BLOCK if event.offset < _BLOCK else size
        for start in range(0, len(event.data), whole):
            states[event.offset + start].append(event.data[start : start + whole])
    for offset, data in states.items():
        if chance.random() < kept:
            chosen = data[-1] if kept == 1 else chance.choice(data)
            disk[offset : offset + len(chosen)] = chosen
