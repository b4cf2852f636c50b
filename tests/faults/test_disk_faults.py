"""Parts of a store on another disk: one line that names it, and an unchanged store.

Disks that are too small: small_disks.py. Read-only ones: test_corpus_store_faults.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.lab.command import Done, run
from support.checkpoints import small_tensors, write_checkpoint
from support.faults import cannot_run, file_system

from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="the mounts are of Linux"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", small_tensors())


@contextmanager
def bind_mount(volume: Path, folder: Path) -> Iterator[None]:
    """Mount a folder over another, as a container does with a volume."""
    if subprocess.run(["mount", "--bind", volume, folder], check=False).returncode != 0:
        cannot_run("a bind mount needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def check_refused(done: Done, store: Store) -> None:
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
    assert "another file system" in done.err
    assert str(store.root) in done.err


@pytest.mark.parametrize("name", ["blobs", "manifests"])
def test_a_folder_on_another_disk_is_an_error(
    store: Store, source: Path, tmp_path: Path, name: str
) -> None:
    """A rename can't cross file systems, and a copy would show half a file under its name."""
    with file_system(tmp_path / "disk", "size=16m") as disk:
        store.root.mkdir()
        (disk / name).mkdir()
        (store.root / name).symlink_to(disk / name)
        check_refused(run("import", source, "m", "--store", store.root), store)
        assert list((disk / name).iterdir()) == []
        assert not list(store.root.rglob("sha256-*"))
        assert list(store.models()) == []


@pytest.mark.parametrize("name", ["blobs", "manifests"])
def test_a_bind_mount_of_the_same_disk_is_another_one(
    store: Store, source: Path, tmp_path: Path, name: str
) -> None:
    """As in a container with volumes: equal device numbers, but renames do not cross them."""
    for folder in (store.root / name, tmp_path / "volume"):
        folder.mkdir(parents=True)
    with bind_mount(tmp_path / "volume", store.root / name):
        check_refused(run("import", source, "m", "--store", store.root), store)
        assert list((tmp_path / "volume").iterdir()) == []


def test_prune_says_that_blobs_are_mounted_from_elsewhere(
    store: Store, source: Path, tmp_path: Path
) -> None:
    assert run("import", source, "m", "--store", store.root).code == 0
    shutil.copytree(store.blobs.path, tmp_path / "volume")
    (tmp_path / "volume" / f"sha256-{0:064x}").write_bytes(b"of no model")
    with bind_mount(tmp_path / "volume", store.blobs.path):
        line = ("prune", "--grace", "0s", "--sole-owner", "--store", store.root)
        check_refused(run(*line), store)
        assert (store.blobs.path / f"sha256-{0:064x}").exists()
        assert not any((store.root / ".blobstore/trash").iterdir())
