"""Blobs: files named for the sha256 of their bytes, visible only when complete and durable (see session.py)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
    NotFoundError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor
from blobstore.io.durable import os_errors, remove_if_there
from blobstore.io.ranges import FileReader
from blobstore.names import Digest

_START, _HEX = "sha256-", "0123456789abcdef"
_PREFIX, _LENGTH = len(_START), len(_START) + 64
# The first Ollamas wrote "sha256:…"; later ones rename such files when they start (`fixBlobs`).
_OLD_START = "sha256:"
_OLD_NAME = re.compile(rf"{_OLD_START}[0-9a-f]{{64}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlobListing:
    """What lies in ``blobs/``: what is named for a digest, by its hex digits, and everything else.

    An entry may be anything that has such a name, a link or a folder too.
    """

    named: Mapping[str, os.DirEntry[str]]
    others: tuple[os.DirEntry[str], ...]


class BlobFolder:
    """The ``blobs/`` folder of a store.

    Links in it are not followed, and only regular files are opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def listing(self) -> BlobListing:
        """Return what lies in the folder.

        Of two names for one digest the older form is among the others.

        Raises: StorageError.
        """
        named: dict[str, os.DirEntry[str]] = {}
        others: list[os.DirEntry[str]] = []
        with os_errors("list", self.path):
            if not self.path.exists():
                return BlobListing({}, ())
            with os.scandir(self.path) as entries:
                for entry in entries:
                    name = entry.name
                    if (
                        name.startswith(_START)
                        and len(name) == _LENGTH
                        and not name[_PREFIX:].strip(_HEX)
                    ):
                        named[name[_PREFIX:]] = entry
                    else:
                        others.append(entry)
        for entry in [entry for entry in others if _OLD_NAME.fullmatch(entry.name)]:
            if named.setdefault(entry.name[_PREFIX:], entry) is entry:
                others.remove(entry)
        return BlobListing(named, tuple(sorted(others, key=lambda entry: entry.name)))

    def digests(self) -> set[str]:
        """Return the hex digits of the digests that regular files in the folder are named for.

        Raises: StorageError.

        What only begins as a blob's name does is among them; `sizes` has none of that. To look at
        every name takes its time.
        """
        with os_errors("list", self.path):
            if not self.path.exists():
                return set()
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return {name[_PREFIX:] for name in names if name.startswith((_START, _OLD_START))}

    def sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the bytes of those of ``digests`` whose blobs are regular files, by hex digits.

        Raises: StorageError.
        """
        sizes = {}
        for digest in (
            digest
            for digest in digests
            if len(digest) == _LENGTH - _PREFIX and not digest.strip(_HEX)
        ):
            for name in (f"{_START}{digest}", f"{_OLD_START}{digest}"):
                path = f"{self.path}/{name}"
                with suppress(NotFoundError), os_errors("access", path):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode):
                        sizes[digest] = status.st_size
                        break
        return sizes

    def is_missing(self, digest: str) -> bool:
        """Return True when no file has the name of a blob, by the hex digits of its digest: faster than `reader` fails."""
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
        """Return those of ``descriptors``, each digest once, that no blob of that size is there for."""
        by_digest = {descriptor.digest: descriptor for descriptor in descriptors}
        return [blob for blob in by_digest.values() if not self.has(blob.digest, blob.size)]

    def open(self, descriptor: Descriptor) -> FileReader:
        """Return a reader over a blob that has the descriptor's size.

        Its bytes are not checked here.

        Raises: as `reader`; CorruptDataError when its size differs, with ``blob``.
        """
        reader = self.reader(descriptor.digest)
        if reader.size != descriptor.size:
            reader.close()
            raise CorruptDataError(
                f"blob {descriptor.digest} has {reader.size:,} bytes, not {descriptor.size:,}",
                blob=str(descriptor.digest),
                path=reader.name,
            )
        return reader

    def reader(self, digest: Digest) -> FileReader:
        """Return a reader over the file that is named for the digest, of whatever size.

        Raises: NotFoundError when it is missing, StorageError unless it is a regular file that can
        be opened; with ``blob``.
        """
        try:
            return self._open_file(digest)
        except NotFoundError:
            raise NotFoundError(
                f"blob {digest} is missing", blob=str(digest), path=str(self.path)
            ) from None
        except BlobStoreError as error:
            error.blob = str(digest)
            raise

    def _open_file(self, digest: Digest) -> FileReader:
        path = self.path / digest.file_name
        # The second name is an old Ollama's. The first is tried again: FUSE looks a name up and
        # then opens what it led to: if another import replaces that in between, the file is
        # missing, though its name never is (bindfs).
        for name in (path, self.path / str(digest)):
            with suppress(NotFoundError):
                return FileReader(name, follow=False)
        return FileReader(path, follow=False)

    def read(self, descriptor: Descriptor, limit: int = MAX_DOCUMENT) -> bytes:
        """Return the bytes of a small blob (a config, a JSON document), checked against its digest.

        Raises: as `open`; LimitExceededError for a large one; DigestMismatchError when the bytes
        are not the digest's.
        """
        check_document_size(descriptor, limit)
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor)

    def check(self, descriptor: Descriptor) -> None:
        """Raise, as `open`, unless the blob is there, a regular file and of the descriptor's size."""
        self.open(descriptor).close()

    def has(self, digest: Digest, size: int) -> bool:
        """Return True when a regular file of that digest's name and that size is there.

        Its bytes are not read.
        """
        try:
            self.check(Descriptor(media_type="", digest=digest, size=size))
        except BlobStoreError:
            return False
        return True

    def remove(self, digest: Digest) -> bool:
        """Remove a blob; return False when there was none. Only for a holder of the exclusive lock.

        Raises: StorageError.
        """
        was_there = False
        for name in (digest.file_name, str(digest)):
            with os_errors("remove", self.path / name):
                was_there = remove_if_there(self.path / name) or was_there
        return was_there


def check_document_size(descriptor: Descriptor, limit: int = MAX_DOCUMENT) -> None:
    """Raise LimitExceededError for a document that is larger than documents are."""
    if descriptor.size > limit:
        message = f"limit exceeded: blob {descriptor.digest} has {descriptor.size:,} bytes, at most {limit:,} for a document"
        raise LimitExceededError(message, blob=str(descriptor.digest))


def checked_bytes(data: bytes, descriptor: Descriptor) -> bytes:
    """Return ``data``. Raises: DigestMismatchError when they are not the descriptor's."""
    if Digest.of(data) != descriptor.digest:
        raise DigestMismatchError(
            f"blob {descriptor.digest} is damaged: its bytes do not match its digest",
            blob=str(descriptor.digest),
        )
    return data
