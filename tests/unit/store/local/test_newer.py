"""manifests-v2: blobs of newer manifests stay; all blobs stay if one is unreadable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.newer import PLACE, linked, list_of, manifest_of, reference
from support.stores import blob_path, commit_model, layer_by_hand

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Document = dict[str, Any]


def blobs(store: Store) -> set[str]:
    return {path.name for path in (store.root / "blobs").iterdir()}


def manifest(store: Store) -> Document:
    return manifest_of(store, b"one", b"two")


def list_of_manifests(store: Store) -> Document:
    return list_of(manifest(store), reference(store, manifest_of(store, b"three")))


def list_within_a_list(store: Store) -> Document:
    return list_of(list_of(reference(store, manifest(store))))


def copied_without_blob(path: Path) -> None:
    blob = path.resolve()
    path.unlink()
    blob.rename(path)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        (manifest, Path.lstat),
        (list_of_manifests, Path.lstat),
        (list_within_a_list, Path.lstat),
        (manifest, copied_without_blob),
    ],
)
def test_what_can_be_reached_stays_and_the_rest_goes(
    store: Store, form: Callable[[Store], Document], change: Callable[[Path], object]
) -> None:
    commit_model(store, "m", b"one", b"mine")
    change(linked(store, form(store)))
    needed = blobs(store)
    layer_by_hand(store, "", b"orphan")
    usage = measure_usage(store)
    assert {model.unique for model in usage.models} == {len(b"mine")}
    assert usage.reclaimable == len(b"orphan")
    result = prune(store, grace_s=0, sole_owner=True)
    assert [blob.size for blob in result.removed] == [len(b"orphan")]
    assert blobs(store) == needed
    removal = store.remove("m")
    assert ([blob.size for blob in removal.removed], removal.reason) == ([len(b"mine")], None)
    assert blobs(store) == needed - {blob_path(store, b"mine").name}
    assert verify(store).is_sound
    assert verify(store).odd == ()


def dangling_link(store: Store) -> None:
    linked(store, manifest(store)).resolve().unlink()


def link_to_another_store(store: Store) -> None:
    path = linked(store, manifest(store))
    outside = path.resolve().rename(store.root.parent / path.resolve().name)
    path.unlink()
    path.symlink_to(outside)


def damaged_blob(store: Store) -> None:
    linked(store, manifest(store)).resolve().write_text(json.dumps(manifest_of(store, b"three")))


def another_depth(store: Store) -> None:
    linked(store, manifest(store), "ollama.com/new/latest")


def text(raw: str) -> Callable[[Store], object]:
    def make(store: Store) -> None:
        path = store.root / "manifests-v2" / PLACE
        path.parent.mkdir(parents=True)
        path.write_text(raw)

    return make


DAMAGES = [
    dangling_link,
    link_to_another_store,
    damaged_blob,
    another_depth,
    text("{"),
    text('{"schemaVersion": 2, "manifests": [{"digest": "sha256:../../x"}]}'),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_goes_while_one_is_unread(store: Store, damage: Callable[[Store], object]) -> None:
    commit_model(store, "m", b"mine")
    layer_by_hand(store, "", b"orphan")
    damage(store)
    before = blobs(store)
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match="manifests-v2") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    assert measure_usage(store).reclaimable == 0
    assert any("no blob is removed" in odd.reason for odd in verify(store).odd)
    removal = store.remove("m")
    assert removal.removed == ()
    assert "manifests-v2" in (removal.reason or "")
    assert blobs(store) == before


def test_names_are_those_that_manifests_would_have(store: Store) -> None:
    document = manifest(store)
    for place in (
        "ollama.com/library/a/latest",
        "registry.ollama.ai/me/b/x",
        "localhost%3A5000/me/c/y",
        "hf.co/o/D/Q4_K_M",
        "ollama.com/library/e/.manifest-1",
    ):
        linked(store, document, place)
    names = ["hf.co/o/D:Q4_K_M", "localhost:5000/me/c:y", "a:latest", "me/b:x"]
    assert list(map(str, store.newer.names())) == names
    for name in (*names, "A:Latest", "ollama.com/library/a", "hf.co/o/d:q4_k_m"):
        assert store.newer.has(ModelName.parse(name)), name
    assert not store.newer.has(ModelName.parse("localhost/me/c:y"))


def test_a_model_that_only_a_newer_ollama_has_is_not_found_and_that_is_said(store: Store) -> None:
    linked(store, manifest(store))
    for name, is_said in (("new", True), ("other", False)):
        with pytest.raises(NotFoundError) as caught:
            store.find(name)
        assert ("manifests-v2" in (caught.value.hint or "")) == is_said
