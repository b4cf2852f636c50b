"""A home of one's own: over a file system of fsspec, in one file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from blobstore.errors import BlobStoreError, ModelNotFoundError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
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
from blobstore.testing import StoreTests
from blobstore.testing.blobs import M, commit

fsspec = pytest.importorskip("fsspec")


class Files:
    """Files in a folder of a file system of fsspec."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        self._fs.makedirs(self._root, exist_ok=True)
        return sorted(path.rpartition("/")[2] for path in self._fs.ls(self._root, detail=False))

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a file, None if it is missing."""
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._fs.rm_file(f"{self._root}/{name}")


class FsspecBlobs(Blobs):
    """See `Blobs`."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def open(self, descriptor: Descriptor) -> OpenReader:
        data = self.files.get(descriptor.digest.hex)
        if data is None:
            raise blob_not_found(descriptor.digest)
        check_blob_size(descriptor, len(data))
        return BytesReader(data, f"blob {descriptor.digest}")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        sizes = {name: len(self.files.get(name) or b"") for name in self.files.names()}
        return [blob for blob in unique(descriptors) if sizes.get(blob.digest.hex) != blob.size]

    def digests(self) -> set[str]:
        return set(self.files.names())


class FsspecManifests(Manifests):
    """See `Manifests`."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def names(self) -> list[ModelName]:
        found = (ModelName.of_path(name.split("!")) for name in self.files.names())
        return sorted(name for name in found if name is not None)

    def file(self, name: ModelName) -> str:
        """Return the name of a model's file."""
        return "!".join(name.path_parts)

    def text(self, name: ModelName) -> bytes:
        raw = self.files.get(self.file(name))
        if raw is None:
            raise ModelNotFoundError(f"model {str(name)!r} not found", model=str(name))
        return raw


class Writer:
    """See `Writer`."""

    def __init__(self, size: int, finished: Callable[[bytes], None]) -> None:
        self._data = bytearray(size)
        self._left = size
        self._finished = finished
        self._mutex = threading.Lock()

    def put(
        self,
        offset: int,
        data: Any,
        *,
        beside: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        hashed: Callable[[], None] = lambda: None,
        **_hints: Any,
    ) -> None:
        for at, part in (*beside, (offset, data)):
            view = memoryview(part).cast("B")
            self._data[at : at + len(view)] = view
        hashed()
        with self._mutex:
            self._left -= memoryview(data).nbytes + gap
            is_whole = self._left == 0
        if is_whole:
            self._finished(bytes(self._data))

    def release(self) -> None:
        """No buffer waits."""

    close = release


class FsspecSession(Session):
    """See `Session`. What is written is in memory until it is published."""

    def __init__(self, home: FsspecStore) -> None:
        self._home = home
        self._made: dict[Digest, bytes] = {}

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._home.blobs.missing(descriptors)

    def writer(
        self, size: int, finished: Callable[[Any], None], stage: HashStage | None = None
    ) -> Writer:
        return Writer(size, lambda data: finished(self._add(data)))

    def _add(self, data: bytes) -> Descriptor:
        digest = Digest.of(data)
        self._made[digest] = data
        return Descriptor(media_type="", digest=digest, size=len(data))

    def copy(self, reader: OpenReader) -> Descriptor:
        return self._add(reader.read(0, reader.size))

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._made or not self.missing([descriptor]):
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
        blobs, manifests = self._home.blobs, self._home.manifests
        named = [blob for blob in manifest.descriptors if blob.digest not in below]
        with self._home.mutex:
            if (spelled := manifests.spelled(name)) != name:
                raise other_spelling(name, spelled)
            check_expected(name, manifests.files.get(manifests.file(name)), expected)
            created = {blob.digest for blob in self.missing(named)}
            for blob in named:
                if blob.digest in created and blob.digest in self._made:
                    check_blob_size(blob, len(self._made[blob.digest]))
                else:
                    blobs.open(blob)
            for digest in created:
                blobs.files.put(digest.hex, self._made[digest])
            manifests.files.put(manifests.file(name), manifest.raw)
        return created


class FsspecStore(Home):
    """A home for one process at a time in a folder of a file system of fsspec."""

    blobs: FsspecBlobs
    manifests: FsspecManifests

    def __init__(self, url: str) -> None:
        self.address = url
        self.blobs = FsspecBlobs(Files(f"{url}/blobs"))
        self.manifests = FsspecManifests(Files(f"{url}/manifests"))
        self.mutex = threading.Lock()

    @contextmanager
    def session(self, *, name: ModelName | None = None) -> Iterator[FsspecSession]:
        yield FsspecSession(self)

    def remove(self, name: str | ModelName) -> Removal:
        gone = self.manifests.read(self.find(name))
        with self.mutex:
            self.manifests.files.remove(self.manifests.file(self.find(name)))
            needed = self.care().references().needed()
            unneeded = [blob for blob in unique(gone.descriptors) if blob.digest.hex not in needed]
            for blob in unneeded:
                self.blobs.files.remove(blob.digest.hex)
        return Removal(tuple(unneeded))


class TestFsspec(StoreTests):
    def new_home(self, folder: Path) -> FsspecStore:
        return FsspecStore(f"memory://{uuid4().hex}")

    def other_reader(self, home: Home) -> FsspecStore:
        return FsspecStore(home.address)


def test_verify_and_usage_of_it() -> None:
    store = FsspecStore(f"memory://{uuid4().hex}")
    commit(store, "m", b"one", b"three", with_config=False)
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, len(usage.models)) == (2, 8, 1)
    assert verify(store).is_sound
    store.blobs.files.put(Digest.of(b"one").hex, b"two")
    (damaged,) = verify(store).damaged
    assert (damaged.reason, damaged.models) == ("its bytes do not match its digest", (M,))
    with pytest.raises(BlobStoreError):
        store.blobs.read(store.manifests.read(M).layers[0])
