"""Blobs without a manifest: what killed imports left is taken over or removed. Hints of them."""

import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.stores import blob_path, commit_model, process

from blobstore.errors import LimitExceededError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.hints import MOST_BYTES, HintFile
from blobstore.store.local import session as session_module
from blobstore.store.local.store import Store

DAY_S = 24 * 3600
KEY = "0" * 64
ONE = Digest.of(b"one")
BLOB = Descriptor(media_type="x/y", digest=ONE, size=3)
M = ModelName.parse("m")
LIVE = """
import sys
from blobstore import open_store
with open_store(sys.argv[1]).session() as session:
    session.put(b"one")
    session.writer(100, lambda _: None).put(0, b"half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def age(path: Path, age_s: float) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def leave(parent: Path, name: str, finished: bytes = b"one", age_s: float = 0) -> Path:
    """Make what a killed import leaves: half a blob, and a whole one."""
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "0123456789abcdef").write_bytes(b"half a blob")
    (folder / ONE.file_name).write_bytes(finished)
    age(folder, age_s)
    return folder


def interrupted(store: Store) -> Path:
    """Interrupt an import when it has finished a blob of key KEY; return the blob's file."""
    with suppress(KeyboardInterrupt), store.session() as session:
        session.note(KEY, session.put(b"one"))
        with closing(session.writer(10, lambda _: None)) as writer:
            writer.put(0, b"half")
        raise KeyboardInterrupt
    return next(store.kept.left.iterdir())


def names(folder: Path) -> list[str]:
    """Return the names in a folder; on shared file systems one more is that of its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != "owner")


@pytest.fixture
def parent(store: Store) -> Path:
    return store.root / ".blobstore/tmp"


@pytest.mark.parametrize("age_s", [DAY_S - 1000, DAY_S + 1000])
def test_finished_blobs_wait_for_a_day(store: Store, parent: Path, age_s: float) -> None:
    """The day begins when the next session takes them over: an import may take longer."""
    folder = leave(parent, "1-dead", age_s=DAY_S + 1000)
    young = leave(parent, "new-0123", age_s=DAY_S - 1000)  # it may get an owner
    commit_model(store, "m", b"two")
    assert not folder.exists()
    assert young.exists()
    (left,) = store.kept.left.iterdir()
    age(left, age_s)
    commit_model(store, "n", b"three")
    assert left.exists() == (age_s < DAY_S)
    assert not blob_path(store, b"one").exists()


def test_what_a_living_import_has_is_never_touched(store: Store, parent: Path) -> None:
    with process(LIVE, store.root) as child:
        (folder,) = parent.iterdir()
        before = names(folder)
        assert ONE.file_name in before
        age(folder, 2 * DAY_S)
        commit_model(store, "m", b"two")
        assert names(folder) == before
        child.kill()
        child.wait()
        store.kept.clean()
    path = store.kept.take(ONE, store.root)
    assert path is not None
    assert path.read_bytes() == b"one"
    assert names(parent) == []


def test_links_and_files_beside_are_ignored(store: Store, parent: Path, tmp_path: Path) -> None:
    outside = leave(tmp_path, "outside", age_s=2 * DAY_S)
    parent.mkdir(parents=True)
    (parent / "1-link").symlink_to(outside)
    (parent / "2-file").write_bytes(b"mine")
    os.mkfifo(parent / "3-fifo")
    commit_model(store, "m", b"two")
    assert not store.kept.left.exists()
    assert names(parent) == ["1-link", "2-file", "3-fifo"]
    assert len(names(outside)) == 2


def test_an_ingest_that_is_interrupted_keeps_what_is_finished(store: Store, parent: Path) -> None:
    left = interrupted(store)
    assert names(parent) == []
    with store.session() as session:
        assert session.recall(KEY, 4, verify=False) is None
        assert session.recall("1" * 64, 3, verify=False) is None
        blob = session.recall(KEY, 3, verify=True)
        assert blob is not None
        assert blob.path.read_bytes() == b"one"
        assert not left.exists()
    assert names(parent) == []


def test_what_was_not_durable_is_hashed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost write may leave a file's name, size and times over other bytes until a sync."""
    monkeypatch.setattr(session_module, "syncs_whole", lambda _fd: True)
    left = interrupted(store)
    status = left.stat()
    left.write_bytes(b"eno")
    os.utime(left, ns=(status.st_atime_ns, status.st_mtime_ns))
    with store.session() as again:
        assert again.recall(KEY, 3, verify=False) is None


# Kept by sessions, for others on any machine: another machine's journal may be lost


def keep(store: Store) -> Path:
    """Keep a blob as a worker does, without a journal; return its path."""
    with store.session() as session:
        session.note(KEY, session.put(b"one"))
        session.keep()
    (store.root / ".blobstore/hints/journal").unlink()
    return store.kept.path / ONE.file_name


def test_two_sessions_publish_one_kept_blob(store: Store, parent: Path) -> None:
    path = keep(store)
    assert path.read_bytes() == b"one"
    assert names(parent) == []
    assert not store.blobs.digests()
    with store.session() as one, store.session() as other:
        for session in (one, other):
            found = session.recall(ONE.hex, 3, verify=True)
            assert found is not None
            assert (found.digest, found.size) == (ONE, 3)
        assert one.publish(M, Manifest(layers=(BLOB,))) == {ONE}
        assert other.publish(M, Manifest(layers=(BLOB,))) == set()
    assert blob_path(store, b"one").read_bytes() == b"one"
    assert not path.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda path, _: path.write_bytes(b"0ne"),
        lambda path, moved: path.symlink_to(path.rename(moved)),
        Path.rename,
    ],
)
def test_only_the_kept_blob_is_found(store: Store, change: Callable[[Path, Path], object]) -> None:
    change(keep(store), store.root / "moved")
    with store.session() as session:
        for key in (KEY, ONE.hex, "x", "../../moved"):
            assert session.recall(key, 3, verify=True) is None


# Hints: what was noted is found again, whatever else is in the files


KEYS = [f"{number:064x}" for number in range(3)]


def test_a_file_that_was_torn_at_any_byte_loses_that_line_only(tmp_path: Path) -> None:
    """A killed import, or a full disk, may end a file anywhere. The next import adds to it."""
    path = tmp_path / "file"
    HintFile(path).add([(KEYS[0], "first")])
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        HintFile(path).add([(KEYS[1], "second")])
        expected = {KEYS[1]: "second"} | ({KEYS[0]: "first"} if end >= len(whole) - 1 else {})
        assert HintFile(path).read() == expected, end


@pytest.mark.parametrize(
    "foreign",
    [bytes(range(256)) * 40, b"a" * 500_000, b"%b text 00000000\n" % KEYS[2].encode()],
    ids=["noise", "one vast line", "a wrong sum"],
)
def test_foreign_bytes_are_passed_over(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "file"
    HintFile(path).add([(KEYS[0], "first")])
    path.write_bytes(foreign + b"\n" + path.read_bytes() + foreign)
    HintFile(path).add([(KEYS[1], "second")])
    assert HintFile(path).read() == {KEYS[0]: "first", KEYS[1]: "second"}


def test_a_result_is_read_back_and_replaced_and_goes_with_the_last_model(store: Store) -> None:
    digest = commit_model(store, "m", b"one").digest.hex
    name, gone = f"quality/{digest}", f"quality/{'0' * 64}"
    assert store.results.read(name) is None
    for place, text in ((name, b"old"), (name, b"new"), (gone, b"gone"), ("verify", b"sound")):
        store.results.keep(place, text)
    path, found = store.results.read(name) or ("", b"")
    assert (Path(path).read_bytes(), found) == (b"new", b"new")
    folder = store.root / ".blobstore/results/quality"
    (folder / f"{digest}.json.0123456789abcdef").write_bytes(b"unfinished")
    (folder / "notes.txt").write_bytes(b"of another program")
    prune(store)
    assert {file.name for file in folder.iterdir()} == {f"{digest}.json", "notes.txt"}
    assert (store.results.read("verify") or ("", b""))[1] == b"sound"


def test_a_large_result_is_neither_kept_nor_read(store: Store) -> None:
    store.root.mkdir()
    store.results.keep("verify", bytes(MOST_BYTES + 1))
    assert store.results.read("verify") is None
    store.results.keep("verify", b"1")
    os.truncate(store.root / ".blobstore/results/verify.json", MOST_BYTES + 1)
    with pytest.raises(LimitExceededError, match="at most"):
        store.results.read("verify")
