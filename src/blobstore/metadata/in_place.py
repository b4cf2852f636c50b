"""In place: a header's text is overwritten so that a crash leaves the old one or the new one.

Two cases. What differs lies in one sector of 512 bytes: a disk writes a sector whole or not at all, and the kernel copies
what lies in one page without a stop, so one write is enough (PostgreSQL trusts its pg_control to the same:
src/include/catalog/pg_control.h, ``PG_CONTROL_MAX_SAFE_SIZE``). Otherwise what stands there and what will stand there are
written to a *record* beside the file first, durably. A process that dies, or a machine that loses its power, in the middle
of the overwriting leaves the record, and the next command that reads the file's metadata puts the old text back.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from blobstore.errors import StorageError
from blobstore.metadata.text import PREFIX, difference
from blobstore.ranges import FileReader
from blobstore.store.files import create_file, os_errors, remove_if_there, sync, sync_folder, write_all_at

_SECTOR = 512
_MOST_RECORDED = 2**28
"""Bytes of a record behind its first line: both texts of the largest header have 200,000,000."""
_LINE = 512
_VERSION = 1


def record_of(path: Path) -> Path:
    """Return where the record of an edit of that file lies."""
    return path.with_name(f".{path.name}.blobstore-edit")


def overwrite(fd: int, path: Path, old: bytes, new: bytes) -> None:
    """Put the header text ``new`` in the place of ``old``, which has the same length, durably.

    ``fd`` is the file, open for writing and locked. Raises: StorageError; the old text is back then, or, where that failed
    too, will be put back by `restore`.
    """
    first, end = difference(old, new)
    begin, before, after = PREFIX + first, old[first:end], new[first:end]
    needs_record = begin // _SECTOR != (PREFIX + end - 1) // _SECTOR
    if needs_record:
        _write_record(fd, path, begin, before, after)
    try:
        with os_errors("write", path):
            write_all_at(fd, begin, memoryview(after))
            sync(fd)
    except StorageError:
        with suppress(OSError):
            write_all_at(fd, begin, memoryview(before))
            sync(fd)
            _remove(path, there=needs_record)
        raise
    with os_errors("remove", record_of(path)):
        _remove(path, there=needs_record)


def restore(fd: int, path: Path) -> None:
    """Put back what stood in the file when an edit of it was cut off in the middle; remove the record.

    ``fd`` is the file, open for writing and locked. A record that was not finished, that is another file's, or from before
    a later change is only removed. Raises: StorageError.
    """
    record = record_of(path)
    with os_errors("access", record):
        if not os.path.lexists(record):
            return
    with os_errors("restore", path):
        parsed = _read_record(record, os.fstat(fd))
        if parsed is not None:
            begin, before, after = parsed
            now = os.pread(fd, len(before), begin)
            if now not in (before, after) and _is_mixed(now, before, after, begin):
                write_all_at(fd, begin, memoryview(before))
                sync(fd)
        _remove(path)


def _write_record(fd: int, path: Path, begin: int, before: bytes, after: bytes) -> None:
    record = record_of(path)
    with os_errors("access", path):
        status = os.fstat(fd)
    described = {
        "version": _VERSION,
        "inode": status.st_ino,
        "size": status.st_size,
        "begin": begin,
        "length": len(before),
        "sha256": hashlib.sha256(before + after).hexdigest(),
    }
    data = json.dumps(described).encode().ljust(_LINE - 1) + b"\n" + before + after
    try:
        with os_errors("write", record):
            target = create_file(record)
            try:
                write_all_at(target, 0, memoryview(data))
                sync(target)
            finally:
                os.close(target)
            sync_folder(record.parent)
    except StorageError:
        with suppress(OSError):
            remove_if_there(record)
        raise


def _read_record(record: Path, file: os.stat_result) -> tuple[int, bytes, bytes] | None:
    """Return where what stood and what shall stand, or None for a record that says nothing about the file as it is.

    Raises: StorageError when the record can't be read.
    """
    with FileReader(record, follow=False) as reader:
        if not _LINE <= reader.size <= _LINE + _MOST_RECORDED:
            return None
        owner = reader.status().st_uid
        line, data = reader.read(0, _LINE), reader.read(_LINE, reader.size - _LINE)
    try:
        described = json.loads(line)
        begin, length = described["begin"], described["length"]
        is_in_file = type(begin) is type(length) is int and 0 <= begin <= begin + length <= file.st_size
        is_of_file = (described["inode"], described["size"]) == (file.st_ino, file.st_size)
        # In a folder that others may write to, a record says nothing about a file that is not theirs.
        is_trusted = owner in (file.st_uid, os.geteuid())
        is_whole = described["version"] == _VERSION and is_in_file and len(data) == 2 * length
        if not (is_of_file and is_whole and is_trusted) or hashlib.sha256(data).hexdigest() != described["sha256"]:
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return begin, data[:length], data[length:]


def _is_mixed(now: bytes, before: bytes, after: bytes, begin: int) -> bool:
    """Return True when every sector is the old or the new one's: a later change by another program is neither."""
    cuts = [0, *range(-begin % _SECTOR or _SECTOR, len(now), _SECTOR), len(now)]
    return len(now) == len(before) and all(now[a:b] in (before[a:b], after[a:b]) for a, b in pairwise(cuts))


def _remove(path: Path, *, there: bool = True) -> None:
    if there:
        record_of(path).unlink()
        sync_folder(path.parent)
