"""A store in the lower layer of an overlayfs, as one that was baked into a container's image.

Folders of a lower layer can't be renamed there (EXDEV) unless redirect_dir is on, a file's first
change copies it up, and it may have another inode then. The same by injection, on any machine:
tests/unit/store/local/test_lower_layer.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.faults import cannot_run, file_system
from support.stores import (
    HOLD,
    blob_path,
    commit_model,
    layer_by_hand,
    process,
    wrong_digests,
)

import blobstore
from blobstore.errors import BusyError
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="overlayfs is of Linux"),
]
KEY = "0" * 64


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The folders of a lower and an upper layer, on two file systems.

    So inodes change when files are copied up. On one: ``python tests/faults --on overlay-lower``.
    """
    (lower := tmp_path / "lower").mkdir()
    with file_system(tmp_path / "layer", "size=64m") as upper:
        yield lower, upper


def bake(root: Path, source: Path) -> Store:
    """Make a store with models, a trash, unneeded blobs and the rest of an interrupted import.

    In the trash are also copies of a manifest, which lie in folders of their own.
    """
    store = open_store(root)
    commit_model(store, "before", b"of before")
    store.manifests.remove(ModelName.parse("before"))
    store.blobs.remove(Digest.of(b"of before"))
    for name, seed in (("m", "m"), ("n", "n"), ("gone", "gone")):
        tensors = {**small_tensors(), "own.weight": normal(seed, 64, 64)}
        blobstore.import_model(
            write_checkpoint(source.parent / f"{name}-source", tensors),
            name,
            store=store,
            quant="int4",
        )
    age(store, b"trashed")
    assert [str(name) for name in prune(store).forgotten] == ["before:latest"]
    age(store, b"orphan")
    store.manifests.remove(ModelName.parse("gone"))
    for path in store.blobs.path.iterdir():
        os.utime(path, (0, 0))
    with suppress(KeyboardInterrupt), store.session() as session:
        session.note(KEY, session.put(b"left"))
        raise KeyboardInterrupt
    return store


def age(store: Store, data: bytes) -> None:
    layer_by_hand(store, "", data)
    os.utime(blob_path(store, data), (0, 0))


@pytest.fixture
def baked(layers: tuple[Path, Path], tmp_path: Path) -> Iterator[Store]:
    """A store in the lower layer, seen through an overlayfs that writes to the upper one."""
    lower, layer = layers
    bake(lower / "store", tmp_path / "source")
    for folder in (layer / "upper", layer / "work", tmp_path / "merged"):
        folder.mkdir()
    options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work,redirect_dir=off"
    line: list[str | Path] = [
        "mount",
        "-t",
        "overlay",
        "-o",
        options,
        "overlay",
        tmp_path / "merged",
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        cannot_run(f"an overlayfs needs root: {done.stderr.strip()}")
    try:
        yield open_store(tmp_path / "merged/store")
    finally:
        subprocess.run(["umount", "-l", tmp_path / "merged"], check=True)


def models(store: Store) -> list[str]:
    return [str(name) for name, _ in store.models()]


def test_prune_undo_and_prune_again(baked: Store) -> None:
    gone = len(list(baked.blobs.path.iterdir()))
    first = prune(baked)
    assert (first.freed, [str(name) for name in first.forgotten]) == (
        len(b"trashed"),
        ["gone:latest"],
    )
    gone -= len(list(baked.blobs.path.iterdir()))
    assert gone == len(first.removed) > 1
    undone = undo_prune(baked)
    assert (len(undone.restored), undone.without_manifest) == (gone, first.forgotten)
    assert verify(baked).is_sound
    again = prune(baked, grace_s=0, sole_owner=True)
    assert (len(again.removed), [leftover.nbytes for leftover in again.leftovers]) == (gone, [4])
    assert prune(baked).freed == sum(blob.size for blob in again.removed)
    assert not list(baked.root.glob(".blobstore/trash/*"))
    assert not list(baked.root.glob(".blobstore/tmp/*"))
    assert (models(baked), wrong_digests(baked)) == (["m:latest", "n:latest"], [])


def test_imports_copies_moves_and_removals(baked: Store, tmp_path: Path) -> None:
    """Also over what is in the lower layer; what is unchanged there is not made again."""
    again = blobstore.import_model(tmp_path / "m-source", "m", store=baked, quant="int4")
    assert again.recalled > 0
    blobstore.import_model(tmp_path / "m-source", "n", store=baked, quant="int8")
    baked.copy(ModelName.parse("n"), ModelName.parse("new"))
    baked.move(ModelName.parse("m"), ModelName.parse("example.org/team/m"))
    assert baked.remove(ModelName.parse("new")).reason is None
    assert models(baked) == ["example.org/team/m:latest", "n:latest"]
    assert verify(baked).is_sound


def test_what_an_interrupted_import_left_is_taken_over(baked: Store) -> None:
    with baked.session() as session:
        blob = session.recall(KEY, 4, verify=False)
        assert blob is not None
        assert blob.path.read_bytes() == b"left"
    assert not list(baked.root.glob(".blobstore/tmp/*"))


@pytest.mark.parametrize(("first", "second"), [("lease", "alone"), ("alone", "session")])
def test_the_lock_excludes_across_its_copy_up(baked: Store, first: str, second: str) -> None:
    """A flock on the lower layer's file and one on its copy are one.

    `lease` opens to read, which copies nothing up.
    """
    with process(HOLD, baked.root, first) as child:
        other = open_store(baked.root, wait_s=0)
        with pytest.raises(BusyError) as caught, getattr(other, second)():
            pass
        assert caught.value.path == str(baked.root / ".blobstore/lock")
        child.send_signal(signal.SIGKILL)
        child.wait()
        with getattr(other, second)():
            pass
