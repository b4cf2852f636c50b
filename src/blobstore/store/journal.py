"""Journal: which blob each entry of an earlier import's plan became, so that nothing is made twice.

One file a source in ``.blobstore/journal/``, appended to; one line an entry: its key (importer/reuse.py), the blob's digest,
size and stamp, and until when that holds. A line is a hint and never trusted over the bytes: a blob is taken for what its
line says only while its file has that stamp, and is hashed otherwise. A blob that was not durable when its line was written
is taken so only until the machine starts again. A torn or foreign line is passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.digest import Digest
from blobstore.store.files import append_file, make_folder, os_errors, replace_file
from blobstore.store.leftovers import Leftover
from blobstore.store.writer import Stamp

_LINE = re.compile(rb"([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9]{1,15}) ([0-9]{1,20}) ([0-9]{1,20}) ([0-9a-f-]{1,64})", re.ASCII)
_NAME = re.compile(r"[0-9a-f]{64}(?P<temporary>\.[0-9a-f]{16})?", re.ASCII)
_DURABLE = "-"
_SPARE_LINES = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What an entry of a plan became: ``key`` is a hash of all that its bytes depend on.

    ``boot`` is the start of the machine that its blob may not survive; None when the blob is durable.
    """

    key: str
    digest: Digest
    size: int
    stamp: Stamp
    boot: str | None = None

    def encode(self) -> bytes:
        """Return the entry as a line."""
        stamp = f"{self.stamp.inode} {self.stamp.mtime_ns}"
        return f"{self.key} {self.digest.hex} {self.size} {stamp} {self.boot or _DURABLE}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Entry | None:
        """Return the entry in a line, or None when there is none."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        key, digest, size, inode, mtime_ns, boot = (group.decode() for group in match.groups())
        stamp = Stamp(int(inode), int(mtime_ns))
        return cls(key, Digest(digest), int(size), stamp, None if boot == _DURABLE else boot)


class Journal:
    """The journal of one source, read when it is first asked; what is appended then is for later readers."""

    def __init__(self, folder: Path, source: str) -> None:
        self._path = folder / hashlib.sha256(os.fsencode(source)).hexdigest()
        self._entries: dict[str, Entry] | None = None
        self._lines = 0

    def find(self, key: str) -> Entry | None:
        """Return the newest entry of that key, or None. Raises: StorageError when the journal can't be read."""
        return self._read().get(key)

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries; they win over older ones of their keys. Raises: StorageError."""
        text = b"".join(entry.encode() for entry in entries)
        if not text:
            return
        with os_errors("write", self._path):
            make_folder(self._path.parent)
            if self._lines > 2 * len(self._read()) + _SPARE_LINES:
                replace_file(self._path, b"".join(entry.encode() for entry in self._read().values()))
                self._lines = len(self._read())
            append_file(self._path, b"\n" + text)  # on lines of its own, also behind one that was torn

    def _read(self) -> dict[str, Entry]:
        if self._entries is None:
            self._entries = {}
            with os_errors("read", self._path):
                text = self._path.read_bytes() if self._path.is_file() else b""
            for line in text.split(b"\n"):
                if entry := Entry.parse(line):
                    self._entries[entry.key] = entry
                    self._lines += 1
        return self._entries


def dead_journals(folder: Path, is_there: Callable[[Digest], bool]) -> Iterator[Leftover]:
    """Yield the journals in ``folder`` that name no blob for which ``is_there``, and what a killed import left of one.

    Which source a journal is of can't be told from it; one whose blobs are all gone is of no use to any.
    Raises: StorageError.
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
            elif not any((entry := Entry.parse(line)) and is_there(entry.digest) for line in _lines(path)):
                yield Leftover(path, nbytes, "a journal of an import of which nothing is left")


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line.rstrip(b"\n") for line in file)
