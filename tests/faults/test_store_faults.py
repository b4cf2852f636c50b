"""A store with few open files, or on a read-only disk: what is said and left."""

import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from faults.lab.command import run
from faults.mounts import mounted
from support.checkpoints import safetensors_bytes
from support.stores import commit_model

import blobstore
from blobstore.errors import StorageError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="calls are stopped at on Linux"),
]
M, N = ModelName.parse("m"), ModelName.parse("n")
BLOB = safetensors_bytes({"t": np.arange(9.0)})


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with the model ``m`` of one blob."""
    commit_model(store, "m", BLOB)
    return store


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
