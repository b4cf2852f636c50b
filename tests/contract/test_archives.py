"""Archives are read as `ReadingTests` says, in every form."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.formats.seekable import seek_table
from blobstore.io.ranges import BytesReader
from blobstore.store.archive.archive import Archive, open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.testing import ReadingTests


class _ArchiveTests(ReadingTests):
    suffix: str

    @pytest.fixture(autouse=True)
    def opened(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def filled(self, folder: Path, source: MemoryStore, names: Sequence[str]) -> Archive:
        path = folder / f"archive{self.suffix}"
        try:
            save_models(names, path, store=source)
        except BaseException:
            assert list(folder.iterdir()) == []
            raise
        assert list(folder.iterdir()) == [path]
        return self.stack.enter_context(open_archive(self.changed(path)))

    def changed(self, path: Path) -> Path:
        return path


class TestPlain(_ArchiveTests):
    suffix = ".tar"


class TestFrames(_ArchiveTests):
    suffix = ".tar.zst"


class TestGzip(_ArchiveTests):
    """Another program has compressed the archive: it is read forward."""

    suffix = ".tar"

    def changed(self, path: Path) -> Path:
        packed = path.with_suffix(".tar.gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        return packed


class TestOneStream(_ArchiveTests):
    """Compressed by zstandard without a seek table."""

    suffix = ".tar.zst"

    def changed(self, path: Path) -> Path:
        whole = path.read_bytes()
        table = seek_table(BytesReader(whole, "test"))
        assert table is not None
        path.write_bytes(whole[: table.places[-1]])
        return path
