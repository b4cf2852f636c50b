"""Metadata: the ``__metadata__`` of a .safetensors file, read and edited.

Tensors and their data are never touched. A crash leaves the old metadata or the new ones:

- In place, if only one sector of 512 bytes changes. A disk writes a sector whole or not at all, and
  the kernel copies what is in one page without a stop, so one write is enough. PostgreSQL trusts
  its pg_control to the same: src/include/catalog/pg_control.h, ``PG_CONTROL_MAX_SAFE_SIZE``.
- Otherwise a new file, with another header and the same data, takes the old one's place when it is
  complete.

Tensors, their order and fields unknown here stay in the header, whose JSON is written compactly, as
the safetensors library does: a header of that library changes in nothing but its metadata. Spare
room is kept after the value of ``__metadata__``, not at the header's end: JSON allows spaces there
as well, and so the next edit leaves all that follows where it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BusyError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UsageError,
    quoted,
)
from blobstore.formats.safetensors.header import METADATA, PREFIX, Header, header_of
from blobstore.io.budget import MAX_HEADER
from blobstore.io.copying import copy_range
from blobstore.io.durable import (
    create_file,
    os_errors,
    remove_if_there,
    removed_after_an_error,
    sync,
    sync_folder,
    write_all_at,
)
from blobstore.io.ranges import FileIdentity, FileReader, close_quietly
from blobstore.io.workers import Progress, start_progress
from blobstore.names import Digest
from blobstore.store.local.locks import take_lock

_WAIT_S = 10
# How the Hugging Face cache names its blobs: a git hash, or a sha256.
_HASH_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_SECTOR = 512
_PAGE = 4096
_MOST_ALIGNED = 16_384
# Bytes that a new header has left at least, for the edits to come.
_SPARE = 1024


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
    refuses to copy. ``progress`` is called with the copied bytes. Nothing is written when nothing
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
    with _lock(file) as fd, FileReader(file, follow=False) as reader:
        header = header_of(reader)
        metadata = _change(header, changes, file, replace=replace)
        changed, copied = metadata != dict(header.metadata), None
        if changed:
            old = reader.read(0, header.data_start)
            head, tail = header_text(old[PREFIX.size :], metadata)
            if not _edit_in_place(fd, reader, file, old, (head, tail), asked=in_place):
                length = new_length(len(head) + len(tail), len(old))
                copied = _rewrite(reader, file, spread(head, tail, length), len(old), progress)
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
        raise UsageError(
            f"{file} is named after its contents: other metadata would need another name",
            path=str(file),
            hint="Copy it, and edit the copy.",
        )


@contextmanager
def _lock(file: Path) -> Iterator[int]:
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


def _change(
    header: Header, changes: Mapping[str, str | None], file: Path, *, replace: bool
) -> dict[str, str]:
    """Return the metadata after the changes; existing keys keep their place.

    Raises: NotFoundError for a missing key.
    """
    for key, value in changes.items():
        if value is None and key not in header.metadata:
            raise NotFoundError(f"{file} has no metadata {quoted(key)}", path=str(file))
    kept = {key: value for key, value in header.metadata.items() if key in changes or not replace}
    return {key: value for key, value in {**kept, **changes}.items() if value is not None}


def header_text(old: bytes, metadata: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return a header's text with other metadata: up to the end of their value, and the rest.

    Raises: UsageError for a key or value that is not a text, or that UTF-8 can't encode.
    """
    for key, value in metadata.items():
        if not all(isinstance(text, str) for text in (key, value)):
            raise UsageError(
                f"metadata maps strings to strings, not {quoted(key)} to {quoted(value)}"
            )
    document = json.loads(old)
    names = list(document)
    place = names.index(METADATA) if METADATA in document else 0
    before = {name: document[name] for name in names[:place]}
    after = {name: document[name] for name in names[place:] if name != METADATA}
    try:
        head, tail = _encode({**before, METADATA: dict(metadata)})[:-1], _encode(after)[1:]
    except UnicodeEncodeError:
        raise UsageError(
            "metadata must be valid UTF-8, but a string contains half of a surrogate pair"
        ) from None
    return head, b"," + tail if after else tail


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def spread(head: bytes, tail: bytes, length: int, padding: int = 0) -> bytes:
    """Return both in ``length`` bytes: spaces between them, ``padding`` of them at the end."""
    spare = length - len(head) - len(tail) - padding
    return b"".join((head, b" " * spare, tail, b" " * padding))


def new_length(needed: int, data_start: int) -> int:
    """Return the length of a new file's header text; the old data began at ``data_start``.

    The data move by whole pages of 4096 bytes, of 16,384 where that was their alignment. So they
    stay as aligned as they were, and blocks can be shared between the files.

    Raises: LimitExceededError over 100,000,000 bytes.
    """
    if needed > MAX_HEADER:
        raise LimitExceededError(
            f"limit exceeded: a header of {needed:,} bytes, at most {MAX_HEADER:,}"
        )
    start = PREFIX.size + needed + _SPARE
    start += (data_start - start) % (_MOST_ALIGNED if data_start % _MOST_ALIGNED == 0 else _PAGE)
    return min(start - PREFIX.size, MAX_HEADER)


def _edit_in_place(
    fd: int,
    reader: FileReader,
    path: Path,
    old: bytes,
    parts: tuple[bytes, bytes],
    *,
    asked: bool,
) -> bool:
    """Overwrite the header ``old`` with one of these parts if that is atomic; return if it is.

    ``fd`` is the file, open for writing and locked. Raises: UsageError if it was ``asked`` for and
    is not atomic; StorageError, the old header is back then; CorruptDataError.
    """
    with os_errors("access", path):
        now = os.fstat(fd)
    spare = len(old) - PREFIX.size - sum(map(len, parts))
    padding = len(old) - len(old.rstrip(b" "))
    new = old
    if spare >= 0:
        new = old[: PREFIX.size] + spread(
            *parts, len(old) - PREFIX.size, padding if spare >= padding else 0
        )
    changed = [
        at for at in range(0, len(old), _SECTOR) if old[at : at + _SECTOR] != new[at : at + _SECTOR]
    ]
    if len(changed) == 1 and (asked or now.st_nlink == 1):
        reader.check_is(FileIdentity(now))
        _write_sector(fd, path, changed[0], old, new)
        return True
    if asked:
        reason = "has no room for" if spare < 0 else "would change in several disk sectors with"
        raise UsageError(
            f"{path} can't be edited in place: its header {reason} the new metadata",
            path=str(path),
            hint="Leave out in_place=True to write a new file.",
        )
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
    report, nbytes = start_progress(progress, source.size), source.size - data_start
    # One name, used only by the holder of the file's lock: the next edit removes the rest of a
    # killed one.
    new = path.with_name(f".{path.name}.blobstore-new")
    with removed_after_an_error(new):
        with os_errors("create", new):
            remove_if_there(new)
            target = create_file(new)
        try:
            with os_errors("write", new):
                write_all_at(target, 0, memoryview(PREFIX.pack(len(text)) + text))
            start = PREFIX.size + len(text)
            copy_range(
                source, data_start, target, new, start, nbytes, lambda done: report(done, path.name)
            )
            with os_errors("write", new):
                _take_attributes(source.fileno(), target)
                sync(target)
        finally:
            close_quietly(target)
        source.check_unchanged()
        with os_errors("replace", path):
            new.rename(path)
    with os_errors("replace", path):
        sync_folder(path.parent)
    return nbytes


def _take_attributes(old: int, new: int) -> None:
    """Give one open file those of another. Their paths may lead elsewhere by now."""
    status = os.fstat(old)
    if (status.st_uid, status.st_gid) != (os.fstat(new).st_uid, os.fstat(new).st_gid):
        with suppress(PermissionError):  # only root gives files away
            os.fchown(new, status.st_uid, status.st_gid)
    shutil.copystat(old, new)  # type: ignore[arg-type]  # os takes descriptors for paths
    os.utime(new)
