"""Whole files: copied, cloned and linked by the kernel; and folders, removed.

copy_file_range(2) never brings bytes into the process, and a file system that can share blocks
between files shares them where both offsets lie at the same place of a block. A server copies its
own files. Where the kernel has no such thing for two files (other file systems, other systems than
Linux) they are read and written. Large amounts that no file system shares are faster around the
page cache (`copy_around`).
"""

import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from blobstore.errors import ShortReadError, from_os_error
from blobstore.io.durable import PAGE, create_file, os_errors, write_aligned, write_all_at
from blobstore.io.ranges import FileReader, OpenReader, close_quietly


def remove_tree(path: Path) -> None:
    """Remove a folder and everything in it. A missing folder is ignored.

    Links are removed, not followed. Raises: OSError, also for folders nested too deep.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):  # rmtree would open a FIFO, and wait for its writer
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    try:
        shutil.rmtree(path)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "its folders are nested too deep") from None


_FICLONE = 0x40049409
_STEP = 2**26
_BUFFER = 2**20
# Two file systems; no such call; a file system without it; a sandbox that forbids it (EPERM).
_CAN_NOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


def clone(source: OpenReader, target: Path) -> bool:
    """Make ``target`` a new file that shares the blocks of ``source``; return False if impossible.

    Source of the number: linux/fs.h ``FICLONE``, ioctl_ficlone(2).
    """
    shared = source.fileno()
    if shared is None or not sys.platform.startswith("linux"):
        return False
    with os_errors("create", target):
        fd = create_file(target)
    try:
        fcntl.ioctl(fd, _FICLONE, shared)
    except OSError:  # another file system, or one that shares nothing
        target.unlink(missing_ok=True)
        return False
    finally:
        close_quietly(fd)
    return True


def link(source: OpenReader, target: Path) -> bool:
    """Make ``target`` another name of the open file ``source``; return False if impossible.

    A file of another user, or that others may write, is not linked: they could change it later.
    """
    shared = source.fileno()
    try:
        status = os.fstat(shared) if shared is not None else None
        if (
            status is None
            or status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) & 0o622 != 0o600  # noqa: PLR2004
        ):
            return False
        os.link(source.name, target, follow_symlinks=False)
        if os.path.samestat(target.lstat(), status):
            return True
        target.unlink()  # the path has another file now
    except OSError:
        pass
    return False


def copy_range(
    source: FileReader,
    start: int,
    target: int,
    name: object,
    at: int,
    length: int,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Copy ``length`` bytes of ``source`` from byte ``start`` to byte ``at`` of an open file.

    ``target`` is its descriptor, ``name`` its name in errors. ``progress`` is called with the
    number of bytes of each step. Any number of threads may copy into one file.

    Raises: ShortReadError when the source ends before; StorageError.
    """
    done = 0
    by_kernel = hasattr(os, "copy_file_range")
    while done < length:
        step = min(length - done, _STEP)
        if shares_blocks(start, at) and (odd := (start + done) % PAGE):
            step = min(step, PAGE - odd)  # blocks can only be shared from their beginning on
        count = _by_kernel(source, start + done, target, name, at + done, step) if by_kernel else 0
        if count == 0:
            by_kernel = False
            count = min(step, _BUFFER)
            buffer = memoryview(bytearray(count))
            _read_for(name, source, start + done, buffer)
            with os_errors("write", name):
                write_all_at(target, at + done, buffer)
        done += count
        if progress is not None:
            progress(count)


def copy_around(
    source: FileReader,
    start: int,
    target: tuple[int, int],
    name: object,
    at: int,
    length: int,
    buffer: memoryview,
) -> None:
    """Copy as `copy_range`, but whole pages around the page cache.

    ``target``: the descriptor, and that of `open_direct`. ``buffer``: writable memory from a page's
    beginning; it holds whole pages. It is read from and written to the disk in turn, so other
    threads should copy meanwhile. This costs half the processor time of copy_file_range, which
    fills the page cache with the copy.

    Raises: as `copy_range`.
    """
    done = 0
    while done < length:
        view = buffer[(at + done) % PAGE :][: length - done]
        _read_for(name, source, start + done, view)
        with os_errors("write", name):
            write_aligned(*target, at + done, view)
        done += len(view)


def shares_blocks(start: int, at: int) -> bool:
    """Return True if a file system may share blocks between byte ``start`` and ``at`` of two files.

    The bytes are at the same place of a block.
    """
    return (start - at) % PAGE == 0


def _by_kernel(
    source: FileReader, start: int, target: int, name: object, at: int, length: int
) -> int:
    """Return the number of copied bytes; 0 when the kernel can't copy, or the source ends."""
    try:
        return os.copy_file_range(source.fileno(), target, length, start, at)
    except OSError as error:
        if error.errno not in _CAN_NOT:
            raise from_os_error(error, f"copy {source.name} to", name) from error
        return 0


def _read_for(name: object, source: FileReader, start: int, buffer: memoryview) -> None:
    try:
        source.readinto(start, buffer)
    except ShortReadError as error:
        raise error.at(f"can't copy to {name}") from error
