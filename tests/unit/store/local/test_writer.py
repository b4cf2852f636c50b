"""BlobWriter: pieces at any offsets are one file, hashed in order; errors leave nothing behind."""

import gc
import mmap
import os
import random
import resource
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from support.pieces import writing
from support.stores import open_files

from blobstore.errors import CorruptDataError, StorageError
from blobstore.io.durable import PAGE
from blobstore.names import Digest
from blobstore.store.local.blobs import FinishedBlob, Stamp

DIRECT = 2**18
DATA = random.Random(1).randbytes(4 * DIRECT)


@pytest.mark.parametrize(
    "lengths",
    [
        (0,),
        (3 * DIRECT + 17,),
        (1, DIRECT, 7),
        (PAGE - 1, DIRECT + 2 * PAGE - 1, PAGE),
        (PAGE + 1, DIRECT + PAGE, DIRECT + 1),
        (DIRECT - 1, DIRECT - 1),
    ],
)
def test_pieces_that_begin_and_end_within_pages(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """A large piece bypasses the page cache, except its ends, which share pages."""
    ends = list(accumulate(lengths, initial=0))
    size = ends[-1]
    whole = memoryview(mmap.mmap(-1, len(DATA)))  # its address is as aligned as its offsets
    whole[:] = DATA
    with writing(tmp_path, size) as (writer, made):
        for begin, end in reversed(list(pairwise(ends))):
            writer.put(begin, whole[begin:end], aligned=True)
    (blob,) = made
    assert blob.path.read_bytes() == DATA[:size]
    assert blob == FinishedBlob(Digest.of(DATA[:size]), size, tmp_path, Stamp.of(blob.path.stat()))
    assert list(tmp_path.iterdir()) == [blob.path]


def test_a_file_that_ends_in_a_gap_is_an_error(tmp_path: Path) -> None:
    back: list[int] = []
    with writing(tmp_path, 200) as (writer, _):
        writer.put(50, bytes(50), extra=[(100, bytes(100))], gap=100)
        os.truncate(tmp_path / "x", 150)
        with pytest.raises(CorruptDataError, match="150 of 200"):
            writer.put(0, bytes(50), hashed=lambda: back.append(1))
    assert back == [1]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_way_is_an_error_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"mine") if kind == "file" else path.symlink_to("nowhere")
    before = path.lstat().st_ino
    with writing(tmp_path, 3) as (writer, _), pytest.raises(StorageError, match="exists") as caught:
        writer.put(0, b"ab")
    assert caught.value.path == str(path)
    assert path.lstat().st_ino == before


@pytest.mark.parametrize("room", [0, 1])
def test_too_many_open_files_leave_none_open(tmp_path: Path, room: int) -> None:
    """A large blob's file is opened twice."""
    gc.disable()  # else it may close an earlier test's files meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with writing(tmp_path, DIRECT) as (writer, _):
        taken = [os.open(tmp_path, os.O_RDONLY) for _ in range(room + 1)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1], hard))
        for fd in taken:
            os.close(fd)
        try:
            with pytest.raises(StorageError, match="too many open files"):
                writer.put(0, b"abc")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            gc.enable()
    assert not open_files(tmp_path)


@pytest.mark.parametrize("syncs", [False, True])
def test_a_finished_blob_is_synced_where_syncfs_would_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, syncs: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with writing(tmp_path, 9, syncs=syncs) as (writer, _):
        writer.put(0, DATA[:9])
    assert len(synced) == syncs
