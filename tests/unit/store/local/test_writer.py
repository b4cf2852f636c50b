"""BlobWriter: pieces at any offsets, from many threads, are one file, hashed in order."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.pieces import Piece, Putter, cut, writing

from blobstore.errors import CorruptDataError, StorageError
from blobstore.io.durable import PAGE
from blobstore.names import Digest
from blobstore.store.local import session as writer_module
from blobstore.store.local.blobs import FinishedBlob
from blobstore.store.local.session import BlobWriter, write_whole

DIRECT = 2**18
DATA = random.Random(1).randbytes(6 * DIRECT)


def open_files() -> set[int]:
    """Return the numbers of open files.

    There may be fewer later, when Python collects an earlier test's.
    """
    return {number for number in range(256) if is_open(number)}


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def write(folder: Path, pieces: list[Piece], threads: int = 1) -> FinishedBlob:
    """Write a blob of ``pieces``, put in that order.

    Check it, and that every buffer has come back once.
    """
    size = sum(len(piece.data) + piece.gap for piece in pieces)
    files = open_files()
    with writing(folder, size) as (writer, made):
        putter = Putter(writer)
        putter.put_all(pieces, threads)
    assert open_files() <= files
    (blob,) = made
    assert sorted(putter.given_back) == sorted(piece.offset for piece in pieces)
    assert blob.path.read_bytes() == DATA[:size]
    assert blob.digest.hex == hashlib.sha256(DATA[:size]).hexdigest()
    assert (blob.size, blob.path) == (size, folder / f"sha256-{blob.digest.hex}")
    assert (blob.stamp.inode, blob.stamp.mtime_ns) == (
        blob.path.stat().st_ino,
        blob.path.stat().st_mtime_ns,
    )
    assert [path.name for path in folder.iterdir()] == [blob.path.name]
    return blob


def blob_of(*lengths: tuple[int, int, bool], seed: int = 0) -> list[Piece]:
    """Return the pieces of a blob of `DATA`, in the order of their bytes."""
    size = sum(length + gap for length, gap, _ in lengths)
    return cut(DATA[:size], list(lengths), random.Random(seed))


@pytest.mark.parametrize("size", [0, 1, PAGE, DIRECT - 1, DIRECT, 3 * DIRECT + 17])
def test_a_blob_of_one_piece(tmp_path: Path, size: int) -> None:
    write(tmp_path, blob_of((size, 0, True)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, DIRECT),
        (PAGE - 1, DIRECT + 2 * PAGE - 1),
        (PAGE, DIRECT + PAGE - 1),
        (PAGE + 1, DIRECT + PAGE),
        (DIRECT - 1, DIRECT - 1),
        (DIRECT + 5, 2 * DIRECT),
    ],
)
def test_pieces_that_begin_and_end_within_pages(tmp_path: Path, first: int, second: int) -> None:
    """A large piece bypasses the page cache, except its ends, which share pages."""
    pieces = blob_of(
        (first, 0, True), (second, 0, True), (PAGE // 2, 0, True), (DIRECT + 1, 0, True)
    )
    write(tmp_path, pieces[::-1])


def test_writers_take_any_contiguous_buffer(tmp_path: Path) -> None:
    parts = (
        b"ab",
        bytearray(b"cd"),
        memoryview(b"efgh").cast("H"),
        memoryview(b"ijkl").cast("B", (2, 2)),
    )
    offset = 0
    with writing(tmp_path, 12) as (writer, made):
        for part in parts:
            writer.put(offset, part)
            offset += memoryview(part).nbytes
    (blob,) = made
    assert blob.path.read_bytes() == b"abcdefghijkl"


@pytest.mark.parametrize("end", ["release", "close"])
def test_what_waits_is_given_back_when_the_blob_is_given_up(tmp_path: Path, end: str) -> None:
    back: list[str] = []
    writer = BlobWriter(tmp_path, "x", 10, lambda _: None)
    writer.put(4, b"ef", hashed=lambda: back.append("ef"))
    writer.put(2, b"cd", hashed=lambda: back.append("cd"))
    assert back == []
    getattr(writer, end)()
    assert sorted(back) == ["cd", "ef"]
    writer.close()
    writer.close()
    assert sorted(back) == ["cd", "ef"]


def test_blobs_of_the_same_bytes_at_once(tmp_path: Path) -> None:
    def write_one(number: int) -> FinishedBlob:
        if number % 2:
            digest = Digest.of(DATA[:5000])
            return write_whole(tmp_path, digest, memoryview(DATA[:5000]), str(number), syncs=False)
        with writing(tmp_path, 5000, str(number)) as (writer, made):
            writer.put(0, DATA[:5000])
        return made[0]

    with ThreadPoolExecutor(8) as pool:
        blobs = list(pool.map(write_one, range(60)))
    assert len({blob.digest for blob in blobs}) == 1
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == DATA[:5000]


def test_a_file_that_ends_in_a_gap_is_an_error(tmp_path: Path) -> None:
    back: list[int] = []
    with writing(tmp_path, 200) as (writer, _):
        writer.put(50, bytes(50), extra=[(100, bytes(100))], gap=100)
        os.truncate(tmp_path / "x", 150)
        with pytest.raises(CorruptDataError, match=r"ends at byte 150 of 200"):
            writer.put(0, bytes(50), hashed=lambda: back.append(1))
    assert back == [1]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_in_the_way_is_an_error_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_bytes(b"mine")
    else:
        path.symlink_to("nowhere")
    before = path.lstat().st_ino
    with (
        writing(tmp_path, 3) as (writer, _),
        pytest.raises(StorageError, match="exists") as caught,
    ):
        writer.put(0, b"ab")
    assert caught.value.path == str(path)
    assert path.lstat().st_ino == before


@contextmanager
def room_for_files(count: int) -> Iterator[None]:
    """Let the process open ``count`` more files and no further one."""
    gc.collect()  # else it may close an earlier test's files meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(256) if not is_open(number)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1])
def test_too_many_open_files_leave_none_open(tmp_path: Path, count: int) -> None:
    """A large blob's file is opened twice."""
    files = open_files()
    with (
        writing(tmp_path, DIRECT) as (writer, _),
        room_for_files(count),
        pytest.raises(StorageError, match="too many open files"),
    ):
        writer.put(0, b"abc")
    assert open_files() <= files


@pytest.mark.parametrize("size", [9, DIRECT])
@pytest.mark.parametrize("syncs", [False, True])
def test_a_finished_blob_is_synced_where_syncfs_would_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, *, syncs: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(writer_module, "sync", synced.append)
    with writing(tmp_path, size, syncs=syncs) as (writer, _):
        writer.put(0, DATA[:size])
    assert len(synced) == syncs
