"""A store nested deeper than Python recurses: reported, and imports go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.nested import nest
from support.stores import commit_model

import blobstore
from blobstore.errors import StorageError
from blobstore.inspection.listing import list_models
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

DATA = b"\x08\0\0\0\0\0\0\0{}      "
M = ModelName.parse("m")
TMP = f".blobstore/tmp/1-{16 * '0'}"
OURS = [
    TMP,
    ".blobstore/copies/registry.ollama.ai/library/m/latest",
    ".blobstore/trash/0123456789abcdef",
]


@pytest.fixture
def filled(store: Store) -> Iterator[Store]:
    """A store with a model; pytest can't remove what is nested so deep."""
    commit_model(store, "m", DATA)
    yield store
    subprocess.run(["rm", "-r", store.root], check=True)


def use(store: Store, tmp_path: Path) -> None:
    """Use a store as users do; nothing is raised."""
    blobstore.import_model(
        write_checkpoint(tmp_path / "source", {"x": np.zeros(4, np.float32)}),
        "new",
        store=store,
        jobs=1,
    )
    store.copy(M, ModelName.parse("other"))
    store.move(ModelName.parse("other"), ModelName.parse("third"))
    store.remove(ModelName.parse("third"))
    assert {model.name for model in list_models(store)} == {ModelName.parse("new"), M}
    assert verify(store).is_sound
    measure_usage(store)


@pytest.mark.parametrize("tree", ["manifests", "manifests-v2"])
def test_manifests_are_read_as_deep_as_names_go(filled: Store, tmp_path: Path, tree: str) -> None:
    nest(filled.root / tree / "registry.ollama.ai/library/m")
    use(filled, tmp_path)
    (odd,) = verify(filled).odd
    depth = len(odd.path.relative_to(filled.root / tree).parts)
    assert depth == 5
    if tree == "manifests":
        assert odd.reason == "it is 5 levels deep, and manifests are 4"
        prune(filled)
    else:
        assert odd.reason.startswith("no blob is removed")
        with pytest.raises(StorageError, match="nothing is removed"):
            prune(filled)


def test_what_is_nested_in_our_folders_breaks_nothing(filled: Store, tmp_path: Path) -> None:
    for place in OURS:
        nest(filled.root / place)
    use(filled, tmp_path)
