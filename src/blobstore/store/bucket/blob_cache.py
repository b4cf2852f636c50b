"""A bounded cache of blobs in a folder, which is a content-addressed store itself.

Blobs are hashed as they come, and appear under their digests when they are whole and right. When
room is needed, those are removed that were not used for the longest time; an empty file for each
says when that was. A blob that was written to since then is hashed before it is used, and fetched
again if it is damaged. A process that has a blob mapped keeps its bytes until it closes it.

`BlobCache.bring` fetches blobs; until then they are read from the bucket.

One process at a time brings or removes blobs; others read meanwhile. What a killed process has
fetched is hashed again and used. A folder that was not made as a cache is refused: removing blobs
from a store would lose models.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Descriptor
from blobstore.io.durable import listed, make_folder, os_errors, replace_file
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.io.workers import each
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store
from blobstore.store.local.store_folder import PRIVATE
from blobstore.store.ports import check_blob_size, unique, wrong_bytes

_log = logging.getLogger("blobstore.store.bucket")
CACHE_NBYTES = 50 * 10**9
"""Default limit of a cache, in bytes."""
_AT_ONCE = 8
_MARK = "cache-of-buckets"
_WAIT_S = 24 * 3600.0


class BlobCache:
    """Blobs in ``folder``, of at most ``limit`` bytes. Safe to share between threads."""

    def __init__(self, folder: str | os.PathLike[str], limit: int = CACHE_NBYTES) -> None:
        """Raises: UsageError for a folder that is something else; StorageError."""
        if Path(folder).is_file():
            raise StorageError(f"the cache {folder} is not a folder", path=os.fspath(folder))
        self.store = Store(folder)
        self.limit = limit
        self._lock = StoreLock(self.store.root / PRIVATE / "caching")
        self._used = self.store.root / PRIVATE / "used"
        self._mark = self.store.root / PRIVATE / _MARK
        self._require_cache()

    def _require_cache(self) -> None:
        root = self.store.root
        with os_errors("access", root):
            names = {entry.name for entry in listed(root)} - {PRIVATE}
            if not names or (self._mark.exists() and "manifests" not in names):
                return
        message = f"{root} is not a cache, and contains {min(names)!r}"
        hint = "Give an empty folder: a cache removes files that are not used."
        raise UsageError(message, path=str(root), hint=hint)

    def find(self, descriptor: Descriptor) -> FileReader | None:
        """Return a reader over a blob, which counts as used now; None if it is not there."""
        with suppress(BlobStoreError):
            reader = self.store.blobs.reader(descriptor.digest)
            try:
                check_blob_size(descriptor, reader.size, reader.name)
                used_at = self._used_at(descriptor.digest.file_name)
                is_changed = used_at is None or reader.status().st_mtime > used_at
                if is_changed and reader.digest() != descriptor.digest:
                    raise wrong_bytes(descriptor, reader)
            except BlobStoreError as error:
                reader.close()
                _log.info("a cached blob is not used: %s", error)
                raise
            self._use(descriptor)
            return reader
        return None

    def _use(self, descriptor: Descriptor) -> None:
        """Note that a blob is used now. Its own file keeps its times, which tell of a change."""
        with suppress(OSError):
            self._used.mkdir(parents=True, exist_ok=True)
            (self._used / descriptor.digest.file_name).touch()

    def bring(
        self, descriptors: Iterable[Descriptor], read: Callable[[Descriptor], OpenReader]
    ) -> None:
        """Fetch those blobs that are missing, in their order, several at a time.

        ``read`` opens one. Raises: LimitExceededError if all together are larger than the cache;
        DigestMismatchError for a blob with other bytes; NotFoundError, CorruptDataError;
        StorageError.
        """
        wanted = unique(descriptors)
        if not self._missing(wanted):
            return
        nbytes = sum(blob.size for blob in wanted)
        if nbytes > self.limit:
            root = self.store.root
            message = f"limit exceeded: {nbytes:,} bytes, and the cache {root} holds {self.limit:,}"
            raise LimitExceededError(message, path=str(root), hint="Give it more: --cache-size.")
        with os_errors("write to the cache", self.store.root):
            make_folder(self._mark.parent, durable=False)
            if not self._mark.exists():
                replace_file(self._mark, b"Blobs that are not used are removed from this folder.\n")
        with self._lock.exclusive(_WAIT_S):
            missing = self._missing(wanted)  # another process may have brought some
            self._make_room(sum(blob.size for blob in missing), wanted)
            self._fetch(missing, read)

    def _missing(self, wanted: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those that are missing; the others count as used now."""
        missing = []
        for blob in wanted:
            reader = self.find(blob)
            if reader is None:
                missing.append(blob)
            else:
                reader.close()
        return missing

    def _fetch(
        self, missing: Sequence[Descriptor], read: Callable[[Descriptor], OpenReader]
    ) -> None:
        with self.store.session() as session:

            def take(descriptor: Descriptor) -> None:
                with read(descriptor) as reader:
                    session.add(descriptor, reader)

            try:
                each(missing, take, _AT_ONCE, name="cache")
            finally:  # a broken connection must not lose what came before
                session.replace(missing)
        for blob in missing:
            self._use(blob)

    def _make_room(self, nbytes: int, kept: Sequence[Descriptor]) -> None:
        """Remove blobs that are not among ``kept`` until so many bytes fit, the oldest first.

        They have to fit the limit, and the disk.
        """
        files: list[tuple[float, int, Path]] = []
        for entry in self.store.blobs.listing().named.values():
            with suppress(OSError):  # it was removed
                status = entry.stat(follow_symlinks=False)
                used_at = self._used_at(entry.name) or status.st_mtime
                files.append((used_at, status.st_size, Path(entry.path)))
        names = {blob.digest.file_name for blob in kept}
        used = sum(size for _, size, _ in files)
        with os_errors("access", self.store.root):
            most = min(self.limit, used + shutil.disk_usage(self.store.root).free)
        for _, size, path in sorted(files):
            if used + nbytes <= most:
                return
            if path.name not in names:
                with os_errors("remove", path), suppress(NotFoundError, FileNotFoundError):
                    path.unlink()
                    (self._used / path.name).unlink(missing_ok=True)
                used -= size

    def _used_at(self, name: str) -> float | None:
        try:
            return (self._used / name).stat().st_mtime
        except OSError:
            return None
