"""Leftovers: what killed imports left is taken over or removed.

What a living import has is never touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, process

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest, ModelName
from blobstore.store.local import blobs as blobs_module, locks, session
from blobstore.store.local.locks import KeptBlobs, make_owned_folder
from blobstore.store.local.store import Store
from blobstore.store.ports import How

DAY_S = 24 * 3600
ONE = Digest.of(b"one")
KEY = "0" * 64

LIVE = """
import sys
from blobstore import open_store
with open_store(sys.argv[1]).session() as session:
    session.put(b"one")
    session.writer(100, lambda _: None).put(0, b"half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def leave(parent: Path, name: str, *, finished: bytes | None = None, age_s: float = 0) -> Path:
    """Make what a killed import leaves: half a blob, and perhaps a whole one."""
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "0123456789abcdef").write_bytes(b"half a blob")
    (folder / "manifest").write_bytes(b"half a manifest")
    if finished is not None:
        (folder / Digest.of(finished).file_name).write_bytes(finished)
    then = time.time() - age_s
    os.utime(folder, (then, then))
    return folder


def interrupted(store: Store, data: bytes) -> Path:
    """Interrupt an import of ``source`` when it has finished a blob of key KEY.

    Return the blob's file.
    """
    with suppress(KeyboardInterrupt), store.session() as begun:
        begun.note(KEY, begun.put(data))
        raise KeyboardInterrupt
    (left,) = store.kept.left.iterdir()
    return left


def names(folder: Path) -> list[str]:
    """Return the names in a folder; on shared file systems one more is that of its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "owner")


@pytest.fixture
def parent(store: Store) -> Path:
    """Where private folders lie."""
    return store.root / ".blobstore/tmp"


@pytest.mark.parametrize("age_s", [DAY_S - 100, DAY_S + 100])
def test_finished_blobs_wait_for_a_day(store: Store, parent: Path, age_s: float) -> None:
    """The day begins when the next session takes them over: an import may take longer."""
    folder = leave(parent, "1-dead", finished=b"one", age_s=DAY_S + 100)
    commit_model(store, "m", b"two")
    assert not folder.exists()
    (left,) = store.kept.left.iterdir()
    assert left.read_bytes() == b"one"
    then = time.time() - age_s
    os.utime(left, (then, then))
    commit_model(store, "n", b"three")
    assert left.exists() == (age_s < DAY_S)
    assert not blob_path(store, b"one").exists()


def test_a_folder_without_an_owner_is_left_alone_for_a_day(store: Store, parent: Path) -> None:
    young = leave(parent, "new-0123", age_s=DAY_S - 100)
    old = leave(parent, "new-4567", age_s=DAY_S + 100)
    commit_model(store, "m", b"two")
    assert names(young) == ["0123456789abcdef", "manifest"]
    assert not old.exists()


def test_what_a_living_import_has_is_never_touched(store: Store, parent: Path) -> None:
    with process(LIVE, store.root) as child:
        (folder,) = parent.iterdir()
        before = names(folder)
        assert ONE.file_name in before
        os.utime(folder, (time.time() - 2 * DAY_S,) * 2)
        store.kept.clean()
        commit_model(store, "m", b"two")
        assert names(folder) == before
        assert store.kept.take(ONE, store.root) is None
        child.kill()
        child.wait()
        store.kept.clean()
        path = store.kept.take(ONE, store.root)
    assert path is not None
    assert path.read_bytes() == b"one"
    assert names(parent) == []


def test_links_and_files_beside_the_folders_are_not_followed(
    store: Store, parent: Path, tmp_path: Path
) -> None:
    outside = leave(tmp_path, "outside", finished=b"one", age_s=2 * DAY_S)
    parent.mkdir(parents=True)
    (parent / "1-link").symlink_to(outside)
    (parent / "2-file").write_bytes(b"mine")
    os.mkfifo(parent / "3-fifo")
    commit_model(store, "m", b"two")
    assert not store.kept.left.exists()
    assert names(parent) == ["1-link", "2-file", "3-fifo"]
    assert len(names(outside)) == 3


def test_imports_begin_and_clean_up_at_once(tmp_path: Path) -> None:
    """A folder that another import looks at, to see whether it has an owner, can still be owned."""
    errors: list[OSError] = []
    done = threading.Event()

    def begin() -> None:
        try:
            for _ in range(50):
                folder, fd = make_owned_folder(tmp_path / "tmp")
                assert folder.is_dir()
                os.close(fd)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            errors.append(error)

    def clean() -> None:
        while not done.is_set():
            KeptBlobs(tmp_path).clean()

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(begin)
    done.set()
    cleaner.join()
    assert [error for error in errors if not isinstance(error, FileNotFoundError)] == []


def test_an_ingest_that_is_interrupted_keeps_what_is_finished(store: Store, parent: Path) -> None:
    def interrupt() -> None:
        with store.session() as session:
            session.note("0" * 64, session.put(b"one"))
            with closing(session.writer(10, lambda _: None)) as writer:
                writer.put(0, b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert names(parent) == []
    assert names(store.kept.left) == [ONE.file_name]
    with store.session() as session:
        assert session.recall("0" * 64, 4, verify=False) is None
        assert session.recall("1" * 64, 3, verify=False) is None
        blob = session.recall("0" * 64, 3, verify=True)
        assert blob is not None
        assert blob.path.read_bytes() == b"one"
        assert names(store.kept.left) == []
    assert names(parent) == []


def test_what_was_not_durable_is_hashed_whatever_its_stamp_says(
    store: Store, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost write may leave a file's name, size and times over other bytes until a sync."""
    monkeypatch.setattr(session, "syncs_whole", lambda _fd: True)
    left = interrupted(store, b"one")
    status = left.stat()
    left.write_bytes(b"eno")
    os.utime(left, ns=(status.st_atime_ns, status.st_mtime_ns))
    with store.session() as again:
        assert again.recall(KEY, 3, verify=False) is None
    assert names(parent) == []


@pytest.mark.parametrize("is_touched", [True, False])
def test_what_can_not_be_written_back_is_never_taken(
    store: Store, parent: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], is_touched: bool
) -> None:
    """The kernel reports a lost write once; the page cache may hide the disk's bytes."""
    monkeypatch.setattr(session, "syncs_whole", lambda _fd: not is_touched)
    left = interrupted(store, b"one")
    if is_touched:
        os.utime(left)  # durable when it was noted, and written to since

    def lost(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(blobs_module, "write_back", lost)
        with store.session() as again:
            assert again.recall(KEY, 3, verify=False) is None
    assert "can't write back" in "\n".join(logged)
    with store.session() as again:
        assert again.recall(KEY, 3, verify=False) is None
    assert names(parent) == []


@pytest.mark.parametrize(("left", "is_used"), [(b"one", True), (b"two", False)])
def test_what_a_killed_transfer_left_is_hashed_instead_of_copied(
    store: Store, parent: Path, left: bytes, is_used: bool
) -> None:
    """No journal is needed: the blob has the name of its digest."""
    leave(parent, "1-0123456789abcdef")
    (parent / "1-0123456789abcdef" / ONE.file_name).write_bytes(left)
    blob = Descriptor(media_type="x/y", digest=ONE, size=3)
    with store.session() as session:
        how = session.add(blob, BytesReader(b"one"))
        assert (how is How.THERE) == is_used
        session.publish(ModelName.parse("m"), Manifest(config=None, layers=(blob,)))
    assert blob_path(store, b"one").read_bytes() == b"one"


def test_a_folder_on_a_file_server_is_owned_by_the_lock_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks on folders stay on their machine there: another machine sees the file's lock only."""
    monkeypatch.setattr(locks, "may_be_shared", lambda _: True)  # no server is needed to be one
    blobs = KeptBlobs(tmp_path)
    folder, fd = make_owned_folder(blobs.sessions)
    (folder / "1").write_bytes(b"half")
    assert (folder / "owner").exists()
    other = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as any other machine could
    os.close(other)
    (folder / ONE.file_name).write_bytes(b"one")
    blobs.clean()
    assert names(folder) == ["1", ONE.file_name]
    os.close(fd)  # the import was killed
    blobs.clean()
    assert not folder.exists()
    assert names(blobs.left) == [ONE.file_name]
