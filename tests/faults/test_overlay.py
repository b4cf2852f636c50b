"""A store in the lower layer of an overlayfs, as one that was baked into a container's image.

Folders of a lower layer can't be renamed there (EXDEV) unless redirect_dir is on, a file's first
change copies it up, and it may have another inode then.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.mounts import mounted
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.stores import blob_path, commit_model, layer_by_hand

import blobstore
from blobstore.errors import BusyError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="overlayfs is of Linux"),
]
M, N = ModelName.parse("m"), ModelName.parse("n")


@pytest.fixture
def baked(tmp_path: Path) -> Iterator[Store]:
    """A store in a lower layer of another file system: models, trash, blobs that nothing needs."""
    store = open_store(tmp_path / "lower/store")
    source = write_checkpoint(tmp_path / "source", {**small_tensors(), "own": normal("own", 64)})
    for name in ("m", "n"):
        blobstore.import_model(source, name, store=store, quant="int4")
    add_old(store, b"trashed")
    prune(store)
    add_old(store, b"unneeded")
    commit_model(store, "gone", b"of gone")
    store.manifests.remove(ModelName.parse("gone"))
    os.utime(blob_path(store, b"of gone"), (0, 0))
    with mounted(tmp_path / "upper", "size=64m") as upper:
        for folder in (upper / "files", upper / "work"):
            folder.mkdir()
        options = f"lowerdir={tmp_path}/lower,upperdir={upper}/files,workdir={upper}/work"
        with mounted(tmp_path / "merged", f"{options},redirect_dir=off", "overlay") as merged:
            yield open_store(merged / "store")


def add_old(store: Store, data: bytes) -> None:
    layer_by_hand(store, "", data)
    os.utime(blob_path(store, data), (0, 0))


def test_prune_undo_and_prune_again(baked: Store) -> None:
    first = prune(baked)
    assert first.freed == len(b"trashed")
    assert len(first.removed) == 2
    undone = undo_prune(baked)
    assert (len(undone.restored), undone.without_manifest) == (2, first.forgotten)
    assert verify(baked).is_sound
    again = prune(baked, grace_s=0, sole_owner=True)
    assert len(again.removed) == 2
    assert prune(baked).freed == sum(blob.size for blob in again.removed)
    assert not list(baked.root.glob(".blobstore/trash/*"))
    assert [name for name, _ in baked.models()] == [M, N]
    assert verify(baked).is_sound


def test_what_is_unchanged_below_is_not_made_again(baked: Store, tmp_path: Path) -> None:
    again = blobstore.import_model(tmp_path / "source", "m", store=baked, quant="int4")
    assert again.recalled > 0
    baked.move(M, moved := ModelName.parse("example.org/team/m"))
    assert [name for name, _ in baked.models()] == [moved, N]


def test_the_lock_excludes_across_its_copy_up(baked: Store) -> None:
    """`lease` opens the lock to read, which copies nothing up."""
    other = open_store(baked.root, wait_s=0)
    with baked.lease(), pytest.raises(BusyError), other.alone():
        pass
