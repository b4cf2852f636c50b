"""A disk that is full or read-only: exit code 1, one line that says so and where, and the store as it was.

On small file systems of their own (tmpfs), sized so that the space ends in a blob, in a document or at the manifest.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.faults import file_system, leave_room, remount, run

import blobstore
from blobstore.store import Store, open_store

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is of Linux")]
Snapshot = Callable[[Store], dict[str, str]]
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system with a store that holds a model."""
    with file_system(tmp_path / "disk", "size=16m,nr_inodes=10000") as mount:
        blobstore.import_model(write_checkpoint(tmp_path / "old"), store=open_store(mount / "store"), quant="int4")
        yield mount


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of four weights, of different sizes, that shares no blob with the other model."""
    weights = {f"x{number}.weight": normal(str(number), 100 * number + 64, 64) for number in range(4)}
    return write_checkpoint(tmp_path / "new", weights, {**LLAMA_CONFIG, "num_hidden_layers": 4})


def import_into(mount: Path, source: Path) -> subprocess.CompletedProcess[str]:
    return run("import", source, "--quant", "int8", "--store", mount / "store", "--jobs", 1)


def assert_refused(done: subprocess.CompletedProcess[str], store: Store, says: str) -> None:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("Error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr, done.stderr
    assert str(store.root) in done.stderr, done.stderr


def room_for(source: Path) -> dict[str, int]:
    """Return how many blocks an import needs up to some moments; journal, documents and manifest take one each."""
    plan = blobstore.plan_import(source, quant="int8")
    blobs = sum(-(-blob.size // PAGE) for blob in plan.blobs) + 1
    documents = len(plan.documents) + 1
    assert all(len(data) <= PAGE for data in (*plan.documents.values(), plan.config.encode()))
    return {
        "nothing": 0,
        "half a blob": 1,
        "half the blobs": blobs // 2,
        "all blobs": blobs,
        "all but the config": blobs + documents - 1,
        "all but the manifest": blobs + documents,
        "everything": blobs + documents + 1,
    }


ROOMS = ("nothing", "half a blob", "half the blobs", "all blobs", "all but the config", "all but the manifest")


@pytest.mark.parametrize("room", ROOMS)
def test_a_full_disk(disk: Path, source: Path, snapshot: Snapshot, room: str) -> None:
    store = open_store(disk / "store")
    before = snapshot(store)
    leave_room(disk, blocks=room_for(source)[room])
    assert_refused(import_into(disk, source), store, "no space left on device")
    assert snapshot(store) == before
    assert list(store.root.glob(".blobstore/tmp/*")) == []


def test_a_disk_with_just_enough_room(disk: Path, source: Path) -> None:
    leave_room(disk, blocks=room_for(source)["everything"])
    assert import_into(disk, source).returncode == 0


FILES = 11
"""What an import of four weights makes: a folder, four blobs, a journal, three documents, a manifest and its folder."""


@pytest.mark.parametrize("free", [0, 1, 2, 4, 6, 8, 10])
def test_a_disk_without_room_for_another_file(disk: Path, source: Path, snapshot: Snapshot, free: int) -> None:
    store = open_store(disk / "store")
    before = snapshot(store)
    leave_room(disk, files=free)
    assert_refused(import_into(disk, source), store, "no space left on device")
    assert snapshot(store) == before
    assert list(store.root.glob(".blobstore/tmp/*")) == []


def test_a_disk_with_just_enough_room_for_files(disk: Path, source: Path) -> None:
    leave_room(disk, files=FILES)
    assert import_into(disk, source).returncode == 0


def test_a_model_that_no_longer_fits_does_not_hurt_the_one_it_would_replace(
    disk: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    store = open_store(disk / "store")
    before = snapshot(store)
    leave_room(disk, blocks=5)
    larger = write_checkpoint(tmp_path / "larger", {"x.weight": normal("big", 2000, 64)})
    assert_refused(run("import", larger, "old:int4", "--store", store.root), store, "no space left on device")
    assert snapshot(store) == before
    blobstore.open_model("old:int4", store=store, verify=True).close()


def test_a_read_only_store_can_be_read_and_not_written(disk: Path, source: Path, snapshot: Snapshot) -> None:
    store = open_store(disk / "store")
    before = snapshot(store)
    remount(disk, "ro")
    assert_refused(import_into(disk, source), store, "read-only file system")
    assert_refused(run("rm", "old:int4", "--store", store.root), store, "read-only file system")
    assert_refused(run("cp", "old:int4", "copy", "--store", store.root), store, "read-only file system")
    assert run("list", "--store", store.root).stdout.count("\n") == 2
    assert run("show", "old:int4", "--store", store.root).returncode == 0
    blobstore.open_model("old:int4", store=store, verify=True).close()
    assert snapshot(store) == before


def test_a_store_that_would_have_to_be_made_on_a_read_only_disk(disk: Path, source: Path) -> None:
    remount(disk, "ro")
    store = open_store(disk / "another")
    assert_refused(run("import", source, "--store", store.root), store, "read-only file system")
    assert not store.root.exists()


def test_a_blobs_folder_on_another_disk_is_an_error(disk: Path, source: Path, tmp_path: Path) -> None:
    """A rename can't cross file systems, and a copy would show half a blob under its digest."""
    store = open_store(tmp_path / "store")
    store.root.mkdir()
    (disk / "blobs").mkdir()
    (store.root / "blobs").symlink_to(disk / "blobs")
    assert_refused(run("import", source, "--store", store.root), store, "another file system")
    assert list((disk / "blobs").iterdir()) == []
    assert list(store.models()) == []
