"""Metadata: the ``__metadata__`` of a .safetensors file, read and edited.

Tensors and their data are never touched. A crash leaves the old metadata or the new ones:

- In place, if only one sector of 512 bytes changes. A disk writes a sector whole or not at all, and
  the kernel copies what lies in one page without a stop, so one write is enough. PostgreSQL trusts
  its pg_control to the same: src/include/catalog/pg_control.h, ``PG_CONTROL_MAX_SAFE_SIZE``.
- Otherwise a new file, with another header and the same data, takes the old one's place when it is
  complete.

A header is not decoded and encoded again: that would lose the order of its tensors, fields unknown
here, and how numbers are written. The value of ``__metadata__`` is found in the text and replaced.
Spare room is kept behind that value, not at the header's end: JSON allows spaces there as well, and
so the next edit leaves all that follows where it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from json.decoder import JSONDecoder
from pathlib import Path

from blobstore.errors import (
    BusyError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UsageError,
    quoted,
)
from blobstore.formats.safetensors.header import Header, header_of
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
from blobstore.io.ranges import FileIdentity, FileReader, close_quietly
from blobstore.io.workers import Progress, begun
from blobstore.names import Digest
from blobstore.store.local.locks import take_lock

_WAIT_S = 10
_HASH_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
"""How the Hugging Face cache names its blobs: a git hash, or a sha256."""
_PREFIX = 8
"""Bytes of the header's length, before its text."""
_KEY = "__metadata__"
_SPACE = " \t\r\n"
_SECTOR = 512
_PAGE = 4096
_MOST_ALIGNED = 16_384
_LEAST_ALIGNED = 8
_SPARE = 1024
"""Bytes that a new header has left at least, for the edits to come."""


@dataclass(frozen=True, slots=True)
class MetadataEdit:
    """What an edit did.

    ``copied_bytes`` went into a new file; None when the file was edited in place, or not at all.
    """

    metadata: Mapping[str, str]
    changed: bool
    copied_bytes: int | None
    seconds: float


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a .safetensors file, in the header's order; empty if it has none.

    Raises: HeaderError with the rule that is broken, NotFoundError, StorageError,
    LimitExceededError.
    """
    with FileReader(_resolve(path), follow=False) as reader:
        return dict(header_of(reader).metadata)


def edit_metadata(
    path: str | os.PathLike[str],
    changes: Mapping[str, str | None],
    *,
    replace: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> MetadataEdit:
    """Set metadata of a .safetensors file to the values of ``changes``; None removes a key.

    ``replace`` removes all other keys. The header is edited in place if the new one fits into the
    old one's space and differs in one sector of 512 bytes; otherwise a new file takes the old one's
    place, its data copied by the kernel. A link is followed. A file with several names is edited in
    place only when ``in_place`` says so, because all its names would change; ``in_place`` also
    refuses to copy. ``progress`` is told of the copied bytes. Nothing is written when nothing
    changes.

    Raises: NotFoundError (no such file, or a key to remove that is not there); UsageError for a key
    or value that is not a text, for a file that is named after its contents (a blob of a store or
    of the Hugging Face cache), for ``in_place`` when a new file is needed; HeaderError;
    LimitExceededError; BusyError when another edit holds the file for 10 seconds; CorruptDataError
    when the file changes meanwhile; StorageError. The file is then as it was, unless the last sync
    of its folder failed.
    """
    started = time.monotonic()
    file = _resolve(path)
    _refuse_blob(file)
    with _locked(file) as fd, FileReader(file, follow=False) as reader:
        header = header_of(reader)
        metadata = _changed(header, changes, file, replace=replace)
        changed, copied = metadata != dict(header.metadata), None
        if changed:
            old, value = reader.read(0, header.data_start), encode_metadata(metadata)
            parts = HeaderText.parse(old[_PREFIX:])
            text = parts.same_length(value)
            if not _edit_in_place(fd, reader, file, old, text, asked=in_place):
                copied = _rewrite(reader, file, parts.grown(value, len(old)), len(old), progress)
    return MetadataEdit(metadata, changed, copied, time.monotonic() - started)


def _resolve(path: str | os.PathLike[str]) -> Path:
    try:
        with os_errors("open", os.fspath(path)):
            return Path(path).resolve(strict=True)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, a loop of links
        text = os.fspath(path)
        raise StorageError(f"can't open {quoted(text)}: {error}", path=text) from error


def _refuse_blob(file: Path) -> None:
    is_hash = Digest.from_file_name(file.name) is not None or _HASH_NAME.fullmatch(file.name)
    if is_hash and file.parent.name == "blobs":
        message = f"{file} is named after its contents: with other metadata its name would be wrong"
        raise UsageError(message, path=str(file), hint="Copy it, and edit the copy.")


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """Yield the file, open for writing and locked.

    Raises: StorageError, BusyError.
    """
    until = time.monotonic() + _WAIT_S
    is_current = False
    while not is_current:
        with os_errors("write to", file):
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            with os_errors("lock", file):
                is_locked = take_lock(fd, fcntl.LOCK_EX, until - time.monotonic())
            if not is_locked:
                raise BusyError(f"{file} is being edited by another process", path=str(file))
            with os_errors("access", file):
                # The previous holder of the lock may have put another file in its place.
                is_current = os.path.samestat(os.fstat(fd), file.stat(follow_symlinks=False))
            if is_current:
                yield fd
        finally:
            close_quietly(fd)


def _changed(
    header: Header, changes: Mapping[str, str | None], file: Path, *, replace: bool
) -> dict[str, str]:
    """Return the metadata after the changes; keys that were there keep their place.

    Raises: NotFoundError for a missing key.
    """
    for key, value in changes.items():
        if value is None and key not in header.metadata:
            raise NotFoundError(f"{file} has no metadata {quoted(key)}", path=str(file))
    kept = {key: value for key, value in header.metadata.items() if key in changes or not replace}
    return {key: value for key, value in {**kept, **changes}.items() if value is not None}


def encode_metadata(metadata: Mapping[str, str]) -> bytes:
    """Return the value of ``__metadata__``: compact JSON in the order given.

    Raises: UsageError for a key or value that UTF-8 can't encode.
    """
    for key, value in metadata.items():
        if not all(isinstance(text, str) for text in (key, value)):
            message = f"metadata map strings to strings, not {quoted(key)} to {quoted(value)}"
            raise UsageError(message)
    try:
        return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        message = "metadata are texts in UTF-8, and one holds half of a surrogate pair"
        raise UsageError(message) from None


@dataclass(frozen=True, slots=True)
class HeaderText:
    """A header's text: what is ``before`` the metadata's value, and ``after`` the room that it has.

    ``room``: the bytes of the old value and of the spaces behind it, -1 without a value. ``after``
    is without the spaces at the end of the text; there are ``padding`` of those. ``length``: all
    bytes.
    """

    before: bytes
    room: int
    after: bytes
    padding: int
    length: int

    @classmethod
    def parse(cls, raw: bytes) -> HeaderText:
        """Return the parts of a text that has passed `parse_header`."""
        body = raw.rstrip(b" ")
        text, padding = body.decode(), len(raw) - len(body)
        found = _find(text)
        if found is None:
            rest = text[_skip(text, 1) :]
            comma = "" if rest == "}" else ","
            before, after = f'{{"{_KEY}":', f"{comma}{rest}"
            return cls(before.encode(), -1, after.encode(), padding, len(raw))
        begin, end = found
        stop = _skip(text, end)
        room = len(text[begin:stop].encode())
        return cls(text[:begin].encode(), room, text[stop:].encode(), padding, len(raw))

    def needed(self, value: bytes) -> int:
        """Return the least length of the text with that value."""
        return len(self.before) + len(value) + len(self.after)

    def with_value(self, value: bytes, length: int, padding: int = 0) -> bytes:
        """Return the text with that value in ``length`` bytes, ``padding`` spaces at its end."""
        spare = length - self.needed(value) - padding
        return b"".join((self.before, value, b" " * spare, self.after, b" " * padding))

    def same_length(self, value: bytes) -> bytes | None:
        """Return the text with that value in the old length; None if the value is too long.

        What follows the value stays where it was if there is room, else it is at the end.
        """
        if len(value) <= self.room:
            return self.with_value(value, self.length, self.padding)
        return self.with_value(value, self.length) if self.needed(value) <= self.length else None

    def grown(self, value: bytes, data_start: int) -> bytes:
        """Return the text with that value for a new file; the old data began at ``data_start``.

        The data move by whole pages of 4096 bytes, of 16,384 where that was their alignment. So
        they stay as aligned as they were, and blocks can be shared between the files.

        Raises: LimitExceededError over 100,000,000 bytes.
        """
        needed = self.needed(value)
        if needed > MAX_HEADER:
            raise LimitExceededError(
                f"limit exceeded: a header of {needed:,} bytes, at most {MAX_HEADER:,}"
            )
        step = _MOST_ALIGNED if data_start % _MOST_ALIGNED == 0 else _PAGE
        origin = data_start % step if data_start % _LEAST_ALIGNED == 0 else 0
        start = _PREFIX + needed + _SPARE
        start += (origin - start) % step
        return self.with_value(value, min(start - _PREFIX, MAX_HEADER))


def _find(text: str) -> tuple[int, int] | None:
    """Return where the value of ``__metadata__`` begins and ends; None if the header has none."""
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


def _edit_in_place(
    fd: int, reader: FileReader, path: Path, old: bytes, text: bytes | None, *, asked: bool
) -> bool:
    """Overwrite the header ``old`` with one of that text, if that is atomic; return whether it is.

    ``fd`` is the file, open for writing and locked. Raises: UsageError if it was ``asked`` for and
    is not atomic; StorageError, the old header is back then; CorruptDataError.
    """
    with os_errors("access", path):
        now = os.fstat(fd)
    new = old if text is None else old[:_PREFIX] + text
    places = range(0, len(old), _SECTOR)
    changed = [at for at in places if old[at : at + _SECTOR] != new[at : at + _SECTOR]]
    if len(changed) == 1 and (asked or now.st_nlink == 1):
        reader.check_is(FileIdentity(now))
        _write_sector(fd, path, changed[0], old, new)
        return True
    if asked:
        reason = "has no room for" if text is None else "would change in several sectors by"
        message = f"{path} can't be edited in place: its header {reason} the new metadata"
        hint = "Leave out in_place=True, and a new file is written."
        raise UsageError(message, path=str(path), hint=hint)
    return False


def _write_sector(fd: int, path: Path, at: int, old: bytes, new: bytes) -> None:
    try:
        with os_errors("write", path):
            write_all_at(fd, at, memoryview(new)[at : at + _SECTOR])
            sync(fd)
    except StorageError:
        with suppress(OSError):
            write_all_at(fd, at, memoryview(old)[at : at + _SECTOR])
            sync(fd)
        raise


def _rewrite(
    source: FileReader, path: Path, text: bytes, data_start: int, progress: Progress | None
) -> int:
    """Replace the file at ``path``, open as ``source`` and locked, by one with that header text.

    Return the bytes copied. Mode, owner and extended attributes are the old file's, where the
    system lets us. Durable. Raises: StorageError, CorruptDataError when the old file changes
    meanwhile; it stays as it is then.
    """
    told, nbytes = begun(progress, source.size), source.size - data_start
    # One name, used only by the holder of the file's lock: the next edit removes the rest of a
    # killed one.
    new = path.with_name(f".{path.name}.blobstore-new")
    try:
        with os_errors("create", new):
            remove_if_there(new)
            target = create_file(new)
        try:
            with os_errors("write", new):
                write_all_at(target, 0, memoryview(len(text).to_bytes(_PREFIX, "little") + text))
            start = _PREFIX + len(text)
            copy_range(
                source, data_start, target, new, start, nbytes, lambda done: told(done, path.name)
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
    return nbytes


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
