"""The store's lock: shared by writers, exclusive for a clean-up."""

from __future__ import annotations

import fcntl
import signal
import time
from contextlib import ExitStack, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clock import Clock
from support.stores import HOLD_LOCK, commit_model, process

from blobstore.errors import BusyError, StorageError
from blobstore.store.local import locks
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store, open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lock of the tests lies."""
    return tmp_path / "made" / "lock"


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        ("shared", "shared", True),
        ("shared", "exclusive", False),
        ("exclusive", "shared", False),
        ("exclusive", "exclusive", False),
    ],
)
def test_sharers_share_and_one_excludes(path: Path, held: str, wanted: str, free: bool) -> None:
    lock = getattr(StoreLock(path), wanted)
    with getattr(StoreLock(path), held)():
        if free:
            with lock():
                pass
        else:
            with pytest.raises(BusyError) as caught, lock(0):
                pass
            assert caught.value.path == str(path)
    with lock():
        pass


def test_death_frees_the_lock(path: Path) -> None:
    lock = StoreLock(path)
    with process(HOLD_LOCK, path, "exclusive") as child:
        with pytest.raises(BusyError), lock.exclusive(0):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        with lock.exclusive():
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
            clock.now += 3600
            if next(tries) == goes_at:
                held.close()

        slow = {**vars(time), "monotonic": clock, "sleep": sleep}
        monkeypatch.setattr(locks, "time", SimpleNamespace(**slow))
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


@pytest.mark.parametrize("name", ["", "tmp", "copies"])
def test_nothing_is_written_through_a_link(store: Store, tmp_path: Path, name: str) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    commit_model(store, "m", b"one")
    link = store.root / ".blobstore" / name
    if link.exists():
        link.rename(tmp_path / "aside")
    link.symlink_to(elsewhere)
    with pytest.raises(StorageError, match="is a symbolic link"):
        commit_model(store, "n", b"two")
    assert list(elsewhere.iterdir()) == []
