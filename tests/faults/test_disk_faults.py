"""Parts of a store on another disk: one line that names it, and an unchanged store.

Disks that are too small: small_disks.py. Read-only ones: test_store_faults.py.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from faults.lab.command import Done, run
from support.checkpoints import small_tensors, write_checkpoint
from support.mounts import mounted
from support.stores import commit_model

from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="the mounts are of Linux"),
]


def check_refused(done: Done, store: Store) -> None:
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
    assert "must be on the same file system" in done.err
    assert str(store.root) in done.err


def test_a_folder_on_another_disk_is_an_error(store: Store, tmp_path: Path) -> None:
    """A rename can't cross file systems, and a copy would show half a file under its name."""
    source = write_checkpoint(tmp_path / "source", small_tensors())
    with mounted(tmp_path / "disk", "size=16m") as disk:
        store.root.mkdir()
        store.manifests.path.symlink_to(disk)
        check_refused(run("import", source, "m", "--store", store.root), store)
        assert list(disk.iterdir()) == []
        assert not list(store.root.rglob("sha256-*"))


def test_a_bind_mount_of_the_same_disk_is_another_one(store: Store, tmp_path: Path) -> None:
    """As in a container with volumes: equal device numbers, but renames do not cross them."""
    commit_model(store, "m", b"of m")
    source = write_checkpoint(tmp_path / "source", small_tensors())
    volume = shutil.copytree(store.blobs.path, tmp_path / "volume")
    (unneeded := volume / f"sha256-{0:064x}").write_bytes(b"of no model")
    with mounted(store.blobs.path, "bind", device=volume):
        for line in (("import", source, "m"), ("prune", "--grace", "0s", "--sole-owner")):
            check_refused(run(*line, "--store", store.root), store)
    assert len(list(volume.iterdir())) == 2
    assert unneeded.exists()
