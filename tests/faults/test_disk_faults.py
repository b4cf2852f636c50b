"""A full disk, and parts of a store on another one: a line that says so, an unchanged store."""

import shutil
import sys
from pathlib import Path

import pytest
from faults.lab.command import run
from faults.mounts import mounted
from support.checkpoints import small_tensors, write_checkpoint
from support.stores import commit_model

from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="the mounts are of Linux"),
]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", small_tensors())
    with mounted(tmp_path / "disk", "size=16k") as disk:
        done = run("import", source, "m", "--store", disk / "store")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
        assert "no space left on device" in done.err
        assert not list(disk.rglob("sha256-*"))
        assert not list(disk.glob("store/manifests/*"))


def test_a_bind_mount_of_the_same_disk_is_another_one(store: Store, tmp_path: Path) -> None:
    """As in a container with volumes: equal device numbers, but renames do not cross them."""
    commit_model(store, "m", b"of m")
    source = write_checkpoint(tmp_path / "source", small_tensors())
    volume = shutil.copytree(store.blobs.path, tmp_path / "volume")
    (unneeded := volume / f"sha256-{0:064x}").write_bytes(b"of no model")
    with mounted(store.blobs.path, "bind", device=volume):
        for line in (("import", source, "m"), ("prune", "--grace", "0s", "--sole-owner")):
            done = run(*line, "--store", store.root)
            assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
            assert "must be on the same file system" in done.err
            assert str(store.root) in done.err
    assert len(list(volume.iterdir())) == 2
    assert unneeded.exists()
