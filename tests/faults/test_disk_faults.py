"""A read-only disk, or two: exit code 1, one line that names it, and an unchanged store.

On file systems of their own (tmpfs). Disks that are too small: small_disks.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.faults import cannot_run, file_system, remount, run

import blobstore
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is of Linux"),
]
Snapshot = Callable[[Store], dict[str, str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system with a store that holds a model."""
    with file_system(tmp_path / "disk", "size=16m") as mount:
        blobstore.import_model(
            write_checkpoint(tmp_path / "old"), store=open_store(mount / "store"), quant="int4"
        )
        yield mount


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of four weights, of different sizes, without a blob of the other model."""
    weights = {
        f"x{number}.weight": normal(str(number), 100 * number + 64, 64) for number in range(4)
    }
    return write_checkpoint(tmp_path / "new", weights, {**LLAMA_CONFIG, "num_hidden_layers": 4})


def import_into_store(store: Store, source: Path) -> subprocess.CompletedProcess[str]:
    return run("import", source, "--store", store.root)


def import_into(mount: Path, source: Path) -> subprocess.CompletedProcess[str]:
    return run("import", source, "--quant", "int8", "--store", mount / "store", "--jobs", 1)


def assert_refused(done: subprocess.CompletedProcess[str], store: Store, says: str) -> None:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("Error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr, done.stderr
    assert str(store.root) in done.stderr, done.stderr


def test_a_read_only_store_can_be_read_and_not_written(
    disk: Path, source: Path, snapshot: Snapshot
) -> None:
    store = open_store(disk / "store")
    before = snapshot(store)
    remount(disk, "ro")
    assert_refused(import_into(disk, source), store, "read-only file system")
    assert_refused(run("rm", "old:int4", "--store", store.root), store, "read-only file system")
    assert_refused(
        run("cp", "old:int4", "copy", "--store", store.root), store, "read-only file system"
    )
    assert run("list", "--store", store.root).stdout.count("\n") == 2
    assert run("show", "old:int4", "--store", store.root).returncode == 0
    blobstore.open_model("old:int4", store=store, verify=True).close()
    assert snapshot(store) == before


def test_a_store_that_would_have_to_be_made_on_a_read_only_disk(disk: Path, source: Path) -> None:
    remount(disk, "ro")
    store = open_store(disk / "another")
    assert_refused(run("import", source, "--store", store.root), store, "read-only file system")
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["blobs", "manifests"])
def test_a_folder_on_another_disk_is_an_error(
    disk: Path, source: Path, tmp_path: Path, name: str
) -> None:
    """A rename can't cross file systems, and a copy would show half a file under its name."""
    store = open_store(tmp_path / "store")
    store.root.mkdir()
    (disk / name).mkdir()
    (store.root / name).symlink_to(disk / name)
    assert_refused(import_into_store(store, source), store, "another file system")
    assert list((disk / name).iterdir()) == []
    assert not list(store.root.rglob("sha256-*"))
    assert list(store.models()) == []


@pytest.mark.parametrize("name", ["blobs", "manifests"])
def test_a_bind_mount_of_the_same_disk_is_another_one(
    source: Path, tmp_path: Path, name: str
) -> None:
    """As in a container with volumes: equal device numbers, but renames do not cross them."""
    store = open_store(tmp_path / "store")
    for folder in (store.root / name, tmp_path / "volume"):
        folder.mkdir(parents=True)
    done = subprocess.run(["mount", "--bind", tmp_path / "volume", store.root / name], check=False)
    if done.returncode != 0:
        cannot_run("a bind mount needs root")
    try:
        assert_refused(import_into_store(store, source), store, "another file system")
        assert list((tmp_path / "volume").iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", store.root / name], check=True)


def test_prune_says_that_blobs_are_mounted_from_elsewhere(source: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert import_into_store(store, source).returncode == 0
    shutil.copytree(store.blobs.path, tmp_path / "volume")
    (tmp_path / "volume" / f"sha256-{0:064x}").write_bytes(b"of no model")
    done = subprocess.run(["mount", "--bind", tmp_path / "volume", store.blobs.path], check=False)
    if done.returncode != 0:
        cannot_run("a bind mount needs root")
    try:
        prune = run("prune", "--grace", "0s", "--sole-owner", "--store", store.root)
        assert_refused(prune, store, "another file system")
        assert (store.blobs.path / f"sha256-{0:064x}").exists()
        assert not any((store.root / ".blobstore/trash").iterdir())
    finally:
        subprocess.run(["umount", "-l", store.blobs.path], check=True)
