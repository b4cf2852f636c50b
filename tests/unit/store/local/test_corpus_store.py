"""Every store of the corpus gets its verdict: foreign files are reported and kept."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.corpus import Case, case_id, load
from support.faults import make_device
from support.stores import (
    FAULTS,
    blob_path,
    commit_model,
    layer_by_hand,
)

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    StorageError,
)
from blobstore.io import durable as files
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

M = ModelName.parse("m")
BLOB = safetensors_bytes({"t": np.arange(9.0)})
ORPHAN = b"a blob that nobody needs"


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with the model ``m`` of one blob, and a blob that nobody needs and that is old."""
    commit_model(store, "m", BLOB)
    layer_by_hand(store, "", ORPHAN)
    os.utime(blob_path(store, ORPHAN), (0, 0))
    return store


def is_sound(store: Store) -> None:
    """The model opens without damage, and a clean-up takes only the unneeded blob."""
    assert set(blobstore.open_model("m", store=store, verify=True)) == {"t"}
    assert verify(store).is_sound
    assert [blob.size for blob in prune(store).removed] == [len(ORPHAN)]
    assert set(blobstore.open_model("m", store=store, verify=True)) == {"t"}


def is_refused(store: Store, kind: type[BlobStoreError], *, stays: bool) -> None:
    """The model is not opened.

    The blob is called damaged, beside its model and without one, and stays if it is none.
    """
    with pytest.raises(kind) as caught:
        blobstore.open_model("m", store=store, verify=True)
    digest = blob_path(store, BLOB).name.replace("-", ":")
    assert caught.value.blob == digest
    assert [
        (str(blob.digest), [str(name) for name in blob.models]) for blob in verify(store).damaged
    ] == [(digest, ["m:latest"])]
    store.manifests.remove(M)
    assert [str(blob.digest) for blob in verify(store).damaged] == [digest]
    before = os.lstat(blob_path(store, BLOB))
    prune(store, grace_s=0, sole_owner=True, forget=True)
    if stays:
        assert os.lstat(blob_path(store, BLOB)).st_ino == before.st_ino


def replaced(make: Callable[[Path], object]) -> Callable[[Store], None]:
    """Something else than a file in a blob's place."""

    def run(store: Store) -> None:
        path = blob_path(store, BLOB)
        path.unlink()
        make(path)
        is_refused(store, StorageError, stays=True)

    return run


def changed(
    make: Callable[[Path], object], kind: type[BlobStoreError] = CorruptDataError
) -> Callable[[Store], None]:
    """A blob with other bytes."""

    def run(store: Store) -> None:
        make(blob_path(store, BLOB))
        is_refused(store, kind, stays=False)

    return run


def bind(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's address holds 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)


def hardlinked(store: Store) -> None:
    os.link(blob_path(store, BLOB), store.root / "elsewhere")
    is_sound(store)


def legacy_colon(store: Store) -> None:
    for data in (BLOB, ORPHAN):
        path = blob_path(store, data)
        path.rename(path.with_name(path.name.replace("-", ":")))
    is_sound(store)
    store.remove(M)
    assert list(store.blobs.path.iterdir()) == []


def blobs_dir_symlink(store: Store) -> None:
    (store.root / "blobs").rename(store.root.parent / "elsewhere")
    (store.root / "blobs").symlink_to(store.root.parent / "elsewhere")
    is_sound(open_store(store.root))


def lock_on_nfs(store: Store) -> None:
    """The number of this file system is taken for that of a remote one: there is no server here."""
    fd = os.open(store.root, os.O_RDONLY)
    kind = files._file_system(fd)
    os.close(fd)
    assert kind is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_REMOTE", frozenset({kind}))
        with pytest.raises(StorageError, match="network file system") as caught:
            prune(store)
        assert "sole_owner" in str(caught.value.hint)
        assert len(prune(store, sole_owner=True).removed) == 1
    assert {0x6969, 0xFF534D42} <= files._REMOTE


def clock_back(store: Store) -> None:
    for path in (store.root / "blobs").iterdir():
        os.utime(path, (time.time() + 2 * 365 * 86_400,) * 2)
    assert prune(store, grace_s=0, sole_owner=True).removed == ()
    assert verify(store).is_sound


def umask(mask: int, file_mode: int, folder_mode: int) -> Callable[[Store], None]:
    def run(store: Store) -> None:
        fresh = open_store(store.root.parent / "fresh")
        before = os.umask(mask)
        try:
            commit_model(fresh, "m", BLOB)
        finally:
            os.umask(before)
        modes = {path.is_dir(): path.stat().st_mode & 0o7777 for path in fresh.root.rglob("*")}
        assert modes == {False: file_mode, True: folder_mode}
        assert verify(fresh).odd == ()

    return run


STATES: dict[str, Callable[[Store], None]] = {
    "store-blob-symlink-dangling": replaced(lambda path: path.symlink_to("nowhere")),
    "store-blob-fifo": replaced(os.mkfifo),
    "store-blob-socket": replaced(bind),
    "store-blob-device": replaced(make_device),
    "store-blob-truncated": changed(lambda path: os.truncate(path, 90)),
    "store-blob-extended": changed(lambda path: path.write_bytes(BLOB + b"x")),
    "store-blob-bitflip-header": changed(flipped),
    "store-blob-hardlinked": hardlinked,
    "store-blob-wrong-name": changed(
        lambda path: path.write_bytes(safetensors_bytes({"t": np.ones(9)})), DigestMismatchError
    ),
    "store-blob-legacy-colon": legacy_colon,
    "store-blobs-dir-symlink": blobs_dir_symlink,
    "store-lock-on-nfs": lock_on_nfs,
    "store-clock-back-2-years": clock_back,
    "store-umask-000": umask(0o000, 0o644, 0o755),
    "store-umask-077": umask(0o077, 0o600, 0o700),
}


ELSEWHERE = {
    "store-blob-mode-000": "care/test_verify.py, test_permissions.py",
    "store-blob-non-utf8-name": "care/test_verify.py",
    "store-blobs-dir-readonly": "test_permissions.py",
    "store-temp-leftover-old": "test_leftovers.py, care/test_prune.py",
    "store-temp-leftover-live": "test_leftovers.py",
    "store-temp-foreign": "care/test_prune.py",
    "store-ollama-partial-files": "care/test_verify.py, care/test_prune.py",
    "store-manifest-symlink-outside": "test_hostile_store.py, test_removal.py",
    "store-manifest-depth-3": "care/test_verify.py, test_store.py",
    "store-manifest-depth-5": "care/test_verify.py, test_store.py",
    "store-manifest-empty": "test_store.py, test_removal.py",
    "store-lock-stale": "test_lock.py",
    "store-two-gc-at-once": "test_lock.py, care/test_prune.py",
    "store-rm-vs-load": "test_lease.py",
    "store-blob-truncated-while-mapped": "test_lease.py",
    "store-world-writable-store": "care/test_verify.py",
}
"""The states that the files of these tests show."""


def test_every_case_is_shown() -> None:
    shown = [*STATES, *ELSEWHERE, *FAULTS]
    assert sorted(case.id for case in load("store")) == sorted(shown)


def case_param(case: Case) -> Any:
    """Return a case; only root makes devices."""
    return pytest.param(
        case, marks=[pytest.mark.lab] if case.id == "store-blob-device" else [], id=case_id(case)
    )


@pytest.mark.parametrize("case", [case_param(case) for case in load("store") if case.id in STATES])
def test_states_of_a_store(case: Case, filled: Store) -> None:
    STATES[case.id](filled)
