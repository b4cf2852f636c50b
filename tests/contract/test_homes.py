"""Every home does what `StoreTests` says, and an archive what `ReadingTests` says."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from support.servers import Server, server
from support.small_registry import SmallRegistry

from blobstore.io.http.client import HttpClient
from blobstore.io.objects import open_bucket
from blobstore.store.archive.archive import Archive, open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.registry.store import RegistryStore
from blobstore.testing import ReadingTests, StoreTests


class TestMemory(StoreTests):
    def new_home(self, folder: Path) -> MemoryStore:
        return MemoryStore()


class TestLocal(StoreTests):
    def new_home(self, folder: Path) -> Store:
        return Store(folder / "store")

    def other_reader(self, home: Home) -> Store:
        return Store(home.address)


@pytest.fixture(scope="module")
def registry() -> Iterator[tuple[Server, HttpClient]]:
    with server() as running, HttpClient() as client:
        yield running, client


class TestRegistry(StoreTests):
    """One registry. Real ones write repositories in lower case, and tell tags apart by case."""

    names = ("m", "m:tag", "ns/m:tag", "n:Tag")
    spellings = ("qwen:Q4", "qwen:q4", "qwen:Q4")

    @pytest.fixture(autouse=True)
    def _empty(self, registry: tuple[Server, HttpClient]) -> None:
        self.server, self.client = registry
        self.server.play(SmallRegistry())

    def new_home(self, folder: Path) -> RegistryStore:
        address = self.server.at("").rstrip("/")
        return RegistryStore("registry.ollama.ai", self.client, address=address)


class TestLayered(StoreTests):
    """An upper store over two lower ones with other models, and a blob that the tests write."""

    def new_home(self, folder: Path) -> LayeredStore:
        return LayeredStore(MemoryStore(), [Store(folder / "lower"), MemoryStore()])


class TestBucket(StoreTests):
    def new_home(self, folder: Path) -> BucketStore:
        return BucketStore(open_bucket(f"memory://{uuid4().hex}/a/prefix"))

    def other_reader(self, home: Home) -> BucketStore:
        return BucketStore(open_bucket(home.address))


class TestArchive(ReadingTests):
    @pytest.fixture(autouse=True)
    def opened(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def fill(self, folder: Path, source: MemoryStore, names: Sequence[str]) -> Archive:
        path = folder / "archive.tar"
        try:
            save_models(names, path, store=source)
        except BaseException:
            assert list(folder.iterdir()) == []
            raise
        assert list(folder.iterdir()) == [path]
        return self.stack.enter_context(open_archive(path))
