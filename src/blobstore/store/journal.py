"""Journal: which blob each entry of an earlier import's plan became, so that nothing is made twice.

One file a source in ``.blobstore/journal/``, appended to; one line an entry: its key (importer/reuse.py), the blob's digest,
size and stamp, and whether the blob was durable then. A line is a hint and never trusted over the bytes: a blob is taken for
what its line says only if it was durable and while its file has that stamp; otherwise it is hashed (`Ingest.recall`). A
torn or foreign line is passed over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.digest import Digest
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.store.files import append_file, make_folder, os_errors, read_own, replace_file
from blobstore.store.leftovers import Leftover
from blobstore.store.writer import Stamp

_log = logging.getLogger("blobstore.store")

_LINE = re.compile(rb"^[0-9a-f]{64} [0-9a-f]{64} [0-9]{1,15} [0-9]{1,20} [0-9]{1,20} [-+]$", re.ASCII | re.MULTILINE)
_HEX = 64
_NAME = re.compile(r"[0-9a-f]{64}(?P<temporary>\.[0-9a-f]{16})?", re.ASCII)
_DURABLE, _WAITING = "-", "+"
_SPARE_LINES = 10_000
_LARGEST = 128 * 2**20
"""Bytes of a journal that is read: 600,000 entries, where a model has at most 110,000."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What an entry of a plan became: ``key`` is a hash of all that its bytes depend on.

    ``is_durable``: no write error and no power cut can change its blob any more.
    """

    key: str
    digest: Digest
    size: int
    stamp: Stamp
    is_durable: bool = True

    def encode(self) -> bytes:
        """Return the entry as a line."""
        stamp = f"{self.stamp.inode} {self.stamp.mtime_ns}"
        return f"{self.key} {self.digest.hex} {self.size} {stamp} {_DURABLE if self.is_durable else _WAITING}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Entry | None:
        """Return the entry in a line, or None if the line is not one."""
        if _LINE.fullmatch(line) is None:
            return None
        key, digest, size, inode, mtime_ns, state = line.decode().split(" ")
        stamp = Stamp(int(inode), int(mtime_ns))
        return cls(key, Digest(digest), int(size), stamp, state == _DURABLE)


class Journal:
    """The journal of one source, read when it is first asked; what is appended then is for later readers.

    One that can't be read is empty: everything is made again.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._path = folder / hashlib.sha256(os.fsencode(source)).hexdigest()
        self._newest: dict[bytes, bytes] | None = None
        self._lines = 0

    def find(self, key: str) -> Entry | None:
        """Return the newest entry of that key, or None."""
        line = self._read().get(key.encode())
        return Entry.parse(line) if line is not None else None

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries; they win over older ones of their keys. A journal that is too large is started anew.

        Raises: StorageError.
        """
        text = b"".join(entry.encode() for entry in entries)
        if not text:
            return
        newest = self._read()
        with os_errors("write", self._path):
            make_folder(self._path.parent)
            if self._lines > 2 * len(newest) + _SPARE_LINES or _size(self._path) > _LARGEST:
                replace_file(self._path, b"".join(line + b"\n" for line in newest.values()))
                self._lines = len(newest)
            append_file(self._path, b"\n" + text)  # on lines of its own, also behind one that was torn

    def _read(self) -> dict[bytes, bytes]:
        """Return the newest line of each key."""
        if self._newest is None:
            self._newest = {}
            try:
                for line in _lines(self._path):
                    self._newest[line[:_HEX]] = line
                    self._lines += 1
            except NotFoundError:
                pass
            except BlobStoreError as error:
                _log.warning("what earlier imports made is made again: %s", error)
        return self._newest


def dead_journals(folder: Path, is_there: Callable[[Digest], bool]) -> Iterator[Leftover]:
    """Yield the journals in ``folder`` that name no blob for which ``is_there``, and what a killed import left of one.

    Which source a journal is of can't be told from it; one whose blobs are all gone, or that is too large to be read, is of
    no use to any. Raises: StorageError.
    """
    with os_errors("read", folder):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in paths:
            match = _NAME.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            nbytes = path.stat().st_size
            if match["temporary"]:
                yield Leftover(path, nbytes, "an import that was killed left it unfinished")
            elif nbytes > _LARGEST:
                yield Leftover(path, nbytes, "a journal that is too large to be read")
            elif not any(is_there(Digest(line[_HEX + 1 : 2 * _HEX + 1].decode())) for line in _lines(path)):
                yield Leftover(path, nbytes, "a journal of an import of which nothing is left")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal that are entries. Raises: NotFoundError; LimitExceededError; StorageError."""
    return (match[0] for match in _LINE.finditer(read_own(path, _LARGEST)))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
