"""A store in memory: for tests, and for programs that keep nothing.

Its contents are lost when the process ends. What a session writes waits in a temporary file.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field

from blobstore.errors import ModelNotFoundError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Blobs,
    Expected,
    Home,
    How,
    KeptSignatures,
    Manifests,
    Removal,
    SpooledSession,
    blob_not_found,
    check_blob_size,
    check_expected,
    check_spelling,
    name_among,
    unique,
)


@dataclass(eq=False)
class _Blobs(Blobs):
    all: dict[Digest, bytes] = field(default_factory=dict)

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


@dataclass(eq=False)
class KnownManifests(Manifests):
    """Manifests in memory, of the home called ``what``. See `Manifests`."""

    _what: str
    all: dict[ModelName, bytes] = field(default_factory=dict)

    def names(self) -> list[ModelName]:
        return sorted(self.all)

    def in_order(self) -> list[ModelName]:
        return list(self.all)

    def stored_name(self, name: ModelName) -> ModelName:
        return name if name in self.all else name_among(list(self.all), name)

    def text(self, name: ModelName) -> bytes:
        raw = self.all.get(name)
        if raw is None:
            message = f"{self._what} has no model {str(name)!r}"
            names = ", ".join(map(str, self.names()[:8]))
            hint = f"It has {names}." if names else "It has no model with a name."
            raise ModelNotFoundError(message, model=str(name), hint=hint)
        return raw


@dataclass(eq=False)
class _Signatures(KeptSignatures):
    all: dict[Digest, dict[str, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def _keys(self, digest: Digest) -> list[str]:
        return sorted(self.all[digest])

    def _raw(self, digest: Digest, key: str) -> tuple[bytes, str]:
        return self.all[digest][key], f"signature {key}"

    def _write(self, digest: Digest, new: Mapping[str, bytes]) -> int:
        self.all[digest].update(new)
        return len(new)


class _Session(SpooledSession):
    remembers = True

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store
        self._noted: dict[str, bytes] = {}

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._store.blobs.missing(descriptors)

    def recall(self, key: str, size: int, *, verify: bool) -> Descriptor | None:  # noqa: ARG002
        data = self._store.kept.get(key)
        return None if data is None or len(data) != size else self.put(data)

    def note(self, key: str, blob: Descriptor) -> None:
        self._noted[key] = self._noted[blob.digest.hex] = self._data(blob.digest)

    def open(self, blob: Descriptor) -> OpenReader:
        return self._spooled[blob.digest]

    def keep(self) -> None:
        self._store.kept.update(self._noted)

    def _data(self, digest: Digest) -> bytes:
        return self._spooled[digest].read(0, self._spooled[digest].size)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        return super().add(descriptor, reader) if self.missing([descriptor]) else How.THERE

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
            check_spelling(name, manifests.stored_name(name))
            check_expected(name, manifests.all.get(name), expected)
            created = {blob.digest for blob in blobs.missing(named)}
            new = {digest: self._data(digest) for digest in created & self._spooled.keys()}
            after = _Blobs(blobs.all | new)
            for descriptor in named:
                after.open(descriptor)
            blobs.all = after.all
            manifests.all[name] = manifest.raw
        return created


class MemoryStore(Home):
    """A home in memory. Safe to share between threads."""

    address = "memory"
    open_blobs_stay = True

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.blobs: _Blobs = _Blobs()
        self.manifests: KnownManifests = KnownManifests("the store in memory")
        self.signatures: _Signatures = _Signatures()
        self.kept: dict[str, bytes] = {}

    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> AbstractContextManager[_Session]:
        return closing(_Session(self))

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
