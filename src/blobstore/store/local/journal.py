"""Notes that spare work: the journal of imports, and summaries of models.

Summaries: what a model is in short, remembered by the sha256 of its manifest's bytes.

A manifest names its blobs by their digests, so what follows from them never changes: a line that is
there is right for ever, whatever becomes of the model's name. ``.blobstore/cache/summaries`` is the
only thing that reading a store writes: to read the headers of 600,000 blobs takes a minute, and
this file a fraction of a second. It is written only where the store belongs to the user who reads
it: a ``sudo blobstore list`` must not leave folders that the owner can't write to. A line with a
wrong checksum, torn or foreign, is ignored; so are failures to write the file.

Journal: which blob each entry of an earlier import's plan became, so that nothing is made twice.

One file a source in ``.blobstore/journal/``, appended to; one line an entry: its key
(importer/writing.py), the blob's digest, size and stamp, and whether the blob was durable then. A
line is a hint and never trusted over the bytes: a blob is taken for what its line says only if it
was durable and while its file has that stamp; otherwise it is hashed (`LocalSession.find`). A torn
or foreign line is passed over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import append_file, make_folder, os_errors, read_own, replace_file
from blobstore.names import Digest
from blobstore.store.local.leftovers import Leftover
from blobstore.store.local.writer import Stamp
from blobstore.store.ports import Summary

_log = logging.getLogger("blobstore.store.local.store")

_LINE = re.compile(
    rb"^[0-9a-f]{64} [0-9a-f]{64} [0-9]{1,15} [0-9]{1,20} [0-9]{1,20} [-+]$",
    re.ASCII | re.MULTILINE,
)
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
    """The journal of one source, read when it is first asked.

    What is appended then is for later readers.

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
        """Add entries; they win over older ones of their keys.

        A journal that is too large is started anew.

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
            append_file(
                self._path, b"\n" + text
            )  # on lines of its own, also behind one that was torn

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

    Which source a journal is of can't be told from it; one whose blobs are all gone, or that is too
    large to be read, is of no use to any. Raises: StorageError.
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
            elif not any(
                is_there(Digest(line[_HEX + 1 : 2 * _HEX + 1].decode())) for line in _lines(path)
            ):
                yield Leftover(path, nbytes, "a journal of an import of which nothing is left")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a journal that are entries.

    Raises: NotFoundError; LimitExceededError; StorageError.
    """
    return (match[0] for match in _LINE.finditer(read_own(path, _LARGEST)))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


_VERSION = b"1"
"""Goes up when the same blobs are summarized otherwise."""
_LARGEST_CACHE = 64 * 2**20
"""Bytes of a file that is read: 400,000 models.

A larger one is not ours, and the next list starts it anew.
"""
_SUMMARY_LINE = re.compile(
    rb"^(?P<text>(?P<key>[0-9a-f]{64}) (?P<size>[0-9]{1,18}) (?P<parameters>[0-9]{1,24}) (?P<plain>[01])"
    rb" (?P<kind>[0-9A-Za-z_]{0,32}) %b) (?P<sum>[0-9a-f]{8})$" % _VERSION,
    re.ASCII | re.MULTILINE,
)


class SummaryCache:
    """The summaries of a store. ``owner``: the folder whose owner may write them."""

    def __init__(self, path: Path, owner: Path) -> None:
        self._path = path
        self._owner = owner

    def read(self) -> dict[str, Summary]:
        """Return the summaries by the sha256 of their manifests, in hex digits.

        None when the file can't be read.
        """
        try:
            text = read_own(self._path, _LARGEST_CACHE)
        except NotFoundError:
            return {}
        except BlobStoreError as error:
            _log.info("the summaries of models can't be read: %s", error)
            return {}
        found = {}
        for match in _SUMMARY_LINE.finditer(text):
            if zlib.crc32(match["text"]) == int(match["sum"], 16):
                size, parameters, is_plain = (
                    int(match[name]) for name in ("size", "parameters", "plain")
                )
                found[match["key"].decode()] = Summary(
                    size, parameters, match["kind"].decode(), bool(is_plain)
                )
        return found

    def add(self, summaries: Mapping[str, Summary]) -> None:
        """Remember summaries, where that is ours to do.

        Nothing is raised: the next reader has more to do, that is all.
        """
        fit = {
            key: summary
            for key, summary in summaries.items()
            if _SUMMARY_LINE.fullmatch(_encoded(key, summary)[:-1])
        }
        if not fit or not self._is_ours():
            return
        try:
            with os_errors("write", self._path):
                make_folder(self._path.parent, durable=False)
                write = replace_file if self._is_too_large() else append_file
                write(
                    self._path,
                    b"\n" + b"".join(_encoded(key, summary) for key, summary in fit.items()),
                )
        except BlobStoreError as error:
            _log.info("the summaries of models are not remembered: %s", error)

    def keep(self, keys: Collection[str]) -> None:
        """Forget all but those of ``keys``. Only for a holder of the store's exclusive lock.

        Raises: StorageError.
        """
        known = self.read()
        if known.keys() - set(keys) or self._is_too_large():
            with os_errors("write", self._path):
                lines = (
                    _encoded(key, summary) for key, summary in sorted(known.items()) if key in keys
                )
                replace_file(self._path, b"".join(lines))

    def _is_too_large(self) -> bool:
        try:
            return self._path.lstat().st_size > _LARGEST_CACHE
        except OSError:
            return False

    def _is_ours(self) -> bool:
        try:
            if any(folder.is_symlink() for folder in (self._path.parent, self._path.parent.parent)):
                return False  # it would be written where another program put something
            return self._owner.stat().st_uid == os.geteuid()
        except OSError:
            return False


def _encoded(key: str, summary: Summary) -> bytes:
    """Return the line for a manifest whose sha256 is ``key``."""
    numbers = b"%d %d %d" % (summary.size, summary.parameters, summary.is_plain)
    text = b"%b %b %b %b" % (key.encode(), numbers, summary.quant_type.encode(), _VERSION)
    return b"%b %08x\n" % (text, zlib.crc32(text))
