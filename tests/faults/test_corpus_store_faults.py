"""The store states of the corpus that need a failing call, a small limit or a read-only disk."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable

import numpy as np
import pytest
from faults.lab.cases import sample
from faults.lab.command import Action, At, Done, Fail, Interrupt, run
from faults.lab.stops import Call
from support.checkpoints import safetensors_bytes
from support.corpus import Case, case_id, load
from support.faults import file_system, remount
from support.stores import FAULTS, blob_path, commit_model, layer_by_hand

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
    pytest.mark.skipif(sys.platform != "linux", reason="calls are stopped at on Linux"),
]
BLOB = safetensors_bytes({"t": np.arange(9.0)})
READS = ("read", "pread64", "preadv", "preadv2")
ORPHANS = [b"first orphan", b"second orphan", b"third orphan"]


def command(store: Store, decide: Callable[[Call], Action | None], *words: str) -> Done:
    return run(*words, "--store", store.root, within=[store.root], decide=decide)


def check_one_error(done: Done, says: str, store: Store) -> None:
    """Check that a command says one sentence and left everything as it was."""
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert done.err.startswith("Error: ")
    assert says in done.err
    assert [str(name) for name, _ in store.models()] == ["m:latest"]
    assert verify(store).is_sound


def eio_at_every_read(store: Store) -> None:
    done = command(store, lambda call: Fail(errno.EIO) if call.name in READS else None, "verify")
    assert (done.code, "input/output error" in done.out) == (3, True)
    assert verify(store).is_sound


def eio_at_fsync(store: Store) -> None:
    fault = At(1, Fail(errno.EIO), chosen=lambda call: call.name == "fsync")
    done = command(store, fault, "cp", "m", "n")
    check_one_error(done, "input/output error", store)
    assert sum(call.name == "fsync" for call in done.calls) == 1  # it is never tried again


def eintr_everywhere(store: Store) -> None:
    seen = list[Call]()

    def every_third(call: Call) -> Action | None:
        seen.append(call)
        is_meant = call.name in (*READS, "pwrite64", "write", "flock", "fsync")
        return Fail(errno.EINTR) if is_meant and len(seen) % 3 == 0 else None

    done = command(store, every_third, "prune")
    assert (done.code, done.err) == (0, "")
    assert verify(store).is_sound


def emfile(store: Store) -> None:
    many = (safetensors_bytes({f"t{number}": np.arange(5000.0)}) for number in range(40))
    commit_model(store, "n", *many)

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)  # noqa: PTH208

    done = run("diff", "n", "m", "--store", store.root, before=few_files)
    assert (done.code, "too many open files" in done.err) == (1, True), done.err
    assert verify(store).is_sound


def erofs(store: Store) -> None:
    with file_system(store.root.parent / "mounted", "size=4m") as folder:
        copy = open_store(shutil.copytree(store.root, folder / "store"))
        remount(folder, "ro")
        m, n = ModelName.parse("m"), ModelName.parse("n")
        for change in (
            lambda: commit_model(copy, "n", b"new"),
            lambda: commit_model(open_store(folder / "another"), "n", b"new"),
            lambda: copy.copy(m, n),
            lambda: copy.move(m, n),
            lambda: copy.remove(m),
            lambda: prune(copy),
            lambda: blobstore.export_model(m, folder / "out", store=copy),
        ):
            with pytest.raises(StorageError, match="read-only file system"):
                change()
        assert [model.name for model in list_models(copy)] == [m]
        assert measure_usage(copy).nbytes == len(BLOB)
        assert verify(copy).is_sound
        assert prune(copy, dry_run=True).removed == ()
        assert set(blobstore.open_model("m", store=copy, verify=True)) == {"t"}


def edquot(store: Store) -> None:
    fault = At(1, Fail(errno.EDQUOT), chosen=lambda call: call.name == "pwrite64")
    check_one_error(command(store, fault, "cp", "m", "n"), "disk quota exceeded", store)


def sigint_mid_gc(store: Store, most: int = 4) -> None:
    for data in ORPHANS:
        layer_by_hand(store, "", data)
    calls = len(command(store, lambda _: None, "prune", "--grace", "0", "--sole-owner").calls)
    undo_prune(store)
    for number in sample(range(1, calls + 1), most):
        fault = At(number, Interrupt(), chosen=lambda _: True)
        done = command(store, fault, "prune", "--grace", "0", "--sole-owner")
        assert done.code in (0, 130), (number, done.err)
        assert verify(store).is_sound
        if store.trash.contents():
            undo_prune(store)
        assert all(blob_path(store, data).read_bytes() == data for data in ORPHANS), number


STATES: dict[str, Callable[[Store], None]] = {
    "store-eio-at-every-read": eio_at_every_read,
    "store-eio-at-fsync": eio_at_fsync,
    "store-eintr-everywhere": eintr_everywhere,
    "store-emfile": emfile,
    "store-erofs": erofs,
    "store-edquot": edquot,
    "store-sigint-mid-gc": sigint_mid_gc,
}
assert STATES.keys() == FAULTS


@pytest.mark.parametrize("case", [case for case in load("store") if case.id in FAULTS], ids=case_id)
def test_faults_of_a_store(case: Case, store: Store) -> None:
    commit_model(store, "m", BLOB)
    STATES[case.id](store)


@pytest.mark.long
def test_a_clean_up_interrupted_at_any_call(store: Store) -> None:
    commit_model(store, "m", BLOB)
    sigint_mid_gc(store, 10_000)
