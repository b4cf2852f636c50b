"""Notes that save work: the journal of imports, and summaries of models.

Journal: which blob each entry of an earlier import's plan became, so that no blob is made twice.
``.blobstore/journal/`` has one file for each source, which is appended to, with one line for each
entry: its key (importer/writing.py), the blob's digest, size and stamp, and whether the blob was
durable then. A line is a hint, and never trusted over the bytes: a blob is used without hashing it
only if it was durable, and while its file has that stamp (`JournalEntry.blob_at`). A torn or
foreign line is ignored.

Summaries: what a list shows of a model, by the sha256 of its manifest's bytes. A manifest names its
blobs by digest, so a summary never becomes wrong, whatever happens to the model's name.
``.blobstore/cache/summaries`` is the only file that reading a store writes: reading the headers of
600,000 blobs takes a minute, and reading this file a fraction of a second. It is written only if
the store belongs to the user who reads it: a ``sudo blobstore list`` must not leave folders that
the owner can't write to. A line with a wrong checksum, torn or foreign, is ignored; so are failures
to write the file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.hashing.stage import HashStage
from blobstore.io.durable import append_file, make_folder, os_errors, read_own, replace_file
from blobstore.io.ranges import FileReader
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp
from blobstore.store.ports import Leftover, Summary

_log = logging.getLogger("blobstore.store.local.store")

_LINE = re.compile(
    rb"^[0-9a-f]{64} [0-9a-f]{64} [0-9]{1,15} [0-9]{1,20} [0-9]{1,20} [-+]$",
    re.ASCII | re.MULTILINE,
)
_HEX = 64
_NAME = re.compile(r"[0-9a-f]{64}(?P<temporary>\.[0-9a-f]{16})?", re.ASCII)
_DURABLE, _WAITING = "-", "+"
_SPARE_LINES = 10_000
_AT_ONCE = 10_000
"""Entries that are encoded and written at a time: 2 MB."""
_LARGEST = 128 * 2**20
"""Bytes of a journal that is read: 600,000 entries, where a model has at most 110,000."""


class JournalEntry(NamedTuple):
    """The blob that an entry of a plan became; ``key`` hashes everything that its bytes depend on.

    ``is_durable``: neither a write error nor a power cut can change the blob any more. A tuple is
    made in a third of a dataclass's time, and an import may have 100,000 entries.
    """

    key: str
    digest: Digest
    size: int
    stamp: Stamp
    is_durable: bool = True

    def encode(self) -> bytes:
        """Return the entry as a line."""
        key, digest, size, stamp, is_durable = self
        state = _DURABLE if is_durable else _WAITING
        return f"{key} {digest.hex} {size} {stamp.inode} {stamp.mtime_ns} {state}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> JournalEntry | None:
        """Return the entry in a line, or None if the line is invalid."""
        if _LINE.fullmatch(line) is None:
            return None
        key, digest, size, inode, mtime_ns, state = line.decode().split(" ")
        stamp = Stamp(int(inode), int(mtime_ns))
        return cls(key, Digest(digest), int(size), stamp, state == _DURABLE)

    def blob_at(
        self,
        path: Path,
        stage: HashStage,
        *,
        verify: bool,
        settle: Callable[[int], None] = lambda _fd: None,
    ) -> FinishedBlob | None:
        """Return the blob at ``path`` if it has the entry's bytes, else None.

        It is hashed unless it was durable and its stamp is the entry's, and always with ``verify``.
        ``stage``: where. ``settle`` is called with its open descriptor before it is hashed.
        """
        try:
            with FileReader(path, follow=False) as reader:
                stamp = Stamp.of(reader.status())
                is_known = self.is_durable and stamp == self.stamp and stamp.is_sure
                if reader.size != self.size:
                    return None
                if verify or not is_known:
                    with os_errors("write back", path):
                        settle(reader.fileno())
                    reader.read_ahead()
                    if reader.digest(stage) != self.digest:
                        return None
                return FinishedBlob(self.digest, self.size, path.parent, stamp)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            _log.info("a finished blob is not used: %s", error)
            return None


class Journal:
    """The journal of one source, read at the first call; later entries are for later sessions.

    A journal that can't be read is taken for empty: everything is made again.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._path = folder / hashlib.sha256(os.fsencode(source)).hexdigest()
        self._newest: dict[bytes, bytes] | None = None
        self._lines = 0

    def find(self, key: str) -> JournalEntry | None:
        """Return the newest entry of that key, or None."""
        line = self._read().get(key.encode())
        return None if line is None else JournalEntry.parse(line)

    def append(self, entries: Iterable[JournalEntry]) -> None:
        """Add entries, which replace older ones of their keys. Raises: StorageError.

        A journal that is too large is written anew.
        """
        lines = map(JournalEntry.encode, entries)
        while text := b"".join(islice(lines, _AT_ONCE)):
            self._append(b"\n" + text)  # the last line may be torn

    def _append(self, text: bytes) -> None:
        newest = self._read()
        with os_errors("write", self._path):
            make_folder(self._path.parent)
            if self._lines > 2 * len(newest) + _SPARE_LINES or _size(self._path) > _LARGEST:
                replace_file(self._path, b"".join(line + b"\n" for line in newest.values()))
                self._lines = len(newest)
            append_file(self._path, text)

    def _read(self) -> dict[bytes, bytes]:
        """Return the newest line of each key."""
        if self._newest is None:
            try:
                lines = _lines(self._path)
            except BlobStoreError as error:
                if not isinstance(error, NotFoundError):
                    _log.warning("the journal can't be read, so all blobs are made: %s", error)
                lines = []
            self._newest = {line[:_HEX]: line for line in lines}
            self._lines = len(lines)
        return self._newest


def dead_journals(folder: Path, is_there: Callable[[Digest], bool]) -> Iterator[Leftover]:
    """Yield the journals in ``folder`` that are of no use, and unfinished ones of killed imports.

    A journal is of no use if ``is_there`` is False for all of its blobs, or if it is too large to
    be read. A journal does not tell which source it is of. Raises: StorageError.
    """
    with os_errors("read", folder):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in paths:
            match = _NAME.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            nbytes = path.stat().st_size
            if match["temporary"]:
                yield Leftover(path, nbytes, "left unfinished by a killed import")
            elif nbytes > _LARGEST:
                yield Leftover(path, nbytes, "a journal that is too large to be read")
            elif not any(
                is_there(Digest(line[_HEX + 1 : 2 * _HEX + 1].decode())) for line in _lines(path)
            ):
                yield Leftover(path, nbytes, "a journal of an import whose blobs are all gone")


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a journal that are entries.

    Raises: NotFoundError; LimitExceededError; StorageError.
    """
    return _LINE.findall(read_own(path, _LARGEST))


def _size(path: Path) -> int:
    """Return the size of a file, 0 if it has none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


_VERSION = b"1"
"""Increases when the same blobs get another summary."""
_LARGEST_CACHE = 64 * 2**20
"""Bytes of a file that is read: 400,000 models. A larger one is not ours, and is replaced."""
_SUMMARY_LINE = re.compile(
    rb"^(?P<text>(?P<key>[0-9a-f]{64}) (?P<size>[0-9]{1,18}) (?P<parameters>[0-9]{1,24})"
    rb" (?P<plain>[01]) (?P<kind>[0-9A-Za-z_]{0,32}) %b) (?P<sum>[0-9a-f]{8})$" % _VERSION,
    re.ASCII | re.MULTILINE,
)


class SummaryCache:
    """The summaries of a store, written only by the owner of ``owner``. See `Summaries`."""

    def __init__(self, path: Path, owner: Path) -> None:
        self._path = path
        self._owner = owner

    def read(self) -> dict[str, Summary]:
        """Return the summaries by the sha256 of their manifests, in hex digits.

        The result is empty if the file can't be read.
        """
        try:
            text = read_own(self._path, _LARGEST_CACHE)
        except BlobStoreError as error:
            if not isinstance(error, NotFoundError):
                _log.info("the summaries of models can't be read: %s", error)
            return {}
        return {
            match["key"].decode(): Summary(
                size=int(match["size"]),
                parameters=int(match["parameters"]),
                quant_type=match["kind"].decode(),
                is_plain=match["plain"] == b"1",
            )
            for match in _SUMMARY_LINE.finditer(text)
            if zlib.crc32(match["text"]) == int(match["sum"], 16)
        }

    def add(self, summaries: Mapping[str, Summary]) -> None:
        """Add summaries, if the file belongs to this user. Failures are ignored."""
        encoded = (_encoded(key, summary) for key, summary in summaries.items())
        lines = [line for line in encoded if _SUMMARY_LINE.fullmatch(line[:-1])]
        if not lines or not is_ours(self._path, self._owner):
            return
        try:
            with os_errors("write", self._path):
                make_folder(self._path.parent, durable=False)
                is_too_large = _size(self._path) > _LARGEST_CACHE
                write = replace_file if is_too_large else append_file
                write(self._path, b"\n" + b"".join(lines))
        except BlobStoreError as error:
            _log.info("the summaries of models are not kept: %s", error)

    def keep(self, keys: Collection[str]) -> None:
        """Remove all but those of ``keys``. Only for a holder of the store's exclusive lock.

        Raises: StorageError.
        """
        known = self.read()
        with os_errors("write", self._path):
            if known.keys() - set(keys) or _size(self._path) > _LARGEST_CACHE:
                kept = sorted(known.keys() & set(keys))
                replace_file(self._path, b"".join(_encoded(key, known[key]) for key in kept))


def is_ours(path: Path, owner: Path) -> bool:
    """Return True if ``owner`` belongs to this user, and no folder from it to ``path`` is a link.

    A link is another program's.
    """
    try:
        between = (folder for folder in path.parents if folder.is_relative_to(owner))
        if any(folder.is_symlink() for folder in between if folder != owner):
            return False
        return owner.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _encoded(key: str, summary: Summary) -> bytes:
    """Return the line for a manifest with the sha256 ``key``."""
    numbers = b"%d %d %d" % (summary.size, summary.parameters, summary.is_plain)
    text = b"%b %b %b %b" % (key.encode(), numbers, summary.quant_type.encode(), _VERSION)
    return b"%b %08x\n" % (text, zlib.crc32(text))
