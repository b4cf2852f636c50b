"""Every home does what `StoreTests` says."""

from __future__ import annotations

from pathlib import Path

from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.testing import StoreTests


class TestMemory(StoreTests):
    def new_home(self, folder: Path) -> MemoryStore:
        return MemoryStore()


class TestLocal(StoreTests):
    def new_home(self, folder: Path) -> Store:
        return Store(folder / "store")

    def other_reader(self, home: Home) -> Store:
        return Store(home.address)


class TestLayered(StoreTests):
    """An upper store over two lower ones with other models, and a blob that the tests write."""

    def new_home(self, folder: Path) -> LayeredStore:
        return LayeredStore(MemoryStore(), [Store(folder / "lower"), MemoryStore()])
