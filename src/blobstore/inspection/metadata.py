"""Metadata: the ``__metadata__`` of a .safetensors file, read and edited.

Tensors and their data are never touched.

An edit is in place when the new header fits into the old one's space, else by a new file. Either
way a crash leaves the old metadata or the new ones (rewriting.py, rewriting.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BusyError, NotFoundError, StorageError, UsageError, quoted
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.inspection.rewriting import (
    PREFIX,
    HeaderText,
    encode_metadata,
    overwrite,
    record_of,
    restore,
    rewrite,
)
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileIdentity, FileReader, close_quietly
from blobstore.io.workers import begun
from blobstore.names import Digest

_WAIT_S = 10
_POLL_S = 0.02
_HASH_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
"""How the Hugging Face cache names its blobs: a git hash, or a sha256."""


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
    """Return the metadata of a .safetensors file, in the header's order.

    An empty dictionary when it has none.

    Raises: HeaderError with the rule that is broken, NotFoundError, StorageError,
    LimitExceededError.
    """
    file = _resolve(path)
    if os.path.lexists(record_of(file)):  # an edit is at work, or was cut off
        with _opened(file):
            pass
    with FileReader(file, follow=False) as reader:
        return dict(header_of(reader).metadata)


def edit_metadata(
    path: str | os.PathLike[str],
    changes: Mapping[str, str | None],
    *,
    replace: bool = False,
    in_place: bool = False,
    progress: Callable[[int, str], object] | None = None,
) -> MetadataEdit:
    """Set the metadata of a .safetensors file that ``changes`` name, and remove those that they map to None.

    ``replace`` removes all others too. The header is overwritten in place when the new one fits
    into its space; otherwise a new file takes the old one's place, its data copied by the kernel. A
    link is followed. A file with several names is edited in place only when ``in_place`` says so,
    because all its names would change; ``in_place`` also refuses to copy. ``progress`` is told of
    what is copied. Nothing is written when nothing changes.

    Raises: NotFoundError (no such file, or a key to remove that is not there); UsageError for a key
    or value that is no text, for a file that is named after its contents (a blob of a store or of
    the Hugging Face cache), for ``in_place`` without the room; HeaderError; LimitExceededError;
    BusyError when another edit holds the file for 10 seconds; CorruptDataError when the file
    changes meanwhile; StorageError. The file is then as it was, unless the last sync of its folder
    failed.
    """
    started = time.monotonic()
    file = _resolve(path)
    _refuse_blob(file)
    with _opened(file) as fd, FileReader(file, follow=False) as reader:
        header = header_of(reader)
        old = reader.read(PREFIX, header.data_start - PREFIX)
        metadata = _changed(header, changes, file, replace=replace)
        copied = None
        changed = metadata != dict(header.metadata)
        if changed:
            parts, value = HeaderText.parse(old), encode_metadata(metadata)
            new = parts.held(value) or parts.shifted(value, len(old))
            with os_errors("access", file):
                now = os.fstat(fd)
            if new is not None and (in_place or now.st_nlink == 1):
                reader.check_is(FileIdentity(now))
                overwrite(fd, file, old, new)
            elif in_place:
                raise _no_room(file, parts, value, len(old))
            else:
                text = parts.grown(value, header.data_start)
                tell = begun(progress, reader.size)
                copied = rewrite(
                    reader, file, text, header.data_start, lambda nbytes: tell(nbytes, file.name)
                )
    return MetadataEdit(metadata, changed, copied, time.monotonic() - started)


def _resolve(path: str | os.PathLike[str]) -> Path:
    try:
        with os_errors("open", os.fspath(path)):
            return Path(path).resolve(strict=True)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, a loop of links
        raise StorageError(
            f"can't open {quoted(os.fspath(path))}: {error}", path=os.fspath(path)
        ) from error


def _refuse_blob(file: Path) -> None:
    is_blob = (
        Digest.from_file_name(file.name) is not None or _HASH_NAME.fullmatch(file.name) is not None
    )
    if is_blob and file.parent.name == "blobs":
        message = f"{file} is named after its contents: with other metadata its name would be wrong"
        raise UsageError(message, path=str(file), hint="Copy it, and edit the copy.")


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Yield the file, open for writing and locked, an edit that was cut off undone.

    Raises: StorageError, BusyError.
    """
    until = time.monotonic() + _WAIT_S
    while True:
        with os_errors("write to", file):
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _lock(fd, file, until)
            with os_errors("access", file):
                # Whoever held the lock may have put another file in its place.
                is_current = os.path.samestat(os.fstat(fd), file.stat(follow_symlinks=False))
            if is_current:
                restore(fd, file)
                yield fd
                return
        finally:
            close_quietly(fd)


def _lock(fd: int, file: Path, until: float) -> None:
    with os_errors("lock", file):
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(_POLL_S)
    raise BusyError(f"{file} is being edited by another process", path=str(file))


def _changed(
    header: Header, changes: Mapping[str, str | None], file: Path, *, replace: bool
) -> dict[str, str]:
    """Return the metadata after the changes; what was there keeps its place.

    Raises: NotFoundError for a missing key.
    """
    missing = [
        key for key, value in changes.items() if value is None and key not in header.metadata
    ]
    if missing:
        raise NotFoundError(f"{file} has no metadata {quoted(missing[0])}", path=str(file))
    kept = {key: value for key, value in header.metadata.items() if key in changes or not replace}
    return {key: value for key, value in {**kept, **changes}.items() if value is not None}


def _no_room(file: Path, parts: HeaderText, value: bytes, length: int) -> UsageError:
    needed = len(parts.before) + len(value) + len(parts.after)
    message = f"the new header of {file} needs {needed:,} bytes, and the old one has {length:,}"
    return UsageError(
        message, path=str(file), hint="Leave out --in-place, and a new file is written."
    )
