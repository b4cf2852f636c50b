"""The objects of a store in a bucket: blobs, manifests that move by conditional writes, signatures.

An object under a blob's key is not trusted: any user with write permission could have put it
there. Its size is checked when it is opened, and its bytes by everything that keeps them.

A blob is never changed. It is written only if it is missing, and its bytes are known to be right
before its object appears. A large blob is written in parts, which become an object together: first
the bucket is asked for it, and two writers at once replace it by the same bytes.

Signatures are ``.blobstore/signatures/<sha256 of a manifest>/<sha256>``: the keys and bytes are
those of a store in a folder (store/local/backups.py).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import MAX_MANIFEST, Descriptor
from blobstore.formats.oci import MAX_SIGNATURE_FILE
from blobstore.io.durable import list_folder, make_folder, os_errors, replace_file
from blobstore.io.objects import Bucket, ObjectReader, ObjectState, ObjectVersion
from blobstore.io.ranges import FileReader, OpenReader
from blobstore.io.workers import each, results_of
from blobstore.names import Digest, ModelName
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store
from blobstore.store.local.store_folder import PRIVATE
from blobstore.store.ports import (
    Blobs,
    KeptSignatures,
    Manifests,
    check_blob_size,
    checked_pieces,
    name_among,
    unique,
    wrong_bytes,
)
from blobstore.store.references import References

BLOBS = "blobs/"
MANIFESTS = "manifests/"
_PRIVATE = ".blobstore/"
LEASES = f"{_PRIVATE}leases/"
MADE = f"{_PRIVATE}made/"
PROBES = f"{_PRIVATE}probes/"
SIGNATURES = f"{_PRIVATE}signatures/"
SWEEP = f"{_PRIVATE}sweep"

REQUESTS = 16
"""Requests at once for many small objects."""
SMALL = 4 * 2**20
"""Bytes of a blob that is written in one request."""
_PART = 8 * 2**20
# S3 takes 10,000 parts of one object (Amazon S3 User Guide, "Multipart upload limits").
_MOST_PARTS = 9_000
# Parts of one blob at once.
_AT_ONCE = 4


def blob_key(digest: Digest) -> str:
    """Return the key of a blob."""
    return BLOBS + digest.file_name


def manifest_key(name: ModelName) -> str:
    """Return the key of a model's manifest."""
    return MANIFESTS + "/".join(name.path_parts)


def digest_in(key: str) -> Digest | None:
    """Return the digest of the blob with a key, None if it is not the key of a blob."""
    return Digest.from_file_name(key.removeprefix(BLOBS)) if key.startswith(BLOBS) else None


def model_of(key: str) -> ModelName | None:
    """Return the name of the model whose manifest has a key, None if it is not that of a model."""
    return ModelName.of_path(key.removeprefix(MANIFESTS).split("/"))


@dataclass(eq=False)
class BucketManifests(Manifests):
    """The manifests of a bucket, and when each was written, as far as that was asked."""

    _bucket: Bucket
    _modified: dict[ModelName, datetime] = field(default_factory=dict)

    def names(self) -> list[ModelName]:
        pairs = [(model_of(state.key), state) for state in self._bucket.objects(MANIFESTS)]
        self._modified = {name: state.modified for name, state in pairs if name is not None}
        return sorted(self._modified)

    def strays(self) -> list[ObjectState]:
        return [state for state in self._bucket.objects(MANIFESTS) if model_of(state.key) is None]

    def stored_name(self, name: ModelName) -> ModelName:
        return name if self.has(name) else name_among(self.names(), name)

    def has(self, name: ModelName) -> bool:
        try:
            self._modified[name] = self._bucket.head(manifest_key(name)).modified
        except NotFoundError:
            return False
        return True

    def text(self, name: ModelName) -> bytes:
        raw, _ = self.state(name)
        if raw is None:
            message = f"model {str(name)!r} not found in {self._bucket.address}"
            hint = "blobstore list shows the models of the store."
            raise ModelNotFoundError(message, model=str(name), hint=hint)
        return raw

    def texts(self) -> Iterator[tuple[ModelName, bytes | BlobStoreError]]:
        names = self.names()
        texts = results_of(names, self.text_or_error, REQUESTS, name="manifests")
        return ((name, raw) for name, raw in zip(names, texts, strict=True) if raw is not None)

    def modified_at(self, name: ModelName) -> datetime | None:
        # By the server's clock, as it was listed last.
        if name not in self._modified:
            self.has(name)
        return self._modified.get(name)

    def state(self, name: ModelName) -> tuple[bytes | None, ObjectVersion | None]:
        """Return a manifest's bytes, and the version of its object; twice None if it is missing."""
        try:
            return self._bucket.get(manifest_key(name), limit=MAX_MANIFEST)
        except NotFoundError:
            return None, None

    def put(self, name: ModelName, raw: bytes, before: ObjectVersion | None) -> None:
        """Move a tag, if it has not moved since ``before``. Raises: ConflictError otherwise."""
        self._bucket.replace(manifest_key(name), raw, before)
        self._modified.pop(name, None)

    def remove(self, name: ModelName) -> None:
        """Remove a tag; a missing one is not an error."""
        self._bucket.delete([manifest_key(name)])
        self._modified.pop(name, None)


@dataclass(eq=False)
class BucketBlobs(Blobs):
    """The blobs of a bucket; a ``cache`` keeps some of them."""

    headers_at_once = REQUESTS

    _bucket: Bucket
    _manifests: BucketManifests
    _cache: BlobCache | None = None

    def open(self, descriptor: Descriptor) -> OpenReader:
        if self._cache is not None and (cached := self._cache.find(descriptor)) is not None:
            return cached
        key = blob_key(descriptor.digest)
        check_blob_size(descriptor, self.size(descriptor.digest), self._bucket.place(key))
        return ObjectReader(self._bucket, key, descriptor.size)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [blob for blob, size in self.sizes(unique(descriptors)) if size != blob.size]

    def digests(self) -> set[str]:
        # Those that manifests name. Sessions write the others, before a manifest.
        named = References.read(self._manifests.texts(), (), (), None).needed()
        return named & {digest.hex for digest in self.listing()} if named else named

    def size(self, digest: Digest) -> int | None:
        try:
            return self._bucket.head(blob_key(digest)).size
        except NotFoundError:
            return None

    def sizes(self, blobs: Sequence[Descriptor]) -> list[tuple[Descriptor, int | None]]:
        sizes = results_of([blob.digest for blob in blobs], self.size, REQUESTS, name="sizes")
        return list(zip(blobs, sizes, strict=True))

    def listing(self) -> dict[Digest, ObjectState]:
        pairs = ((digest_in(state.key), state) for state in self._bucket.objects(BLOBS))
        return {digest: state for digest, state in pairs if digest is not None}

    def write(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        """Write a blob whose bytes ``reader`` has, unless it is there; return whether it was not.

        An object of another size in its place is replaced. Raises: DigestMismatchError for other
        bytes, and nothing is written then.
        """
        if descriptor.size <= SMALL:
            return self._write_small(descriptor, reader)
        if self.size(descriptor.digest) == descriptor.size:
            return False
        part = max(_PART, descriptor.size // _MOST_PARTS)
        pieces = checked_pieces(descriptor, reader)
        self._bucket.upload(blob_key(descriptor.digest), pieces, part=part, at_once=_AT_ONCE)
        return True

    def _write_small(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
        key = blob_key(descriptor.digest)
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError:
            if self.size(descriptor.digest) == descriptor.size:
                return False
            self._bucket.put(key, data)  # it had another size, or was removed meanwhile
        return True


@dataclass(eq=False)
class BucketSignatures(KeptSignatures):
    """The signatures of a bucket."""

    _bucket: Bucket
    at_once = REQUESTS

    def _keys(self, digest: Digest) -> list[str]:
        folder = f"{SIGNATURES}{digest.hex}/"
        names = (state.key.removeprefix(folder) for state in self._bucket.objects(folder))
        return sorted(name for name in names if Digest.from_file_name(f"sha256-{name}"))

    def _raw(self, digest: Digest, key: str) -> tuple[bytes, str]:
        place = f"{SIGNATURES}{digest.hex}/{key}"
        return self._bucket.get(place, limit=MAX_SIGNATURE_FILE)[0], self._bucket.place(place)

    def _write(self, digest: Digest, new: Mapping[str, bytes]) -> int:
        def put(key: str) -> bool:
            try:
                self._bucket.put(f"{SIGNATURES}{digest.hex}/{key}", new[key], if_absent=True)
            except ConflictError:  # another process has just added the same one
                return False
            return True

        return sum(results_of(list(new), put, REQUESTS, name="signatures"))


_log = logging.getLogger("blobstore.store.bucket")
CACHE_NBYTES = 50 * 10**9
"""Default limit of a cache, in bytes."""
_AT_ONCE = 8
_MARK = "cache-of-buckets"
_WAIT_S = 24 * 3600.0


class BlobCache:
    """A cache of blobs in ``folder``, itself a store, of at most ``limit`` bytes.

    Blobs are hashed as they arrive, and appear under their digests when they are whole and right.
    When room is needed, the least recently used ones are removed; an empty file for each says when
    it was used. A blob that was written to since then is hashed before it is used, and fetched
    again if it is damaged. A process that has a blob mapped keeps its bytes until it closes it.

    `bring` fetches blobs; until then they are read from the bucket. One process at a time brings or
    removes blobs; others read meanwhile. What a killed process has fetched is hashed again and
    used. A folder that was not made as a cache is refused: removing blobs from a store would lose
    models. Safe to share between threads.

    Raises: UsageError for a folder that is something else; StorageError.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int = CACHE_NBYTES) -> None:
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
            names = {entry.name for entry in list_folder(root)} - {PRIVATE}
            if not names or (self._mark.exists() and "manifests" not in names):
                return
        message = f"{root} is not a cache, and contains {min(names)!r}"
        hint = "Use an empty folder: a cache removes unused files."
        raise UsageError(message, path=str(root), hint=hint)

    def find(self, descriptor: Descriptor) -> FileReader | None:
        """Return a reader over a blob, which counts as used now; None if it is not there."""
        with suppress(BlobStoreError), ExitStack() as unless_used:
            reader = unless_used.enter_context(self.store.blobs.open(descriptor))
            used_at = self._used_at(descriptor.digest.file_name)
            is_changed = used_at is None or reader.status().st_mtime > used_at
            if is_changed and reader.digest() != descriptor.digest:
                _log.info("a cached blob is damaged: %s", reader.name)
                return None
            unless_used.pop_all()
            self._use(descriptor)
            return reader
        return None

    def _use(self, descriptor: Descriptor) -> None:
        # Its own file keeps its times, which tell of a change.
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
            raise LimitExceededError(message, path=str(root), hint="Allow more: --cache-size.")
        with os_errors("write to the cache", self.store.root):
            make_folder(self._mark.parent, durable=False)
            if not self._mark.exists():
                replace_file(self._mark, b"Blobs that are not used are removed from this folder.\n")
        with self._lock.exclusive(_WAIT_S):
            missing = self._missing(wanted)  # another process may have fetched some
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
            finally:  # a broken connection must not lose earlier results
                session.replace(missing)
        for blob in missing:
            self._use(blob)

    def _make_room(self, nbytes: int, kept: Sequence[Descriptor]) -> None:
        """Remove blobs that are not among ``kept`` until that many bytes fit, the oldest first.

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
