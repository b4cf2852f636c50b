"""Blobs in a folder: files named for the sha256 of their bytes.

A blob is visible only when it is complete and durable (see session.py).
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats.documents import Descriptor
from blobstore.formats.safetensors.header import Header, headers_in
from blobstore.hashing.stage import HashStage
from blobstore.io.budget import Budget
from blobstore.io.durable import (
    os_errors,
    remove_if_there,
    write_back,
)
from blobstore.io.ranges import FileReader, is_coarse
from blobstore.names import Digest
from blobstore.store.ports import (
    Blobs,
    BlobState,
    blob_not_found,
    of_size,
    unique,
)

_log = logging.getLogger("blobstore.store.local.store")

_START = "sha256-"
_PREFIX = len(_START)
_is_hex = re.compile(r"[0-9a-f]{64}", re.ASCII).fullmatch
# The first Ollamas wrote "sha256:…"; later ones rename such files when they start (`fixBlobs`).
_OLD_START = "sha256:"
_OLD_NAME = re.compile(rf"{_OLD_START}[0-9a-f]{{64}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlobListing:
    """The entries of ``blobs/``: those named for a digest, by its hex digits, and all others.

    An entry may be of any kind, also a link or a folder.
    """

    named: Mapping[str, os.DirEntry[str]]
    others: tuple[os.DirEntry[str], ...]


@dataclass(eq=False)
class BlobFolder(Blobs):
    """The ``blobs/`` folder of a store: no link is followed, only regular files are opened."""

    path: Path

    def listing(self) -> BlobListing:
        """Return what is in the folder.

        If one digest has two names, the older form is among the others. Raises: StorageError.
        """
        named: dict[str, os.DirEntry[str]] = {}
        others: list[os.DirEntry[str]] = []
        for entry in self._entries():
            name = entry.name
            if name.startswith(_START) and _is_hex(name, _PREFIX):
                named[name[_PREFIX:]] = entry
            else:
                others.append(entry)
        for entry in [entry for entry in others if _OLD_NAME.fullmatch(entry.name)]:
            if named.setdefault(entry.name[_PREFIX:], entry) is entry:
                others.remove(entry)
        return BlobListing(named, tuple(sorted(others, key=lambda entry: entry.name)))

    def digests(self) -> set[str]:
        """Return the digests, in hex digits, that regular files in the folder are named for.

        A name that only begins like a blob's is among them, because checking every name takes long;
        `sizes` ignores it. Raises: StorageError.
        """
        with os_errors("list", self.path):
            entries = self._entries()
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return {name[_PREFIX:] for name in names if name.startswith((_START, _OLD_START))}

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os_errors("list", self.path):
            if self.path.exists():
                with os.scandir(self.path) as entries:
                    yield from entries

    def states(self, digests: Iterable[str]) -> dict[str, BlobState]:
        """Return the states of those of ``digests`` whose blobs are regular files.

        Digests are given and returned in hex digits. Raises: StorageError.
        """
        states = {}
        with os_errors("access", self.path):  # once: there may be 600,000
            for digest in filter(_is_hex, digests):
                for start in (_OLD_START, _START):
                    path = f"{self.path}/{start}{digest}"
                    with suppress(FileNotFoundError):
                        status = os.lstat(path)
                        if stat.S_ISREG(status.st_mode):
                            states[digest] = BlobState(status.st_size, status.st_mtime, Path(path))
        return states

    def is_missing(self, digest: str) -> bool:
        """Return True if no file has a blob's name, given in hex digits: faster than `reader`."""
        for start in (_START, _OLD_START):
            try:
                os.lstat(f"{self.path}/{start}{digest}")
            except FileNotFoundError:
                continue
            except OSError:  # opening it raises the error that says why
                pass
            return False
        return True

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [
            blob
            for blob in unique(descriptors)
            if self.is_missing(blob.digest.hex) or not self.has(blob.digest, blob.size)
        ]

    def open(self, descriptor: Descriptor) -> FileReader:
        return of_size(descriptor, self.reader(descriptor.digest))

    def reader(self, digest: Digest) -> FileReader:
        """Return a reader over the file that is named for the digest, of whatever size.

        Raises: NotFoundError if it is missing, StorageError unless it is a regular file that can be
        opened; with ``blob``.
        """
        # The second name is an old Ollama's. The first is tried again: FUSE looks a name up and
        # then opens the file that it found. If another import replaces that file in between, it is
        # missing, though its name never is (bindfs).
        for start in (_START, _OLD_START, _START):
            try:
                return FileReader(f"{self.path}/{start}{digest.hex}", follow=False)
            except NotFoundError:
                continue
            except BlobStoreError as error:
                raise error.about(blob=str(digest)) from error
        hint = "Restore it: blobstore repair NAME --from SOURCE, or pull the model again."
        raise blob_not_found(digest, str(self.path), hint=hint)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> Sequence[Header | None]:
        # None for a blob that has an old Ollama's name.
        files = [(f"{_START}{blob.digest.hex}", blob.size) for blob in descriptors]
        return headers_in(self.path, files, budget)

    def check(self, descriptor: Descriptor) -> None:
        """Raise, as `open`, unless the blob is a regular file of the descriptor's size."""
        self.open(descriptor).close()

    def has(self, digest: Digest, size: int) -> bool:
        """Return True if the blob is a regular file of that size; it is not read."""
        try:
            self.check(Descriptor(media_type="", digest=digest, size=size))
        except BlobStoreError:
            return False
        return True

    def remove(self, digest: Digest) -> bool:
        """Remove a blob; return False if it did not exist.

        Only for a holder of the store's exclusive lock. Raises: StorageError.
        """
        was_there = False
        for name in (digest.file_name, str(digest)):
            with os_errors("remove", self.path / name):
                was_there = remove_if_there(self.path / name) or was_there
        return was_there


class Stamp(NamedTuple):
    """Tells whether a file was written to since: its inode and the time of its last write.

    The part of a `FileIdentity` that a journal can keep: the number of a device may change when the
    machine restarts, and the time of the last change of any kind does with every link.
    """

    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_mtime_ns)


# A blob gets a new time from this age on, before it is used: Ollama spares young ones.
_OLD_S = 30 * 60


def old_ns() -> float:
    """Return the time of last writes from which on blobs are young, in nanoseconds."""
    return (time.time() - _OLD_S) * 1e9


def renew(path: str) -> Stamp:
    """Give a file a time that a starting Ollama spares until its manifest is there.

    Return its stamp. Raises: OSError.
    """
    status = os.lstat(path)
    if status.st_nlink == 1:  # else it is another store's file too, whose times are not ours
        os.utime(path)
        status = os.lstat(path)
    return Stamp.of(status)


def kept_young(blob: FinishedBlob) -> FinishedBlob | None:
    """Return a blob with a time that a starting Ollama spares; None if it can't be given one."""
    if blob.stamp.mtime_ns > old_ns():
        return blob
    try:
        return blob._replace(stamp=renew(os.fspath(blob.path)))
    except OSError:  # it is another user's, or has just been removed: it is made again
        return None


_ENTRY = re.compile(
    r"([0-9a-f]{64}) ([0-9]{1,15}) ([1-9][0-9]{0,19}) ([0-9]{1,20}) (durable|waiting)", re.ASCII
)
NAMED = Stamp(0, 0)
"""The stamp of a blob whose bytes are those of its name, because only such are kept (locks.py)."""


class FinishedBlob(NamedTuple):
    """A complete blob: its digest, its size in bytes, the folder of its file, the file's stamp.

    ``is_durable``: neither a write error nor a power cut can change the blob any more. A tuple,
    because an import may have 100,000 of them.
    """

    digest: Digest
    size: int
    folder: Path
    stamp: Stamp
    is_durable: bool = True

    @property
    def path(self) -> Path:
        """Its file, in a session's folder or in the store's."""
        return self.folder / self.digest.file_name

    def encode(self) -> str:
        state = "durable" if self.is_durable else "waiting"
        return f"{self.digest.hex} {self.size} {self.stamp.inode} {self.stamp.mtime_ns} {state}"

    @classmethod
    def parse(cls, text: str, folder: Path) -> FinishedBlob | None:
        if (match := _ENTRY.fullmatch(text)) is None:
            return None
        digest, size, inode, mtime_ns, state = match.groups()
        stamp = Stamp(int(inode), int(mtime_ns))
        return cls(Digest(digest), int(size), folder, stamp, state == "durable")

    def checked(self, stage: HashStage, *, verify: bool) -> FinishedBlob | None:
        """Return the blob as it is in its folder, durable, or None if it has other bytes now.

        It is hashed unless it was durable and its stamp is the same, and always with ``verify``.
        ``stage``: where. It is written back before, and hashed from the disk: the error of a
        failed write may have been reported to other processes only.
        """
        path = self.path
        if not os.path.lexists(path):  # as most of a hundred thousand
            return None
        try:
            with FileReader(path, follow=False) as reader:
                stamp = Stamp.of(reader.status())
                is_same = stamp == self.stamp and not is_coarse(stamp.mtime_ns)
                if reader.size != self.size:
                    return None
                if verify or not (self.is_durable and (is_same or self.stamp == NAMED)):
                    with os_errors("write back", path):
                        write_back(reader.fileno())
                    reader.read_ahead()
                    if reader.digest(stage) != self.digest:
                        return None
                return self._replace(stamp=stamp, is_durable=True)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            _log.info("a finished blob is not used: %s", error)
            return None
