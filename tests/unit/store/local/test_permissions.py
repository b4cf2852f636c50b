"""A store that a user may see in part: possible work is done, the rest is a typed error."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, small_tensors, write_checkpoint
from support.stores import NOBODY, blob_path, commit_model, manifest_path, unprivileged

import blobstore
from blobstore.errors import NotFoundError, StorageError
from blobstore.importer.repair import repair_model
from blobstore.inspection.listing import list_models
from blobstore.store.care.prune import prune, undo_prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

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


@pytest.mark.parametrize(
    "place",
    ["", "blobs", "manifests", "manifests/registry.ollama.ai/library/m", ".blobstore/copies"],
)
def test_a_folder_that_may_not_be_entered(shared: Store, place: str) -> None:
    for mode in (0o000, 0o444):
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
