"""The store's lock: shared by writers, exclusive for a clean-up; who waits learns who holds it."""

import fcntl
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from itertools import count
from pathlib import Path

import pytest
from support.clock import Clock
from support.stores import commit_model, process

from blobstore.errors import BusyError, StorageError
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store, open_store, pack

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_SH)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "lock"


def busy(path: Path) -> BusyError:
    with pytest.raises(BusyError) as caught, StoreLock(path).exclusive(0):
        pass
    return caught.value


@pytest.mark.parametrize("held", ["shared", "exclusive"])
def test_sharers_share_and_one_excludes(path: Path, held: str) -> None:
    with getattr(StoreLock(path), held)():
        assert busy(path).path == str(path)
        refused = pytest.raises(BusyError) if held == "exclusive" else nullcontext()
        with refused, StoreLock(path).shared(0):
            pass
    with StoreLock(path).exclusive(0):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who holds a lock")
def test_those_who_live_are_named(path: Path) -> None:
    """Death frees a lock."""
    with StoreLock(path).shared(), process(HOLD, path) as other:
        names = [f"process {pid}" for pid in (os.getpid(), other.pid)]
        assert [name in busy(path).message for name in names] == [True, True]
        other.kill()
        other.wait()
        assert [name in busy(path).message for name in names] == [True, False]
    with StoreLock(path).exclusive(0):
        pass


@pytest.mark.parametrize("goes_at", [2, None])
def test_a_machine_that_sleeps_uses_up_no_patience(
    path: Path, monkeypatch: pytest.MonkeyPatch, goes_at: int | None
) -> None:
    """Every try takes an hour: a holder that goes is noticed, and one that stays is an error."""
    clock, tries = Clock(), count(1)
    with ExitStack() as held:
        held.enter_context(StoreLock(path).exclusive())

        def sleep(_seconds: float) -> None:
            clock.sleep(3600)
            if next(tries) == goes_at:
                held.close()

        monkeypatch.setattr(time, "monotonic", clock)
        monkeypatch.setattr(time, "sleep", sleep)
        with nullcontext() if goes_at else pytest.raises(BusyError), StoreLock(path).shared(10):
            pass
    assert next(tries) == (3 if goes_at else 21)


def test_it_is_flock_so_that_other_programs_can_take_it(store: Store) -> None:
    commit_model(store, "m", b"one")
    lock = store.root / ".blobstore" / "lock"
    store = open_store(store.root, wait_s=0)
    with lock.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError):
            commit_model(store, "n", b"two")
        assert [str(name) for name, _ in store.models()] == ["m:latest"]
        fcntl.flock(file, fcntl.LOCK_SH)
        commit_model(store, "n", b"two")


@pytest.mark.parametrize("name", ["", "tmp", "copies", "lock", "packed", "packed/blobs"])
def test_nothing_is_written_through_a_link(store: Store, tmp_path: Path, name: str) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    commit_model(store, "m", b"one")
    pack(store, "m")
    link = store.root / ".blobstore" / name
    if link.exists():
        link.rename(tmp_path / "aside")
    link.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="symbolic link"):
        commit_model(store, "n", b"two")
    assert list(elsewhere.iterdir()) == []
