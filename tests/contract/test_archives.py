"""Archives are read as `ReadingTests` says; in other forms, the same models are read."""

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
from blobstore.store.transfer import transfer
from blobstore.testing import ReadingTests
from blobstore.testing.blobs import commit, data_of


class TestArchive(ReadingTests):
    @pytest.fixture(autouse=True)
    def opened(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield

    def filled(self, folder: Path, source: MemoryStore, names: Sequence[str]) -> Archive:
        path = folder / "archive.tar"
        try:
            save_models(names, path, store=source)
        except BaseException:
            assert list(folder.iterdir()) == []
            raise
        assert list(folder.iterdir()) == [path]
        return self.stack.enter_context(open_archive(path))


def _gzipped(path: Path) -> Path:
    """Compress an archive as another program does: it is read forward."""
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
    return path


def _without_seek_table(path: Path) -> Path:
    whole = path.read_bytes()
    table = seek_table(BytesReader(whole, "test"))
    assert table is not None
    path.write_bytes(whole[: table.places[-1]])
    return path


@pytest.mark.parametrize(
    ("suffix", "change"),
    [(".tar.zst", Path), (".tar", _gzipped), (".tar.zst", _without_seek_table)],
    ids=["zstd frames", "gzip", "one zstd stream"],
)
def test_compressed_archives_have_the_same_models(
    tmp_path: Path, suffix: str, change: type[Path]
) -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "m", b"config", data_of(2**20 + 1), b"")
    commit(source, "n", b"config", data_of(70_000))
    path = tmp_path / f"archive{suffix}"
    save_models(["m", "n"], path, store=source)
    with open_archive(change(path)) as archive:
        transfer(["m", "n"], archive, target)
    assert (target.manifests.all, target.blobs.all) == (source.manifests.all, source.blobs.all)
