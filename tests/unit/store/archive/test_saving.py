"""Archives as they are written: their bytes, and when they appear."""

import fcntl
import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.errors import BusyError, ConflictError, DigestMismatchError, StorageError, UsageError
from blobstore.formats.oci import blob_path
from blobstore.names import Digest
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, N, commit, data_of

TWO = b"two"
BF16 = bytes(4_500_000) + data_of(500_000)
"""More than two frames."""


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    commit(store, "m", BF16, TWO)
    commit(store, "n", data_of(3000), TWO, b"")
    return store


def saved(folder: Path, store: MemoryStore, name: str = "a.tar", jobs: int = 1) -> bytes:
    path = folder / name
    save_models(["m", "n"], path, store=store, replace=True, jobs=jobs)
    return path.read_bytes()


def test_the_files_of_an_archive(tmp_path: Path, store: MemoryStore) -> None:
    raw = [store.manifests.text(name) for name in (M, N)]
    with tarfile.open(fileobj=io.BytesIO(saved(tmp_path, store))) as archive:
        members = archive.getmembers()
        found = {one.name: archive.extractfile(one).read() for one in members}  # type: ignore[union-attr]
    blobs = [BF16, TWO, data_of(3000), b""]
    expected = [blob_path(Digest.of(data)) for data in (*raw, *blobs)]
    assert list(found) == ["oci-layout", "index.json", *expected]
    assert [found[path] for path in expected] == [*raw, *blobs]
    assert {(one.uid, one.gid, one.mtime, one.mode) for one in members} == {(0, 0, 0, 0o644)}
    assert {one.offset_data % 512 for one in members} == {0}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.zst"])
def test_a_pipe_has_the_bytes_of_a_file(tmp_path: Path, store: MemoryStore, name: str) -> None:
    reading, writing = os.pipe()

    def save() -> None:
        with os.fdopen(writing, "wb") as pipe:
            save_models(["m", "n"], pipe, store=store, compress=name.endswith("zst"))

    with ThreadPoolExecutor(1) as pool, os.fdopen(reading, "rb") as pipe:
        saving = pool.submit(save)
        piped = pipe.read()
        saving.result()
    assert {piped} == {saved(tmp_path, store, name, jobs) for jobs in (1, 5)}


def test_a_pipe_whose_reader_goes_away(store: MemoryStore) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe, pytest.raises(StorageError):
        save_models(["m", "n"], pipe, store=store)


def test_a_file_that_exists_is_kept(tmp_path: Path, store: MemoryStore) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError) as caught:
        save_models("m", path, store=store)
    assert "replace=True" in str(caught.value.hint)
    assert path.read_bytes() == b"mine"
    save_models("m", path, store=store, replace=True)
    assert path.stat().st_size > len(BF16)
    path.unlink()
    with pytest.raises(UsageError):  # another process makes it meanwhile
        save_models("m", path, store=store, progress=lambda *_: path.write_bytes(b"theirs"))
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_only_files_are_replaced(tmp_path: Path, store: MemoryStore) -> None:
    """A pipe in place of the file, and a link in place of the temporary one."""
    other, pipe = tmp_path / "other", tmp_path / "a.tar"
    other.write_bytes(b"mine")
    os.mkfifo(pipe)
    (tmp_path / ".b.tar.saving").symlink_to(other)
    for path in (pipe, tmp_path / "b.tar"):
        with pytest.raises(StorageError):
            save_models("m", path, store=store, replace=True)
    assert other.read_bytes() == b"mine"
    assert set(tmp_path.iterdir()) == {other, pipe, tmp_path / ".b.tar.saving"}


def test_two_at_once_and_what_a_killed_one_left(tmp_path: Path, store: MemoryStore) -> None:
    path, left = tmp_path / "a.tar", tmp_path / ".a.tar.saving"
    left.write_bytes(bytes(10_000_000))
    with left.open("rb+") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BusyError):
            save_models("m", path, store=store)
    save_models("m", path, store=store)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_size < 10_000_000


def test_the_last_byte_of_a_blob_is_damaged(tmp_path: Path, store: MemoryStore) -> None:
    """Without compression: contract/test_homes.py."""
    store.blobs.all[Digest.of(BF16)] = BF16[:-1] + bytes((BF16[-1] ^ 1,))
    with pytest.raises(DigestMismatchError):
        save_models(["n", "m"], tmp_path / "a.tar.zst", store=store)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_replaced_meanwhile(tmp_path: Path, store: MemoryStore) -> None:
    def progress(_nbytes: int, _name: str) -> None:
        transfer({"m": "n"}, store, store)

    with pytest.raises(ConflictError):
        save_models(["m", "n"], tmp_path / "a.tar", store=store, progress=progress)
    assert list(tmp_path.iterdir()) == []
