"""Store: what lies where; a session shows nothing before it publishes, and nothing after an error.

Publishing heals what is damaged, and refuses what is not whole.
"""

import errno
import gc
import mmap
import os
import random
import stat
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.pieces import writing
from support.stores import (
    blob_path,
    commit_model,
    descriptor,
    files_may_be_open,
    manifest_path,
    open_files,
)

from blobstore.errors import CorruptDataError, StorageError
from blobstore.formats.documents import Manifest
from blobstore.io.durable import PAGE
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import FinishedBlob, Stamp
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
NAME = ModelName.parse("m")


def test_a_model_lies_in_ollamas_folders_and_everything_else_in_ours(store: Store) -> None:
    copy = commit_model(store, "example.org:8080/team/model:tag", b"one", b"two").digest.hex
    files = (path for path in store.root.rglob("*") if path.is_file())
    assert {path.relative_to(store.root).as_posix() for path in files} == {
        f".blobstore/copies/example.org:8080/team/model/tag/{copy}",
        ".blobstore/lock",
        ".blobstore/names",
        "blobs/sha256-7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
        "blobs/sha256-3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
        "manifests/example.org:8080/team/model/tag",
    }


def test_an_ingest_that_fails_leaves_nothing(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "old", b"one")
    before = snapshot(store)
    with pytest.raises(SystemExit), store.session() as session:  # noqa: PT012
        session.put(b"two")
        with closing(session.writer(100, lambda _: None)) as writer:
            writer.put(0, b"three")
        raise SystemExit
    assert snapshot(store) == before
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


@pytest.mark.parametrize("damaged", [b"on", b"eno", None])
def test_a_commit_heals_a_damaged_blob(store: Store, tmp_path: Path, damaged: bytes | None) -> None:
    commit_model(store, "m", b"one")
    path, outside = blob_path(store, b"one"), tmp_path / "outside"
    path.write_bytes(damaged or b"eno")
    if damaged is None:
        path.symlink_to(path.rename(outside))
    commit_model(store, "m", b"one")
    assert path.read_bytes() == b"one"
    assert not path.is_symlink()
    assert damaged or outside.read_bytes() == b"eno"


def link(path: Path) -> None:
    (path.parents[1] / "file").write_bytes(b"one")
    path.symlink_to(path.parents[1] / "file")


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"more"), Path.mkdir, link])
def test_what_is_not_a_blob_is_not_published(store: Store, make: Callable[[Path], object]) -> None:
    path = blob_path(store, b"one")
    path.parent.mkdir(parents=True)
    make(path)
    with store.session() as session, pytest.raises((CorruptDataError, StorageError)):
        session.publish(NAME, Manifest(layers=(descriptor(b"one"),)))
    assert store.manifests.names() == []


def test_a_large_manifest_of_zeros_is_replaced(store: Store) -> None:
    """As a power cut leaves the manifests of other programs."""
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2**21))
    assert commit_model(store, "m", b"one").raw == path.read_bytes()


@pytest.mark.parametrize("older", [b"older", None])
def test_a_manifest_whose_name_can_not_be_made_durable_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, older: bytes | None
) -> None:
    if older is not None:
        commit_model(store, "m", older)
    folder, real = manifest_path(store, "m").parent, os.fsync

    def fsync(fd: int) -> None:
        if folder.exists() and os.path.samestat(os.fstat(fd), folder.stat()):
            raise OSError(errno.EIO, "input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="input/output error"):
        commit_model(store, "m", b"two")
    assert list(map(str, store.manifests.names())) == (["m:latest"] if older else [])
    assert len(store.copies.of(NAME)) == (older is not None)
    if older:
        assert store.manifest(NAME).layers[0].size == len(older)


def test_a_disk_that_syncs_no_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusal = os.fsync, Mock(side_effect=OSError(errno.EINVAL, "invalid argument"))

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            refusal()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    commit_model(store, "m", b"one")
    assert store.manifests.names() == [NAME]
    assert refusal.called


# BlobWriter: pieces at any offsets are one file, hashed in order; errors leave nothing behind


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
    gc.collect()  # else it may close an earlier test's files meanwhile
    with writing(tmp_path, DIRECT) as (writer, _):
        taken = [os.open(tmp_path, os.O_RDONLY) for _ in range(room + 1)]
        for fd in taken:
            os.close(fd)
        with files_may_be_open(taken[-1]), pytest.raises(StorageError, match="too many open"):
            writer.put(0, b"abc")
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
