"""Our own files up to a limit, however vast or nested; a store that a user may see in part."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, small_tensors, write_checkpoint
from support.stores import NOBODY, blob_path, commit_model, manifest_path, unprivileged

import blobstore
from blobstore.errors import LimitExceededError, NotFoundError, StorageError
from blobstore.importer.repair import repair_model
from blobstore.inspection.listing import list_models
from blobstore.io.durable import read_own
from blobstore.io.ranges import real_path
from blobstore.names import ModelName
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

TERABYTE = 2**40
DEEP = 1050
DATA = b"\x08\0\0\0\0\0\0\0{}      "
M = ModelName.parse("m")


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
    assert prune(store).leftovers == ()
    assert summaries.stat().st_size == 0


def test_a_manifest_that_is_too_large_is_named_and_can_be_removed(store: Store) -> None:
    commit_model(store, "m", DATA)
    path = vast(manifest_path(store, "m"))
    with pytest.raises(LimitExceededError, match="m:latest has 1,099,511,627,776 bytes") as caught:
        commit_model(store, "m", DATA)
    assert caught.value.hint == "Remove it: blobstore rm m:latest"
    assert path.stat().st_size == TERABYTE
    store.remove(M)
    commit_model(store, "m", DATA)


# Nested deeply


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
            commit_model(store, "m", DATA)
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
