"""Every store of the corpus gets its verdict: foreign files are reported and kept."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import plain
from support.checkpoints import safetensors_bytes
from support.corpus import Case, case_id, load
from support.faults import make_device
from support.stores import (
    FAULTS,
    NOBODY,
    blob_path,
    commit_model,
    layer_by_hand,
    manifest_path,
    process,
    unprivileged,
)

import blobstore
from blobstore.errors import (
    BlobStoreError,
    BusyError,
    CorruptDataError,
    DigestMismatchError,
    NotFoundError,
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
HOLD = """
import sys
from blobstore import open_store
with getattr(open_store(sys.argv[1]), sys.argv[2])() as held:
    if sys.argv[2] == "session":
        held.put(b"half of a model")
    print("ready", flush=True)
    sys.stdin.read()
"""


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


def is_reported(store: Store, name: str | bytes) -> None:
    """A sound store, in which one file is called odd, and stays."""
    is_sound(store)
    assert [os.fsencode(odd.path.name) for odd in verify(store).odd] == [os.fsencode(name)]


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


@contextmanager
def nobodys(store: Store) -> Iterator[Store]:
    """A copy of the store that belongs to another user, as whom the block runs when we are root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(shutil.copytree(store.root, Path(folder) / "store"))
        for path in (root, *root.rglob("*")) if os.geteuid() == 0 else ():
            os.chown(path, NOBODY, NOBODY)
        with unprivileged():
            yield open_store(root)


def mode_000(store: Store) -> None:
    with nobodys(store) as other:
        blob_path(other, BLOB).chmod(0)
        with pytest.raises(StorageError, match="permission denied") as caught:
            blobstore.open_model("m", store=other)
        assert not isinstance(caught.value, NotFoundError)
        (damaged,) = verify(other).damaged
        assert "permission denied" in damaged.reason
    blob_path(store, BLOB).chmod(0)  # whom no mode stops is told too
    assert "mode is 000" in verify(store).damaged[0].reason or os.geteuid() != 0


def hardlinked(store: Store) -> None:
    os.link(blob_path(store, BLOB), store.root / "elsewhere")
    is_sound(store)


def legacy_colon(store: Store) -> None:
    for data in (BLOB, ORPHAN):
        path = blob_path(store, data)
        path.rename(path.with_name(path.name.replace("-", ":")))
    is_sound(store)


def non_utf8_name(store: Store) -> None:
    name = b"sha256-\xff"
    Path(os.fsdecode(os.fsencode(store.root / "blobs") + b"/" + name)).write_bytes(b"x")
    is_reported(store, name)


def blobs_dir_symlink(store: Store) -> None:
    (store.root / "blobs").rename(store.root.parent / "elsewhere")
    (store.root / "blobs").symlink_to(store.root.parent / "elsewhere")
    is_sound(open_store(store.root))


def blobs_dir_readonly(store: Store) -> None:
    with nobodys(store) as other:
        other.blobs.path.chmod(0o555)
        with pytest.raises(StorageError, match="permission denied"):
            commit_model(other, "n", b"new")
        assert set(blobstore.open_model("m", store=other)) == {"t"}


def leftover(store: Store, *, age_s: float) -> list[str]:
    """Return the temporary folders that remain of an old killed import after a clean-up."""
    with process(HOLD, store.root, "session") as child:
        child.kill()
        child.wait()
    for path in store.root.glob(".blobstore/tmp/*"):
        os.utime(path, (time.time() - age_s,) * 2)
    is_sound(store)
    return [path.name for path in store.root.glob(".blobstore/tmp/*")]


def temp_leftover_old(store: Store) -> None:
    assert len(leftover(store, age_s=3600)) == 1
    assert verify(store).is_sound
    layer_by_hand(store, "", ORPHAN)
    os.utime(blob_path(store, ORPHAN), (0, 0))
    assert leftover(store, age_s=3 * 86_400) == []


def temp_leftover_live(store: Store) -> None:
    with process(HOLD, store.root, "session"):
        (folder,) = store.root.glob(".blobstore/tmp/*")
        os.utime(folder, (0, 0))
        assert list(store.kept.stale(0)) == []
        with pytest.raises(BusyError):
            prune(store, grace_s=0, sole_owner=True, wait_s=0)
        assert len([path for path in folder.iterdir() if path.name != "owner"]) == 1


def temp_foreign(store: Store) -> None:
    foreign = [store.root / ".blobstore/tmp/mine", store.root / "blobs/tmp-12345"]
    for path in foreign:
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    is_reported(store, "tmp-12345")
    assert [path.read_bytes() for path in foreign] == [b"mine"] * 2


def ollama_partial_files(store: Store) -> None:
    name = f"{blob_path(store, b'coming').name}-partial-0"
    (store.root / "blobs" / name).write_bytes(b"com")
    os.utime(store.root / "blobs" / name, (0, 0))
    is_reported(store, name)


def manifest_symlink_outside(store: Store) -> None:
    outside = store.root.parent / "outside"
    manifest_path(store, "m").rename(outside)
    manifest_path(store, "m").symlink_to(outside)
    with pytest.raises(StorageError):
        blobstore.open_model("m", store=store)
    assert [odd.reason for odd in verify(store).odd] == ["it is a symbolic link"]
    with pytest.raises(StorageError, match="nothing is removed"):
        prune(store)


def manifest_at_depth(*parts: str) -> Callable[[Store], None]:
    def run(store: Store) -> None:
        path = store.root.joinpath("manifests", *parts)
        path.parent.mkdir(parents=True)
        path.write_bytes(manifest_path(store, "m").read_bytes())
        is_reported(store, parts[-1])
        assert [str(name) for name, _ in store.models()] == ["m:latest"]

    return run


def manifest_empty(store: Store) -> None:
    manifest_path(store, "m").write_bytes(b"")
    with pytest.raises(CorruptDataError):
        blobstore.open_model("m", store=store)
    with pytest.raises(CorruptDataError, match="nothing is removed"):
        prune(store)
    assert [str(broken.name) for broken in verify(store).broken] == ["m:latest"]


def lock_stale(store: Store) -> None:
    with process(HOLD, store.root, "alone") as child:
        child.kill()
        child.wait()
    assert (store.root / ".blobstore/lock").exists()
    commit_model(store, "n", BLOB)
    is_sound(store)


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


def two_at_once(store: Store) -> None:
    with process(HOLD, store.root, "alone"), pytest.raises(BusyError, match="in use by process"):
        prune(store, wait_s=0.1)
    is_sound(store)


def rm_vs_load(store: Store) -> None:
    model = blobstore.open_model("m", store=store)
    view = plain(model["t"])
    store.remove(M)
    assert not blob_path(store, BLOB).exists()
    assert np.array_equal(view, np.arange(9.0))
    assert np.array_equal(plain(model["t"]), np.arange(9.0))


def truncated_while_mapped(store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blobstore.io.ranges._MAPPED_FROM", 1)
        model = blobstore.open_model("m", store=store)
    os.truncate(blob_path(store, BLOB), 8)
    with pytest.raises(CorruptDataError, match="was cut"):
        model["t"].numpy()


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


def world_writable_store(store: Store) -> None:
    for folder in (store.root, store.root / "blobs"):
        folder.chmod(0o777)
    is_sound(store)
    assert [odd.path for odd in verify(store).odd] == [store.root, store.root / "blobs"]


STATES: dict[str, Callable[[Store], None]] = {
    "store-blob-symlink-dangling": replaced(lambda path: path.symlink_to("nowhere")),
    "store-blob-fifo": replaced(os.mkfifo),
    "store-blob-socket": replaced(bind),
    "store-blob-device": replaced(make_device),
    "store-blob-truncated": changed(lambda path: os.truncate(path, 90)),
    "store-blob-extended": changed(lambda path: path.write_bytes(BLOB + b"x")),
    "store-blob-bitflip-header": changed(flipped),
    "store-blob-mode-000": mode_000,
    "store-blob-hardlinked": hardlinked,
    "store-blob-wrong-name": changed(
        lambda path: path.write_bytes(safetensors_bytes({"t": np.ones(9)})), DigestMismatchError
    ),
    "store-blob-legacy-colon": legacy_colon,
    "store-blob-non-utf8-name": non_utf8_name,
    "store-blobs-dir-symlink": blobs_dir_symlink,
    "store-blobs-dir-readonly": blobs_dir_readonly,
    "store-temp-leftover-old": temp_leftover_old,
    "store-temp-leftover-live": temp_leftover_live,
    "store-temp-foreign": temp_foreign,
    "store-ollama-partial-files": ollama_partial_files,
    "store-manifest-symlink-outside": manifest_symlink_outside,
    "store-manifest-depth-3": manifest_at_depth("registry.ollama.ai", "other", "n"),
    "store-manifest-depth-5": manifest_at_depth(
        "registry.ollama.ai", "library", "n", "latest", "deeper"
    ),
    "store-manifest-empty": manifest_empty,
    "store-lock-stale": lock_stale,
    "store-lock-on-nfs": lock_on_nfs,
    "store-clock-back-2-years": clock_back,
    "store-two-gc-at-once": two_at_once,
    "store-rm-vs-load": rm_vs_load,
    "store-blob-truncated-while-mapped": truncated_while_mapped,
    "store-umask-000": umask(0o000, 0o644, 0o755),
    "store-umask-077": umask(0o077, 0o600, 0o700),
    "store-world-writable-store": world_writable_store,
}


def test_every_case_is_shown() -> None:
    assert {case.id for case in load("store")} == STATES.keys() | FAULTS
    assert not STATES.keys() & FAULTS


def case_param(case: Case) -> Any:
    """Return a case; only root makes devices."""
    return pytest.param(
        case, marks=[pytest.mark.lab] if case.id == "store-blob-device" else [], id=case_id(case)
    )


@pytest.mark.parametrize(
    "case", [case_param(case) for case in load("store") if case.id not in FAULTS]
)
def test_states_of_a_store(case: Case, filled: Store) -> None:
    STATES[case.id](filled)
