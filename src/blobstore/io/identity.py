"""The state of a file, by which a change is noticed."""

from __future__ import annotations

import os
import time

_COARSE_TICK_NS = 10**7
_LONGEST_TICK_NS = 2 * 10**9


def is_coarse(time_ns: int) -> bool:
    """Return True for a time in whole ticks of 10 ms: finer clocks give one in ten million times.

    Clocks tick every 2 s on FAT, every 10 ms on exFAT, every second on exfat-fuse, HFS+ and ext3.
    """
    return time_ns % _COARSE_TICK_NS == 0


class FileIdentity:
    """The state of a file: device, inode, size and time of the last write.

    ``key`` adds the time of the last change of any kind: a new link or mode changes the key only. A
    file that was written within the last tick of a coarse clock gets another key every time: a
    write in the same tick would leave its times as they are.
    """

    __slots__ = ("_key", "_rest")

    def __init__(self, status: os.stat_result) -> None:
        self._key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self._rest: tuple[int | str, ...] = (status.st_ctime_ns,)
        # By the time of change, which no program sets: an archive may have set the time of writing
        # to a whole second.
        if (
            is_coarse(status.st_ctime_ns)
            and abs(time.time_ns() - status.st_mtime_ns) < _LONGEST_TICK_NS
        ):
            self._rest += (os.urandom(16).hex(),)

    @property
    def key(self) -> str:
        """The identity as a text."""
        return " ".join(map(str, self._key + self._rest))

    @property
    def mtime_ns(self) -> int:
        """Time of the last write, which a copy may keep."""
        return self._key[3]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileIdentity) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
