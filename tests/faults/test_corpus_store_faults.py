"""The store states of the corpus that need a failing call, a small limit or a read-only disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.corpus import Case, case_id, load
from support.faults import READING, calls, file_system, remount, run, sample, strace
from support.store_faults import FAULTS
from support.stores import blob_path, commit_model, layer_by_hand

import blobstore
from blobstore.errors import StorageError
from blobstore.inspection.listing import list_models
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux"),
]
BLOB = safetensors_bytes({"t": np.arange(9.0)})
READS = tuple(f"?{name}" for name in (*READING, "pread64"))
ORPHANS = [b"first orphan", b"second orphan", b"third orphan"]


def command(
    store: Store, log: Path, *words: object, rules: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return run(*words, "--store", store.root, prefix=strace(log, *rules))


def assert_one_error(done: subprocess.CompletedProcess[str], says: str, code: int = 1) -> None:
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert done.stderr.startswith("Error: ")
    assert says in done.stderr


def eio_at_every_read(store: Store, log: Path) -> None:
    rule = f"{','.join(READS)}:error=EIO:when=1+"
    done = command(store, log, "verify", rules=(rule,))
    assert done.returncode == 3
    assert "input/output error" in done.stdout
    assert verify(store).is_sound


def eio_at_fsync(store: Store, log: Path) -> None:
    done = command(store, log, "cp", "m", "n", rules=("fsync:error=EIO:when=1",))
    assert_one_error(done, "input/output error")
    assert calls(log)["fsync"] == 1  # it is never tried again
    assert [str(name) for name, _ in store.models()] == ["m:latest"]


def eintr_everywhere(store: Store, log: Path) -> None:
    names = ",".join((*READS, "pwrite64", "write", "flock", "fsync", "openat"))
    done = command(store, log, "prune", rules=(f"{names}:error=EINTR:when=3+7",))
    assert (done.returncode, done.stderr) == (0, "")
    assert verify(store).is_sound


def emfile(store: Store, log: Path) -> None:
    commit_model(
        store, "n", *(safetensors_bytes({f"t{number}": np.arange(5000.0)}) for number in range(40))
    )
    prefix = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash"]
    assert_one_error(
        run("diff", "n", "m", "--store", store.root, prefix=prefix), "too many open files"
    )
    assert verify(store).is_sound


def erofs(store: Store, log: Path) -> None:
    with file_system(log.parent / "mounted", "size=4m") as folder:
        copy = open_store(shutil.copytree(store.root, folder / "store"))
        remount(folder, "ro")
        m, n = ModelName.parse("m"), ModelName.parse("n")
        for change in (
            lambda: commit_model(copy, "n", b"new"),
            lambda: copy.copy(m, n),
            lambda: copy.move(m, n),
            lambda: copy.remove(m),
            lambda: prune(copy),
        ):
            with pytest.raises(StorageError, match="read-only file system"):
                change()
        assert [model.name for model in list_models(copy)] == [m]
        assert measure_usage(copy).nbytes == len(BLOB)
        assert verify(copy).is_sound
        assert prune(copy, dry_run=True).removed == ()
        assert set(blobstore.open_model("m", store=copy, verify=True)) == {"t"}


def edquot(store: Store, log: Path) -> None:
    done = command(store, log, "cp", "m", "n", rules=("pwrite64:error=EDQUOT:when=1",))
    assert_one_error(done, "disk quota exceeded")
    assert [str(name) for name, _ in store.models()] == ["m:latest"]
    assert verify(store).is_sound


def sigint_mid_gc(store: Store, log: Path, most: int) -> None:
    for data in ORPHANS:
        layer_by_hand(store, "", data)
        os.utime(blob_path(store, data), (0, 0))
    done = command(store, log, "prune")
    assert (done.returncode, done.stderr) == (0, "")
    points = [
        (name, number)
        for name in ("flock", "mkdir", "rename", "fsync")
        for number in range(1, calls(log)[name] + 1)
    ]
    undo_prune(store)
    for name, number in sample(points, most):
        for data in ORPHANS:
            os.utime(blob_path(store, data), (0, 0))
        done = command(store, log, "prune", rules=(f"{name}:signal=SIGINT:when={number}",))
        assert done.returncode in (0, 130), (name, number, done.stderr)
        assert verify(store).is_sound
        if store.trash.contents():
            undo_prune(store)
        assert all(blob_path(store, data).read_bytes() == data for data in ORPHANS), (name, number)


STATES: dict[str, Callable[[Store, Path], None]] = {
    "store-eio-at-every-read": eio_at_every_read,
    "store-eio-at-fsync": eio_at_fsync,
    "store-eintr-everywhere": eintr_everywhere,
    "store-emfile": emfile,
    "store-erofs": erofs,
    "store-edquot": edquot,
    "store-sigint-mid-gc": lambda store, log: sigint_mid_gc(store, log, 2),
}


def test_every_case_is_shown() -> None:
    assert STATES.keys() == FAULTS


@pytest.mark.parametrize("case", [case for case in load("store") if case.id in FAULTS], ids=case_id)
def test_faults_of_a_store(case: Case, store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", BLOB)
    STATES[case.id](store, tmp_path / "log")


@pytest.mark.long
def test_a_clean_up_interrupted_at_any_call(store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", BLOB)
    sigint_mid_gc(store, tmp_path / "log", 10_000)
