"""A store in memory: for tests, and for programs that keep nothing.

Its contents are lost when the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        self.all: dict[Digest, bytes] = {}

    def open(self, descriptor: Descriptor) -> BytesReader:
        data = self.all.get(descriptor.digest)
        if data is None:
            raise blob_not_found(descriptor.digest)
        check_blob_size(descriptor, len(data))
        return BytesReader(data, f"blob {descriptor.digest}")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        there = {digest: len(data) for digest, data in list(self.all.items())}
        return [blob for blob in unique(descriptors) if there.get(blob.digest) != blob.size]

    def digests(self) -> set[str]:
        return {digest.hex for digest in list(self.all)}


class _Manifests(Manifests):
    def __init__(self) -> None:
        self.all: dict[ModelName, bytes] = {}

    def names(self) -> list[ModelName]:
        return sorted(self.all)

    def text(self, name: ModelName) -> bytes:
        raw = self.all.get(name)
        if raw is None:
            raise ModelNotFoundError(f"model {str(name)!r} not found", model=str(name))
        return raw


class _Signatures:
    def __init__(self, mutex: threading.Lock) -> None:
        self.all: dict[Digest, list[Signature]] = {}
        self._mutex = mutex

    def read(self, _name: ModelName, digest: Digest) -> list[Signature]:
        return list(self.all.get(digest, ()))

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        with self._mutex:
            there = self.read(name, digest)
            # One by one: the same signature may be given twice.
            whole = list(there)
            whole += (signature for signature in signatures if signature not in whole)
            check_limit(
                f"{digest} with the new ones", len(whole), "signatures", MAX_SIGNATURES, "S1"
            )
            self.all[digest] = whole
        return len(whole) - len(there)


class _Session(Session):
    remembers = True

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._made: dict[Digest, bytes] = {}
        self._noted: dict[str, bytes] = {}

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._store.blobs.missing(descriptors)

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
        data = self._store.kept.get(key)
        return None if data is None or len(data) != size else self._add(data)

    def note(self, key: str, blob: Descriptor) -> None:
        self._noted[key] = self._noted[blob.digest.hex] = self._made[blob.digest]

    def open(self, blob: Descriptor) -> OpenReader:
        return BytesReader(self._made[blob.digest])

    def keep(self) -> None:
        self._store.kept.update(self._noted)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._made or not self.missing([descriptor]):
            return How.THERE
        check_reader_size(descriptor, reader)
        if self.copy(reader).digest != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
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
        blobs, manifests = self._store.blobs, self._store.manifests
        with self._store.mutex:
            existing = manifests.stored_name(name)
            if existing != name:
                raise other_spelling(name, existing)
            check_expected(name, manifests.all.get(name), expected)
            created = {blob.digest for blob in blobs.missing(named)}
            new = {digest: self._made[digest] for digest in created & self._made.keys()}
            after = _Blobs()
            after.all = blobs.all | new
            for descriptor in named:
                after.open(descriptor)
            blobs.all = after.all
            manifests.all[name] = manifest.raw
        return created


class MemoryStore(Home):
    """A home in memory. Safe to share between threads."""

    address = "memory"

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.blobs: _Blobs = _Blobs()
        self.manifests: _Manifests = _Manifests()
        self.signatures: _Signatures = _Signatures(self.mutex)
        self.kept: dict[str, bytes] = {}

    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> AbstractContextManager[_Session]:
        return nullcontext(_Session(self))

    def lease(self) -> AbstractContextManager[bool]:
        """See `Home`: an open blob stays in memory."""
        return nullcontext(True)  # noqa: FBT003  # what the block gets

    def remove(self, name: str | ModelName) -> Removal:
        stored = self.find(name)
        with self.mutex:
            gone = self.manifests.read(stored)
            del self.manifests.all[stored]
            others = [self.manifests.read(other) for other in self.manifests.names()]
            needed = {blob.digest for other in others for blob in other.descriptors}
            removed = tuple(blob for blob in gone.descriptors if blob.digest not in needed)
            for blob in removed:
                self.blobs.all.pop(blob.digest, None)
            if gone.digest not in {other.digest for other in others}:
                self.signatures.all.pop(gone.digest, None)
        return Removal(removed)
