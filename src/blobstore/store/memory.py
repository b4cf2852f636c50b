"""A store in memory: for tests, and for programs that keep nothing.

It forgets everything with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from blobstore.errors import (
    AmbiguousNameError,
    ConflictError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    UsageError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor, Manifest
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Expected, How, Removal

_PIECE = 2**20


class MemoryBlobs:
    """Bytes by digest. See `Blobs`."""

    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}

    def open(self, descriptor: Descriptor) -> BytesReader:
        """See `Blobs`."""
        data = self._blobs.get(descriptor.digest)
        if data is None:
            raise NotFoundError(f"blob {descriptor.digest} is missing", blob=str(descriptor.digest))
        if len(data) != descriptor.size:
            message = f"blob {descriptor.digest} has {len(data):,} bytes, not {descriptor.size:,}"
            raise CorruptDataError(message, blob=str(descriptor.digest))
        return BytesReader(data, f"blob {descriptor.digest}")

    def read(self, descriptor: Descriptor) -> bytes:
        """See `Blobs`."""
        if descriptor.size > MAX_DOCUMENT:
            message = f"limit exceeded: blob {descriptor.digest} has {descriptor.size:,} bytes, at most {MAX_DOCUMENT:,}"
            raise LimitExceededError(message, blob=str(descriptor.digest))
        return self.open(descriptor).read(0, descriptor.size)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`."""
        by_digest = {descriptor.digest: descriptor for descriptor in descriptors}
        return [
            blob
            for blob in by_digest.values()
            if len(self._blobs.get(blob.digest, b"")) != blob.size or not self._has(blob)
        ]

    def _has(self, descriptor: Descriptor) -> bool:
        return descriptor.digest in self._blobs

    def digests(self) -> set[str]:
        """See `Blobs`."""
        return {digest.hex for digest in list(self._blobs)}

    def keep(self, blobs: dict[Digest, bytes]) -> None:
        """Take blobs whose digests are known to be right."""
        self._blobs.update(blobs)

    def drop(self, digest: Digest) -> None:
        """Forget a blob."""
        self._blobs.pop(digest, None)


class MemoryManifests:
    """Manifests by name. See `Manifests`."""

    def __init__(self) -> None:
        self._manifests: dict[ModelName, bytes] = {}

    def names(self) -> list[ModelName]:
        """See `Manifests`."""
        return sorted(self._manifests)

    def spelled(self, name: ModelName) -> ModelName:
        """See `Manifests`."""
        if name in self._manifests:
            return name
        found = [other for other in self.names() if other.folded == name.folded]
        if len(found) > 1:
            message = f"{name} may be {' or '.join(map(str, found))}: they differ only in case"
            raise AmbiguousNameError(message, model=str(name))
        return found[0] if found else name

    def read(self, name: ModelName) -> Manifest:
        """See `Manifests`."""
        raw = self.raw(name)
        if raw is None:
            raise ModelNotFoundError(f"model {str(name)!r} not found", model=str(name))
        return Manifest.parse(raw, f"the manifest of {name}")

    def text(self, name: ModelName) -> bytes:
        """See `Manifests`."""
        return self.read(name).raw

    def modified(self, name: ModelName) -> None:
        """See `Manifests`: that is not kept."""

    def raw(self, name: ModelName) -> bytes | None:
        """Return the bytes of a model's manifest, None where there is none."""
        return self._manifests.get(name)

    def link(self, name: ModelName, raw: bytes) -> None:
        """Give a name a manifest."""
        self._manifests[name] = raw

    def remove(self, name: ModelName) -> None:
        """Forget a name."""
        del self._manifests[name]


class MemoryWriter:
    """One blob as it is written. See `Writer`."""

    def __init__(self, size: int, finished: Callable[[bytes], Descriptor]) -> None:
        self._data = bytearray(size)
        self._written = 0
        self._finished = finished
        self._mutex = threading.Lock()

    def put(
        self,
        offset: int,
        data: Any,
        *,
        gap: int = 0,
        aligned: bool = False,  # noqa: ARG002  # memory has no pages to align to
        hashed: Callable[[], None] = lambda: None,
    ) -> Descriptor | None:
        """See `Writer`."""
        view = memoryview(data).cast("B")
        self._data[offset : offset + len(view)] = view
        hashed()
        with self._mutex:
            self._written += len(view) + gap
            is_complete = self._written == len(self._data)
        return self._finished(bytes(self._data)) if is_complete else None

    def put_aside(self, offset: int, data: Any) -> None:
        """See `Writer`."""
        view = memoryview(data).cast("B")
        self._data[offset : offset + len(view)] = view

    def release(self) -> None:
        """See `Writer`: no buffer waits here."""

    def close(self) -> None:
        """See `Writer`."""


class MemorySession:
    """What is being written. See `Session`."""

    earlier = None

    def __init__(
        self, blobs: MemoryBlobs, manifests: MemoryManifests, mutex: threading.Lock
    ) -> None:
        self._blobs = blobs
        self._manifests = manifests
        self._mutex = mutex
        self._made: dict[Digest, bytes] = {}

    def writer(self, size: int) -> MemoryWriter:
        """See `Session`."""
        return MemoryWriter(size, self.put)

    def put(self, data: bytes) -> Descriptor:
        """See `Session`."""
        digest = Digest.of(data)
        self._made[digest] = data
        return Descriptor(media_type="", digest=digest, size=len(data))

    def copy(self, reader: OpenReader) -> Descriptor:
        """See `Session`."""
        return self.put(reader.read(0, reader.size))

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """See `Session`."""
        if descriptor.digest in self._made or not self._blobs.missing([descriptor]):
            return How.THERE
        if reader.size != descriptor.size:
            message = f"{reader.name} has {reader.size:,} bytes, and {descriptor.digest} {descriptor.size:,}"
            raise CorruptDataError(message, blob=str(descriptor.digest), path=reader.name)
        data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            message = f"{reader.name}: its bytes are not those of {descriptor.digest}"
            raise DigestMismatchError(message, blob=str(descriptor.digest), path=reader.name)
        self._made[descriptor.digest] = data
        return How.COPIED

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """See `Session`."""
        manifest.check_limits()
        named = [blob for blob in manifest.descriptors if blob.digest not in below]
        with self._mutex:
            if (spelled := self._manifests.spelled(name)) != name:
                message = f"there is a model {spelled}, and {name} differs from it only in case"
                raise UsageError(
                    message, model=str(spelled), hint=f"Try again: it will be {spelled}."
                )
            if expected is not None and self._manifests.raw(name) not in expected:
                raise ConflictError(
                    f"{name} was changed by another meanwhile", model=str(name), hint="Try again."
                )
            created = {blob.digest for blob in self._blobs.missing(named)}
            new = {digest: self._made[digest] for digest in created if digest in self._made}
            for descriptor in named:
                _check(descriptor, new) if descriptor.digest in new else self._blobs.open(
                    descriptor
                )
            self._blobs.keep(new)
            self._manifests.link(name, manifest.raw)
        return created


def _check(descriptor: Descriptor, made: dict[Digest, bytes]) -> None:
    if len(made[descriptor.digest]) != descriptor.size:
        message = f"blob {descriptor.digest} has {len(made[descriptor.digest]):,} bytes, not {descriptor.size:,}"
        raise CorruptDataError(message, blob=str(descriptor.digest))


class MemoryStore:
    """A home in memory. Safe to share between threads."""

    address = "memory"
    summaries = None

    def __init__(self) -> None:
        self.blobs = MemoryBlobs()
        self.manifests = MemoryManifests()
        self._mutex = threading.Lock()

    def find(self, name: str | ModelName) -> ModelName:
        """See `Home`."""
        found = self.manifests.spelled(ModelName.of(name))
        self.manifests.read(found)
        return found

    def target(self, name: str | ModelName) -> ModelName:
        """See `Home`."""
        return self.manifests.spelled(ModelName.of(name))

    @contextmanager
    def session(self, source: str = "") -> Iterator[MemorySession]:  # noqa: ARG002  # nothing is remembered
        """See `Home`."""
        yield MemorySession(self.blobs, self.manifests, self._mutex)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """See `Home`: what is open stays in memory."""
        yield True

    def remove(self, name: str | ModelName) -> Removal:
        """See `Home`."""
        found = self.find(name)
        with self._mutex:
            gone = self.manifests.read(found).descriptors
            self.manifests.remove(found)
            needed = {
                blob.digest
                for other in self.manifests.names()
                for blob in self.manifests.read(other).descriptors
            }
            removed = tuple(blob for blob in gone if blob.digest not in needed)
            for blob in removed:
                self.blobs.drop(blob.digest)
        return Removal(removed)
