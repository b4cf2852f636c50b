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
from faults.lab.command import At, Done, run
from faults.lab.stops import INTERRUPT, Action, Call, Decide, Fail
from support.checkpoints import safetensors_bytes
from support.corpus import Case, case_id, load
from support.mounts import mounted
from support.stores import blob_path, commit_model, layer_by_hand

import blobstore
from blobstore.errors import StorageError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="calls are stopped at on Linux"),
]
BLOB = safetensors_bytes({"t": np.arange(9.0)})
READS = ("read", "pread64", "preadv", "preadv2")
ORPHANS = [b"first orphan", b"second orphan", b"third orphan"]
PRUNE = ("prune", "--grace", "0", "--sole-owner")


def command(store: Store, decide: Decide, *words: str) -> Done:
    return run(*words, "--store", store.root, within=[store.root], decide=decide)


def eio_at_every_read(store: Store) -> None:
    done = command(store, lambda call: Fail(errno.EIO) if call.name in READS else None, "verify")
    assert (done.code, "input/output error" in done.out) == (3, True)


def eio_at_fsync(store: Store) -> None:
    fault = At(1, Fail(errno.EIO), chosen=lambda call: call.name == "fsync")
    done = command(store, fault, "cp", "m", "n")
    assert (done.code, "input/output error" in done.err) == (1, True)
    assert sum(call.name == "fsync" for call in done.calls) == 1  # it is never tried again


def eintr_everywhere(store: Store) -> None:
    seen = list[Call]()

    def every_third(call: Call) -> Action | None:
        seen.append(call)
        is_meant = call.name in (*READS, "pwrite64", "write", "flock", "fsync")
        return Fail(errno.EINTR) if is_meant and len(seen) % 3 == 0 else None

    done = command(store, every_third, "prune")
    assert (done.code, done.err) == (0, "")


def emfile(store: Store) -> None:
    many = (safetensors_bytes({f"t{number}": np.arange(5000.0)}) for number in range(40))
    commit_model(store, "n", *many)

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)  # noqa: PTH208

    done = run("diff", "n", "m", "--store", store.root, before=few_files)
    assert (done.code, "too many open files" in done.err) == (1, True), done.err


def erofs(store: Store) -> None:
    m, n = ModelName.parse("m"), ModelName.parse("n")
    volume = store.root.parent / "volume"
    shutil.copytree(store.root, volume / "store")
    with mounted(store.root.parent / "read-only", "bind,ro", device=volume) as root:
        copy = open_store(root / "store")
        for change in (
            lambda: commit_model(copy, "n", b"new"),
            lambda: commit_model(open_store(root / "another"), "n", b"new"),
            lambda: copy.copy(m, n),
            lambda: copy.move(m, n),
            lambda: copy.remove(m),
            lambda: prune(copy),
            lambda: blobstore.export_model(m, root / "out", store=copy),
        ):
            with pytest.raises(StorageError, match="read-only file system"):
                change()
        assert verify(copy).is_sound
        assert prune(copy, dry_run=True).removed == ()
        assert set(blobstore.open_model("m", store=copy, verify=True)) == {"t"}


def edquot(store: Store) -> None:
    fault = At(1, Fail(errno.EDQUOT), chosen=lambda call: call.name == "pwrite64")
    done = command(store, fault, "cp", "m", "n")
    assert (done.code, "disk quota exceeded" in done.err) == (1, True)


def sigint_mid_gc(store: Store) -> None:
    for data in ORPHANS:
        layer_by_hand(store, "", data)
    calls = len(command(store, lambda _: None, *PRUNE).calls)
    undo_prune(store)
    for number in sample(range(1, calls + 1), 4):
        done = command(store, At(number, INTERRUPT, chosen=lambda _: True), *PRUNE)
        assert done.code in (0, 130), (number, done.err)
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


@pytest.mark.parametrize("case", [case for case in load("store") if case.id in STATES], ids=case_id)
def test_faults_of_a_store(case: Case, store: Store) -> None:
    commit_model(store, "m", BLOB)
    STATES[case.id](store)
    assert "m:latest" in [str(name) for name, _ in store.models()]
    assert verify(store).is_sound
