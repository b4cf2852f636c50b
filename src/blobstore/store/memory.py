"""A store in memory: for tests, and for programs that keep nothing.

Its contents are lost when the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from blobstore.errors import ModelNotFoundError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.signatures import MAX_SIGNATURES, Signature
from blobstore.formats.strictjson import check_limit
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Blobs,
    Expected,
    Home,
    How,
    Manifests,
    Removal,
    Session,
    blob_not_found,
    check_blob_size,
    check_expected,
    check_reader_size,
    other_spelling,
    unique,
    wrong_bytes,
)
from blobstore.store.sessions import MemoryBlob, SpoolWriter


class _Blobs(Blobs):
    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}

    def open(self, descriptor: Descriptor) -> BytesReader:
        data = self._blobs.get(descriptor.digest)
        if data is None:
            raise blob_not_found(descriptor.digest)
        check_blob_size(descriptor, len(data))
        return BytesReader(data, f"blob {descriptor.digest}")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        there = {digest: len(data) for digest, data in list(self._blobs.items())}
        return [blob for blob in unique(descriptors) if there.get(blob.digest) != blob.size]

    def digests(self) -> set[str]:
        return {digest.hex for digest in list(self._blobs)}

    def keep(self, blobs: dict[Digest, bytes]) -> None:
        self._blobs.update(blobs)

    def drop(self, digest: Digest) -> None:
        self._blobs.pop(digest, None)


class _Manifests(Manifests):
    def __init__(self) -> None:
        self._manifests: dict[ModelName, bytes] = {}

    def names(self) -> list[ModelName]:
        return sorted(self._manifests)

    def text(self, name: ModelName) -> bytes:
        raw = self.raw(name)
        if raw is None:
            raise ModelNotFoundError(f"model {str(name)!r} not found", model=str(name))
        return raw

    def raw(self, name: ModelName) -> bytes | None:
        return self._manifests.get(name)

    def link(self, name: ModelName, raw: bytes) -> None:
        self._manifests[name] = raw

    def remove(self, name: ModelName) -> None:
        del self._manifests[name]


class _Signatures:
    def __init__(self) -> None:
        self._signatures: dict[Digest, list[Signature]] = {}
        self._mutex = threading.Lock()

    def read(self, _name: ModelName, digest: Digest) -> list[Signature]:
        return list(self._signatures.get(digest, ()))

    def add(self, _name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        with self._mutex:
            there = self._signatures.get(digest, [])
            # One by one: the same signature may be given twice.
            whole = list(there)
            whole += (each for each in signatures if each not in whole)
            check_limit(
                f"{digest} with the new ones", len(whole), "signatures", MAX_SIGNATURES, "S1"
            )
            self._signatures[digest] = whole
        return len(whole) - len(there)

    def remove(self, digest: Digest) -> None:
        self._signatures.pop(digest, None)


class _Session(Session):
    remembers = True

    def __init__(
        self, blobs: _Blobs, manifests: _Manifests, kept: dict[str, bytes], mutex: threading.Lock
    ) -> None:
        self._blobs = blobs
        self._manifests = manifests
        self._mutex = mutex
        self._kept = kept
        self._made: dict[Digest, bytes] = {}
        self._noted: dict[str, Digest] = {}

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._blobs.missing(descriptors)

    def writer(
        self,
        size: int,
        finished: Callable[[Any], None],
        stage: HashStage | None = None,  # noqa: ARG002  # small models: hashed at the end
    ) -> SpoolWriter:
        blob = MemoryBlob(memoryview(bytearray(size)))
        return SpoolWriter(blob, lambda _digest: finished(self.copy(blob)))

    def copy(self, reader: OpenReader) -> Descriptor:
        return self._add(reader.read(0, reader.size))

    def _add(self, data: bytes) -> Descriptor:
        digest = Digest.of(data)
        self._made[digest] = data
        return Descriptor(media_type="", digest=digest, size=len(data))

    def recall(self, key: str, size: int, *, verify: bool) -> Descriptor | None:  # noqa: ARG002
        data = self._kept.get(key)
        return None if data is None or len(data) != size else self._add(data)

    def note(self, key: str, blob: Descriptor) -> None:
        self._noted[key] = blob.digest

    def open(self, blob: Descriptor) -> OpenReader:
        return BytesReader(self._made[blob.digest])

    def keep(self) -> None:
        for key, digest in self._noted.items():
            self._kept[key] = self._kept[digest.hex] = self._made[digest]

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._made or not self._blobs.missing([descriptor]):
            return How.THERE
        check_reader_size(descriptor, reader)
        data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
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
        manifest.check_limits()
        named = [blob for blob in manifest.descriptors if blob.digest not in below]
        with self._mutex:
            spelled = self._manifests.spelled(name)
            if spelled != name:
                raise other_spelling(name, spelled)
            check_expected(name, self._manifests.raw(name), expected)
            created = {blob.digest for blob in self._blobs.missing(named)}
            new = {digest: self._made[digest] for digest in created & self._made.keys()}
            for descriptor in named:
                if descriptor.digest in new:
                    check_blob_size(descriptor, len(new[descriptor.digest]))
                else:
                    self._blobs.open(descriptor)
            self._blobs.keep(new)
            self._manifests.link(name, manifest.raw)
        return created


class MemoryStore(Home):
    """A home in memory. Safe to share between threads."""

    address = "memory"
    blobs: _Blobs
    manifests: _Manifests
    signatures: _Signatures

    def __init__(self) -> None:
        self.blobs = _Blobs()
        self.manifests = _Manifests()
        self.signatures = _Signatures()
        self._kept: dict[str, bytes] = {}
        self._mutex = threading.Lock()

    @contextmanager
    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> Iterator[_Session]:
        yield _Session(self.blobs, self.manifests, self._kept, self._mutex)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """See `Home`: an open blob stays in memory."""
        yield True

    def remove(self, name: str | ModelName) -> Removal:
        found = self.find(name)
        with self._mutex:
            gone = self.manifests.read(found)
            self.manifests.remove(found)
            others = [self.manifests.read(other) for other in self.manifests.names()]
            needed = {blob.digest for other in others for blob in other.descriptors}
            removed = tuple(blob for blob in gone.descriptors if blob.digest not in needed)
            for blob in removed:
                self.blobs.drop(blob.digest)
            if gone.digest not in {other.digest for other in others}:
                self.signatures.remove(gone.digest)
        return Removal(removed)
