"""Rewriting: the metadata in the header of a file are replaced, in place or in a new file.

Rewriting: a new file with another header and the same data, put in the old one's place when it is
complete.

In place: a header's text is overwritten so that a crash leaves the old one or the new one.

Two cases. What differs lies in one sector of 512 bytes: a disk writes a sector whole or not at all,
and the kernel copies what lies in one page without a stop, so one write is enough (PostgreSQL
trusts its pg_control to the same: src/include/catalog/pg_control.h, ``PG_CONTROL_MAX_SAFE_SIZE``).
Otherwise what stands there and what will stand there are written to a *record* beside the file
first, durably. A process that dies, or a machine that loses its power, in the middle of the
overwriting leaves the record, and the next command that reads the file's metadata puts the old text
back.

The text of a safetensors header, with other metadata and everything else byte for byte as it was.
Pure.

A header is not decoded and encoded again: that would lose the order of its tensors, fields unknown
here, and how numbers are written. The value of ``__metadata__`` is found in the text and replaced.

Spare room is kept behind that value, not at the header's end: JSON allows spaces there as well, and
so the next edit leaves all that follows where it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from json.decoder import JSONDecoder
from pathlib import Path

from blobstore.errors import LimitExceededError, StorageError, UsageError, quoted
from blobstore.io.budget import MAX_HEADER
from blobstore.io.copying import copy_range
from blobstore.io.durable import (
    create_file,
    os_errors,
    remove_if_there,
    sync,
    sync_folder,
    write_all_at,
)
from blobstore.io.ranges import FileReader, close_quietly

PREFIX = 8
"""Bytes of the header's length, before its text."""
_KEY = "__metadata__"
_SPACE = " \t\r\n"
_PAGE = 4096
_MOST_ALIGNED = 16_384
_LEAST_ALIGNED = 8
_SPARE = 1024
"""Bytes that a new header has left at least, for the edits to come."""


@dataclass(frozen=True, slots=True)
class HeaderText:
    """A header's text in parts: what stands ``before`` the metadata's value, the value, the ``room`` that it may have.

    ``after`` is what follows the room, without the spaces at the end: there are ``padding`` of
    those.
    """

    before: bytes
    value: bytes
    room: int
    after: bytes
    padding: int

    @classmethod
    def parse(cls, raw: bytes) -> HeaderText:
        """Return the parts of a text that has passed `parse_header`."""
        body = raw.rstrip(b" ")
        text = body.decode()
        found = _find(text)
        if found is None:
            rest = text[_skip(text, 1) :]
            head = f'{{"{_KEY}":'
            return cls(
                head.encode(),
                b"",
                -1,
                ("" if rest == "}" else ",").encode() + rest.encode(),
                len(raw) - len(body),
            )
        begin, end = found
        stop = _skip(text, end)
        value = text[begin:end].encode()
        return cls(
            text[:begin].encode(),
            value,
            len(value) + stop - end,
            text[stop:].encode(),
            len(raw) - len(body),
        )

    def held(self, value: bytes) -> bytes | None:
        """Return the text with that value and all that follows where it was; None when the value is too long for that."""
        spare = self.room - len(value)
        return (
            None
            if spare < 0
            else b"".join((self.before, value, b" " * spare, self.after, b" " * self.padding))
        )

    def shifted(self, value: bytes, length: int) -> bytes | None:
        """Return the text with that value in ``length`` bytes, what follows it at the end; None when that is too short."""
        spare = length - len(self.before) - len(value) - len(self.after)
        return None if spare < 0 else b"".join((self.before, value, b" " * spare, self.after))

    def grown(self, value: bytes, data_start: int) -> bytes:
        """Return the text with that value for a new file, whose data began at byte ``data_start`` of the old one.

        They move by whole pages of 4096 bytes, of 16,384 where that was their alignment: so they
        stay as aligned as they were, and blocks can be shared between the files. Raises:
        LimitExceededError over 100,000,000 bytes.
        """
        needed = PREFIX + len(self.before) + len(value) + len(self.after)
        if needed - PREFIX > MAX_HEADER:
            raise LimitExceededError(
                f"limit exceeded: a header of {needed - PREFIX:,} bytes, at most {MAX_HEADER:,}"
            )
        step = _MOST_ALIGNED if data_start % _MOST_ALIGNED == 0 else _PAGE
        origin = data_start % step if data_start % _LEAST_ALIGNED == 0 else 0
        start = needed + _SPARE
        start += (origin - start) % step
        text = self.shifted(value, min(start - PREFIX, MAX_HEADER))
        if text is None:
            raise AssertionError("there is room for what is needed")
        return text


def encode_metadata(metadata: Mapping[str, str]) -> bytes:
    """Return the value of ``__metadata__``: compact JSON in the order given.

    Raises: UsageError for a key or value that UTF-8 can't encode.
    """
    for key, value in metadata.items():
        if not all(isinstance(text, str) for text in (key, value)):
            raise UsageError(
                f"metadata map strings to strings, not {quoted(key)} to {quoted(value)}"
            )
    try:
        return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "metadata are texts in UTF-8, and one holds half of a surrogate pair"
        ) from None


def difference(old: bytes, new: bytes) -> tuple[int, int]:
    """Return where two different texts of one length begin to differ, and where they end to."""
    first = _equal_bytes(memoryview(old), memoryview(new))
    rest = slice(None, first - 1 if first else None, -1)
    return first, len(old) - _equal_bytes(memoryview(old[rest]), memoryview(new[rest]))


def _equal_bytes(one: memoryview, other: memoryview) -> int:
    """Return how many bytes at the beginning are equal."""
    least, most = 0, len(one)
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _find(text: str) -> tuple[int, int] | None:
    """Return where the value of ``__metadata__`` begins and ends, or None if the header has none."""
    decode = JSONDecoder().raw_decode
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = decode(text, begin)
        if key == _KEY:
            return begin, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return None


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


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

    ``fd`` is the file, open for writing and locked. Raises: StorageError; the old text is back
    then, or, where that failed too, will be put back by `restore`.
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
    """Put back what stood in the file when an edit of it was cut off in the middle.

    Remove the record.

    ``fd`` is the file, open for writing and locked. A record that was not finished, that is another
    file's, or from before a later change is only removed. Raises: StorageError.
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
        is_in_file = (
            type(begin) is type(length) is int and 0 <= begin <= begin + length <= file.st_size
        )
        is_of_file = (described["inode"], described["size"]) == (file.st_ino, file.st_size)
        # In a folder that others may write to, a record says nothing about a file that is not
        # theirs.
        is_trusted = owner in (file.st_uid, os.geteuid())
        is_whole = described["version"] == _VERSION and is_in_file and len(data) == 2 * length
        if (
            not (is_of_file and is_whole and is_trusted)
            or hashlib.sha256(data).hexdigest() != described["sha256"]
        ):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return begin, data[:length], data[length:]


def _is_mixed(now: bytes, before: bytes, after: bytes, begin: int) -> bool:
    """Return True when every sector is the old or the new one's: a later change by another program is neither."""
    cuts = [0, *range(-begin % _SECTOR or _SECTOR, len(now), _SECTOR), len(now)]
    return len(now) == len(before) and all(
        now[a:b] in (before[a:b], after[a:b]) for a, b in pairwise(cuts)
    )


def _remove(path: Path, *, there: bool = True) -> None:
    if there:
        record_of(path).unlink()
        sync_folder(path.parent)


def rewrite(
    source: FileReader, path: Path, text: bytes, data_start: int, told: Callable[[int], object]
) -> int:
    """Replace the file at ``path``, open as ``source`` and locked, by one with that header text.

    Return the bytes copied.

    Mode, owner and extended attributes are the old file's, where the system lets us. Durable.
    Raises: StorageError, CorruptDataError when the old file changes meanwhile; it stays as it is
    then.
    """
    # One name, which only the holder of the file's lock uses: the next edit removes what a killed
    # one left.
    new = path.with_name(f".{path.name}.blobstore-new")
    try:
        with os_errors("create", new):
            remove_if_there(new)
            target = create_file(new)
        try:
            with os_errors("write", new):
                write_all_at(target, 0, memoryview(len(text).to_bytes(PREFIX, "little") + text))
            copy_range(
                source, data_start, target, new, PREFIX + len(text), source.size - data_start, told
            )
            with os_errors("write", new):
                _take_attributes(source.fileno(), target)
                sync(target)
        finally:
            close_quietly(target)
        source.check_unchanged()
        with os_errors("replace", path):
            new.rename(path)
    except BaseException:
        with suppress(OSError):
            remove_if_there(new)
        raise
    with os_errors("replace", path):
        sync_folder(path.parent)
    return source.size - data_start


def _take_attributes(old: int, new: int) -> None:
    status = os.fstat(old)
    if (status.st_uid, status.st_gid) != (os.fstat(new).st_uid, os.fstat(new).st_gid):
        with suppress(PermissionError):  # only root gives files away
            os.fchown(new, status.st_uid, status.st_gid)
    if hasattr(os, "listxattr"):
        for name in os.listxattr(old):
            with suppress(OSError):  # some are the system's own
                os.setxattr(new, name, os.getxattr(old, name))
    os.fchmod(new, stat.S_IMODE(status.st_mode))
