"""Two at once: imports, removals and readers in one folder; a model is opened as a whole."""

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import safetensors_bytes, write_checkpoint
from support.clock import Clock
from support.stores import blob_path, commit_model, descriptor, link_by_hand, meanwhile, process

import blobstore
from blobstore.errors import BusyError, CorruptDataError, StorageError
from blobstore.formats.documents import Manifest
from blobstore.store.care.prune import prune
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.store import Store, open_store, pack
from blobstore.store.ports import Removal


def sizes(store: Store) -> dict[str, int]:
    return {
        str(name): manifest.layers[0].size
        for name, manifest in store.models()
        if isinstance(manifest, Manifest)
    }


def in_mid_commit(monkeypatch: pytest.MonkeyPatch, store: Store, act: Callable[[], object]) -> None:
    """Let another act when the next commit's blobs are visible and its manifest is not."""
    meanwhile(monkeypatch, "open", store.root / "blobs", act)


def test_a_sibling_is_removed_in_mid_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it their folder, for a moment."""
    commit_model(store, "x:old", b"old")
    other = open_store(store.root, wait_s=0)

    def remove() -> None:
        other.remove("x:old")
        os.removedirs(store.root / "manifests/registry.ollama.ai/library/x")

    in_mid_commit(monkeypatch, store, remove)
    commit_model(store, "x:new", b"new")
    assert sizes(store) == {"x:new": 3}


def test_a_replaced_model_is_not_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "x:old", b"old")
    in_mid_commit(monkeypatch, store, lambda: commit_model(store, "x:old", b"newer"))
    store.move("x:old", "x:new")
    assert sizes(store) == {"x:new": len(b"old"), "x:old": len(b"newer")}


@pytest.mark.parametrize(
    "change", [lambda store: commit_model(store, "n", b"two"), lambda store: store.remove("m")]
)
def test_names_change_one_after_the_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], object]
) -> None:
    """Who looks at a manifest, links it or removes it does so alone; nobody waits for ever."""
    commit_model(store, "m", b"one")
    with store.names_lock.exclusive(), monkeypatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "monotonic", clock)
        patch.setattr(time, "sleep", clock.sleep)
        with pytest.raises(BusyError, match="names"):
            change(store)
        assert sizes(store) == {"m:latest": 3}
    change(store)


def test_a_blob_is_replaced_while_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """On FUSE a name is looked up, then its target is opened, which was just replaced."""
    commit_model(store, "m", b"one")
    replaced = Mock(side_effect=FileNotFoundError(errno.ENOENT, "no such file or directory"))
    meanwhile(monkeypatch, "open", blob_path(store, b"one"), replaced)
    store.blobs.check(descriptor(b"one"))
    assert replaced.called


FIRST, SECOND, OTHER = (
    safetensors_bytes({name: np.arange(9.0)}) for name in ("first", "second", "other")
)


def test_blobs_stay_while_a_model_is_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_model(store, "m", FIRST, SECOND)
    other = open_store(store.root, wait_s=0)
    removals: list[Removal] = []
    path = blob_path(store, SECOND)
    meanwhile(monkeypatch, "open", path, lambda: removals.append(other.remove("m")))
    with blobstore.open_model("m", store=store) as model:
        assert set(model) == {"first", "second"}
    assert f"process {os.getpid()}" in (removals[0].reason or "")
    assert len(removals[0].kept) == 2


def test_an_open_model_keeps_everything_while_prune_runs(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store) as model:
        store.remove("m")
        for _ in range(2):
            prune(store, grace_s=0, sole_owner=True)
        assert list((store.root / "blobs").iterdir()) == []
        model.verify()
        assert model.config.file_type == "int4"
        assert b"LlamaForCausalLM" in model.document("config.json")
        assert all(array.size for array in model.arrays("mlx").values())


def test_a_store_of_ollamas_is_read_without_a_lock_and_nothing_is_written(store: Store) -> None:
    link_by_hand(store, "m", {"first": FIRST})
    with store.lease() as is_held:
        assert not is_held
    assert set(blobstore.open_model("m", store=store)) == {"first"}
    assert not (store.root / ".blobstore").exists()


def test_a_store_that_may_not_be_written_to_can_be_opened(store: Store) -> None:
    commit_model(store, "m", FIRST)
    lock = store.root / ".blobstore/lock"
    lock.chmod(0o444)
    with store.lease() as is_held:
        assert is_held
        lock.chmod(0o644)
        with pytest.raises(BusyError), store.alone(0):
            pass
    lock.unlink()
    lock.symlink_to("/dev/null")
    assert set(blobstore.open_model("m", store=store)) == {"first"}


def test_a_model_is_replaced_while_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lease: another program acts between reading a manifest and opening blobs."""
    link_by_hand(store, "m", {"first": FIRST, "second": SECOND})

    def replace() -> None:
        blob_path(store, SECOND).unlink()
        link_by_hand(store, "m", {"other": OTHER})

    meanwhile(monkeypatch, "open", blob_path(store, SECOND), replace)
    assert set(blobstore.open_model("m", store=store)) == {"other"}


@pytest.mark.usefixtures("mapped")
def test_a_blob_that_is_cut_under_an_open_model_is_an_error_and_no_signal(store: Store) -> None:
    link_by_hand(store, "m", {"first": FIRST})
    with blobstore.open_model("m", store=store) as model:
        tensor = model["first"]
        assert plain(tensor)[8] == 8
        os.truncate(blob_path(store, FIRST), 100)
        for use in (tensor.numpy, tensor.raw, tensor.dequantize, model.verify):
            with pytest.raises(CorruptDataError, match="was truncated"):
                use()


# The store's lock: shared by writers, exclusive for a clean-up; who waits learns who holds it


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
