"""A store with interrupted calls, few open files, on a read-only disk: what is said and left.

Calls that fail: errors.py.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from faults.lab.cases import sample
from faults.lab.command import At, run
from faults.lab.stops import INTERRUPT, Action, Call, Fail
from support.checkpoints import safetensors_bytes
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
M, N = ModelName.parse("m"), ModelName.parse("n")
BLOB = safetensors_bytes({"t": np.arange(9.0)})
INTERRUPTIBLE = ("read", "pread64", "preadv", "preadv2", "pwrite64", "write", "flock", "fsync")
PRUNE = ("prune", "--grace", "0", "--sole-owner", "--store")


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with the model ``m`` of one blob."""
    commit_model(store, "m", BLOB)
    return store


def test_interrupted_calls_go_on(filled: Store) -> None:
    layer_by_hand(filled, "", b"orphan")
    seen = list[Call]()

    def every_third(call: Call) -> Action | None:
        seen.append(call)
        is_meant = call.name in INTERRUPTIBLE and len(seen) % 3 == 0
        return Fail(errno.EINTR) if is_meant else None

    done = run(*PRUNE, filled.root, within=[filled.root], decide=every_third)
    assert (done.code, done.err) == (0, "")
    assert not blob_path(filled, b"orphan").exists()
    assert verify(filled).is_sound


def test_too_many_open_files_are_an_error(filled: Store) -> None:
    large = (safetensors_bytes({f"t{number}": np.arange(5000.0)}) for number in range(40))
    commit_model(filled, "n", *large)

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)  # noqa: PTH208

    done = run("diff", "n", "m", "--store", filled.root, before=few_files)
    assert (done.code, "too many open files" in done.err) == (1, True), done.err


def test_a_read_only_disk_is_an_error_for_all_that_writes(filled: Store, tmp_path: Path) -> None:
    shutil.copytree(filled.root, tmp_path / "volume/store")
    with mounted(tmp_path / "read-only", "bind,ro", device=tmp_path / "volume") as root:
        store = open_store(root / "store")
        for change in (
            lambda: commit_model(store, "n", b"new"),
            lambda: commit_model(open_store(root / "another"), "n", b"new"),
            lambda: store.copy(M, N),
            lambda: store.remove(M),
            lambda: prune(store),
            lambda: blobstore.export_model(M, root / "out", store=store),
        ):
            with pytest.raises(StorageError, match="read-only file system"):
                change()
        assert verify(store).is_sound
        assert prune(store, dry_run=True).removed == ()
        assert set(blobstore.open_model("m", store=store, verify=True)) == {"t"}


def test_an_interrupted_clean_up_loses_nothing(filled: Store) -> None:
    orphans = [b"first orphan", b"second orphan", b"third orphan"]
    for data in orphans:
        layer_by_hand(filled, "", data)
    calls = len(run(*PRUNE, filled.root, within=[filled.root]).calls)
    undo_prune(filled)
    for number in sample(range(1, calls + 1), 4):
        fault = At(number, INTERRUPT, chosen=lambda _: True)
        done = run(*PRUNE, filled.root, within=[filled.root], decide=fault)
        assert done.code in (0, 130), (number, done.err)
        if filled.trash.contents():
            undo_prune(filled)
        assert all(blob_path(filled, data).read_bytes() == data for data in orphans), number
        assert verify(filled).is_sound
