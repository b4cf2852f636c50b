"""Archives are read as `ReadingTests` says."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.store.archive.archive import Archive, open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.testing import ReadingTests


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
