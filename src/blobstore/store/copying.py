"""Copying: bytes of one file into another, moved by the kernel.

copy_file_range(2) never brings them into the process, and a file system that can share blocks between files shares them
where both offsets lie at the same place of a block. Where the kernel has no such thing for two files (other file systems,
other systems than Linux) they are read and written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from blobstore.errors import ShortReadError, from_os_error
from blobstore.ranges import FileReader
from blobstore.store.files import PAGE, os_errors, write_all_at

Told = Callable[[int], object]
"""Told of every few megabytes that were copied."""

_STEP = 2**26
_BUFFER = 2**20
# Across file systems; no such call; a file system without it; a sandbox that knows it not (EPERM).
_CAN_NOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


def copy_range(
    source: FileReader, start: int, target: int, name: object, at: int, length: int, told: Told | None = None
) -> None:
    """Copy ``length`` bytes of ``source`` from byte ``start`` to byte ``at`` of the open file ``target``, called ``name``.

    Any number of threads may copy into one file. Raises: ShortReadError when the source ends before; StorageError.
    """
    done = 0
    by_kernel = hasattr(os, "copy_file_range")
    while done < length:
        step = min(length - done, _STEP)
        if (start - at) % PAGE == 0 and (odd := (start + done) % PAGE):
            step = min(step, PAGE - odd)  # blocks can only be shared from their beginning on
        count = _by_kernel(source, start + done, target, name, at + done, step) if by_kernel else 0
        if count == 0:
            by_kernel = False
            count = _by_hand(source, start + done, target, name, at + done, min(step, _BUFFER))
        done += count
        if told is not None:
            told(count)


def _by_kernel(source: FileReader, start: int, target: int, name: object, at: int, length: int) -> int:
    """Return the number of bytes that were copied, 0 when the kernel can't or the source has ended."""
    try:
        return os.copy_file_range(source.fileno(), target, length, start, at)
    except OSError as error:
        if error.errno not in _CAN_NOT:
            raise from_os_error(error, f"copy {source.name} to", name) from error
        return 0


def _by_hand(source: FileReader, start: int, target: int, name: object, at: int, length: int) -> int:
    buffer = memoryview(bytearray(length))
    try:
        source.readinto(start, buffer)
    except ShortReadError as error:
        raise error.at(f"can't copy to {name}") from error
    with os_errors("write", name):
        write_all_at(target, at, buffer)
    return length
