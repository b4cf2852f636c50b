"""Damaged and foreign stores, as of the corpus (fixtures/corpus): typed errors at once.

What is not ours is reported, never followed, never removed. Other states: test_leftovers.py, care/,
tests/faults.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import (
    NOBODY,
    blob_path,
    commit_model,
    descriptor,
    layer_by_hand,
    manifest_path,
    unprivileged,
)

import blobstore
from blobstore.errors import LimitExceededError, NotFoundError, StorageError
from blobstore.formats.documents import Manifest
from blobstore.importer.repair import repair_model
from blobstore.inspection.listing import list_models
from blobstore.io.durable import read_own
from blobstore.io.ranges import real_path
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local import store_folder
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


def link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.write_bytes(BLOB)
    path.symlink_to(outside)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # a socket's address holds 107 bytes
        server.bind(path.name)


NO_FILES = pytest.mark.parametrize(
    "make", [link, os.mkfifo, bind, lambda path: path.symlink_to("/dev/zero")]
)


@NO_FILES
def test_a_blob_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = blob_path(filled, BLOB)
    path.unlink()
    make(path)
    before, wanted = path.lstat(), descriptor(BLOB)
    for use in (
        lambda: filled.blobs.open(wanted),
        lambda: filled.blobs.read(wanted),
        lambda: filled.blobs.check(wanted),
        lambda: blobstore.open_model("m", store=filled, verify=True),
    ):
        with pytest.raises(StorageError) as caught:
            use()
        assert caught.value.blob == str(wanted.digest)
        assert wanted.digest.hex in caught.value.message
    assert not filled.blobs.has(wanted.digest, wanted.size)
    assert [blob.models for blob in verify(filled).damaged] == [(M,)]
    filled.manifests.remove(M)
    assert [blob.models for blob in verify(filled).damaged] == [()]
    prune(filled, grace_s=0, sole_owner=True, forget=True)
    assert path.lstat() == before


@NO_FILES
def test_a_manifest_that_is_no_regular_file(filled: Store, make: Callable[[Path], None]) -> None:
    path = manifest_path(filled, "m")
    path.unlink()
    make(path)
    with pytest.raises(StorageError) as caught:
        filled.manifest(M)
    assert caught.value.model == "m:latest"
    assert [name for name, found in filled.models() if isinstance(found, Manifest)] == []


def test_a_linked_manifest_is_replaced_and_its_target_stays(filled: Store, tmp_path: Path) -> None:
    outside = manifest_path(filled, "m").rename(tmp_path / "outside")
    before = outside.read_bytes()
    manifest_path(filled, "m").symlink_to(outside)
    commit_model(filled, "m", b"new")
    assert outside.read_bytes() == before
    assert filled.manifest(M).layers[0].size == 3


def test_a_linked_folder_of_manifests_is_refused(filled: Store, tmp_path: Path) -> None:
    folder, outside = manifest_path(filled, "m").parents[1], tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    for use in (
        lambda: filled.manifest(M),
        lambda: filled.remove(M),
        lambda: filled.copy(M, "n"),
        lambda: commit_model(filled, "m", b"other"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            use()
    assert list(filled.models()) == []
    assert [path for path in outside.rglob("*") if path.is_file()] == [outside / "m" / "latest"]


def test_a_remote_store_needs_a_sole_owner(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """This file system is taken for a remote one: there is no server here."""
    monkeypatch.setattr(store_folder, "is_remote", lambda _folder: True)
    with pytest.raises(StorageError, match="network file system") as caught:
        prune(filled)
    assert "sole_owner" in str(caught.value.hint)
    assert len(prune(filled, sole_owner=True).removed) == 1


def test_a_clock_that_was_set_back_makes_no_blob_old(filled: Store) -> None:
    for path in filled.blobs.path.iterdir():
        os.utime(path, (time.time() + 2 * 365 * 86_400,) * 2)
    assert prune(filled, grace_s=0, sole_owner=True).removed == ()
    assert verify(filled).is_sound


@pytest.mark.parametrize("mask", [0, 0o077])
def test_files_are_written_with_the_users_umask(store: Store, mask: int) -> None:
    before = os.umask(mask)
    try:
        commit_model(store, "m", BLOB)
    finally:
        os.umask(before)
    modes = {path.is_dir(): path.stat().st_mode & 0o7777 for path in store.root.rglob("*")}
    assert modes == {False: 0o644 & ~mask, True: 0o755 & ~mask}
    assert verify(store).odd == ()


def test_blobs_on_another_disk_named_by_an_old_ollama(filled: Store, tmp_path: Path) -> None:
    for path in list(filled.blobs.path.iterdir()):
        path.rename(path.with_name(path.name.replace("-", ":")))
    (filled.root / "blobs").rename(tmp_path / "elsewhere")
    (filled.root / "blobs").symlink_to(tmp_path / "elsewhere")
    store = open_store(filled.root)
    assert verify(store).is_sound
    assert [blob.size for blob in prune(store).removed] == [len(ORPHAN)]
    assert set(blobstore.open_model("m", store=store, verify=True)) == {"t"}
    store.remove(M)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Our own files up to a limit, however vast or nested; a store that a user may see in part


TERABYTE = 2**40
DEEP = 1050


def nest(folder: Path) -> Path:
    """Make nested folders, deeper than Python recurses and than a path may be long."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(DEEP):
        os.mkdir("deep", dir_fd=inner)
        outer, inner = inner, os.open("deep", os.O_RDONLY | os.O_DIRECTORY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
    os.close(inner)
    return folder / "deep"


def vast(path: Path) -> Path:
    """Make a file of a terabyte that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, TERABYTE)
    return path


def test_what_is_read_is_a_regular_file_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_own(tmp_path / "file", 4) == b"1234"
    with pytest.raises(LimitExceededError, match="has 4 bytes, at most 3"):
        read_own(tmp_path / "file", 3)
    with pytest.raises(NotFoundError):
        read_own(tmp_path / "nothing", 3)
    for name in ("link", "pipe", "."):
        with pytest.raises(StorageError):
            read_own(tmp_path / name, 3)


def test_vast_files_of_ours_break_nothing(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    hints = store.root / ".blobstore/hints"
    journal, summaries = vast(hints / "journal"), vast(hints / "summaries")
    blobstore.import_model(source, "m", store=store)
    assert journal.stat().st_size < TERABYTE, "it is started anew"
    assert blobstore.import_model(source, "m", store=store).recalled > 0
    copy = vast(store.root.joinpath(".blobstore/copies", *M.path_parts, "0" * 64))
    assert len(list_models(store)) == len(store.summaries.read()) == 1
    assert verify(store).is_sound
    assert store.copies.of(M) == [store.manifests.text(M)]
    vast(copy)
    vast(summaries)
    journal.unlink()
    journal.mkdir()
    assert prune(store).leftovers == ()
    assert summaries.stat().st_size == 0


def test_a_manifest_that_is_too_large_is_named_and_can_be_removed(store: Store) -> None:
    commit_model(store, "m", BLOB)
    path = vast(manifest_path(store, "m"))
    with pytest.raises(LimitExceededError, match="m:latest has 1,099,511,627,776 bytes") as caught:
        commit_model(store, "m", BLOB)
    assert caught.value.hint == "Remove it: blobstore rm m:latest"
    assert path.stat().st_size == TERABYTE
    store.remove(M)
    commit_model(store, "m", BLOB)


def test_what_is_nested_breaks_nothing(store: Store, tmp_path: Path) -> None:
    """Manifests are looked for as deep as names go, and not deeper."""
    source = write_checkpoint(tmp_path / "source", {"x": np.zeros(4, np.float32)})
    try:
        nested = nest(tmp_path / "nested")
        for place, refusal in {
            ".blobstore/copies/registry.ollama.ai/library/m/latest": None,
            "manifests/registry.ollama.ai/library/m": None,
            "manifests-v2/registry.ollama.ai/library/m": "nothing is removed",
            ".blobstore/trash/0123456789abcdef": "nested too deep",
        }.items():
            commit_model(store, "m", BLOB)
            (store.root / place).mkdir(parents=True, exist_ok=True)
            nested = nested.rename(store.root / place / "deep")
            blobstore.import_model(source, "new", store=store, jobs=1)
            store.copy("m", "other")
            store.move("other", "third")
            store.remove("third")
            assert [str(model.name) for model in list_models(store)] == ["m:latest", "new:latest"]
            result = verify(store)
            assert result.is_sound
            assert [odd.path for odd in result.odd] == [nested / "deep"] * ("manifests" in place)
            measure_usage(store)
            with pytest.raises(StorageError, match=refusal) if refusal else nullcontext():
                prune(store)
    finally:
        subprocess.run(["rm", "-r", store.root, tmp_path / "nested"], check=True)  # pytest can't


def test_a_long_chain_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"end")
    for number in range(DEEP):
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    with pytest.raises(StorageError, match="too many symbolic links"):
        real_path(tmp_path / f"{DEEP}")
    with pytest.raises(StorageError):
        blobstore.read_metadata(tmp_path / f"{DEEP}")


USES: list[Callable[[Store], object]] = [
    list_models,
    verify,
    measure_usage,
    lambda store: prune(store, dry_run=True),
    undo_prune,
    lambda store: repair_model("m", "nowhere.safetensors", store=store),
    lambda store: blobstore.open_model("m", store=store),
]


@pytest.fixture
def shared() -> Iterator[Store]:
    """A store with the model ``m``, in a folder that other users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        store = open_store(Path(folder) / "store")
        source = write_checkpoint(Path(folder) / "source", small_tensors(), LLAMA_CONFIG)
        blobstore.import_model(source, "m", store=store)
        (store.root / ".blobstore/trash/of-a-prune").mkdir(parents=True)
        yield store


def test_a_folder_that_may_not_be_entered(shared: Store) -> None:
    model = "manifests/registry.ollama.ai/library/m"
    places = ("", "blobs", "manifests", model, ".blobstore/copies")
    for place, mode in product(places, (0o000, 0o444)):
        (shared.root / place).chmod(mode)
        try:
            with unprivileged():
                for use in USES:
                    with suppress(StorageError, NotFoundError):
                        use(shared)
        finally:
            (shared.root / place).chmod(0o755)


def test_reading_needs_nothing_of_ours(shared: Store) -> None:
    (shared.root / ".blobstore").chmod(0)
    (shared.root / "blobs").chmod(0o555)
    try:
        with unprivileged():
            assert len(list_models(shared)) == 1
            assert verify(shared).is_sound
            assert len(blobstore.open_model("m", store=shared)) > 0
            with pytest.raises(StorageError, match="permission denied"):
                commit_model(shared, "n", b"new")
    finally:
        (shared.root / ".blobstore").chmod(0o755)


def test_a_manifest_that_may_not_be_read_can_be_removed(shared: Store) -> None:
    commit_model(shared, "n", b"one")
    if os.geteuid() == 0:
        for path in (shared.root, *shared.root.rglob("*")):
            os.chown(path, NOBODY, -1)
    manifest_path(shared, "n").chmod(0)
    with unprivileged():
        with pytest.raises(StorageError, match="can't be read"):
            prune(shared)
        assert shared.remove("n").removed == ()
        assert prune(shared).removed == ()
    assert [str(name) for name, _ in shared.models()] == ["m:latest"]
    assert blob_path(shared, b"one").exists()
