"""Lost writes of an interrupted import, reported to another process: no blob uses them.

An ext4 lies in a sparse file on a tmpfs that is full, so that writing back dirty pages fails;
afterwards the tmpfs has room.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.mounts import cannot_run, mounted
from support.stores import blob_path

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io import durable as files
from blobstore.names import ModelName
from blobstore.store.local.blobs import FinishedBlob
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="it is about Linux's page cache"),
]
KEY = "0" * 64
DATA = os.urandom(4 * 2**20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """A store on an ext4 with room for what is there, and a file that takes all other room."""
    with mounted(tmp_path / "memory", "size=64m") as memory:
        image, ballast = memory / "image", memory / "ballast"
        image.touch()
        os.truncate(image, 32 * 2**20)
        make = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0", f"{image}"]
        subprocess.run(make, check=True)
        with mounted(tmp_path / "disk", "loop", "ext4", image) as folder:
            store = open_store(folder / "store")
            with store.session() as session:
                session.replace([session.put(b"first")])
            os.sync()
            fill(ballast)
            yield store, ballast


def fill(ballast: Path) -> None:
    with ballast.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
            file.flush()


def interrupt(store: Store) -> Path:
    """Interrupt an import that has made a blob, which is in the page cache only.

    Return the blob's file.
    """
    with suppress(KeyboardInterrupt), store.session() as session:
        session.note(KEY, session.put(DATA))
        raise KeyboardInterrupt
    (left,) = store.kept.left.iterdir()
    return left


@contextmanager
def kept_in_memory(path: Path) -> Iterator[None]:
    """Let the page cache keep a file's bytes: a busy machine may want the memory for others."""
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as view:
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        locked = ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(start), len(view))
        os.close(fd)
        if locked != 0:
            cannot_run(f"pages can't be kept in memory: {os.strerror(ctypes.get_errno())}")
        yield


def test_a_lost_write_that_another_process_was_told_of(disk: tuple[Store, Path]) -> None:
    """It read the error of the file, too, and only the bytes on the disk tell."""
    store, ballast = disk
    folder = os.open(store.root, os.O_RDONLY)
    left = interrupt(store)
    file = os.open(left, os.O_RDONLY)
    with kept_in_memory(left):
        with pytest.raises(OSError, match="No space"):  # later descriptors do not get it again
            files.sync_file_system(folder)
        with pytest.raises(OSError, match="No space"):
            os.fsync(file)
        os.close(folder)
        os.close(file)
        ballast.unlink()
        if left.read_bytes() != DATA:
            cannot_run("the page cache has dropped what could not be written")
    with store.session() as session:
        found = session.recall(KEY, len(DATA), verify=False)
        blob: FinishedBlob = found or session.put(DATA)
        assert found is None
        session.publish(
            ModelName.parse("m"),
            Manifest(layers=(Descriptor(media_type="m", digest=blob.digest, size=blob.size),)),
        )
    Path("/proc/sys/vm/drop_caches").write_text("1")
    assert blob_path(store, DATA).read_bytes() == DATA
