"""manifests-v2: blobs of newer manifests stay; all blobs stay if one is unreadable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.newer import PLACE, linked, list_of, manifest_of, reference, written
from support.stores import blob_path, commit_model, layer_by_hand

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Document = dict[str, Any]
M = ModelName.parse("m")


def blobs(store: Store) -> set[str]:
    return {path.name for path in (store.root / "blobs").iterdir()}


def as_link(path: Path) -> None:
    """As it is written where links can be made."""


def as_hard_link(path: Path) -> None:
    blob = path.resolve()
    path.unlink()
    os.link(blob, path)


def as_copy_without_blob(path: Path) -> None:
    blob = path.resolve()
    path.unlink()
    blob.rename(path)


FORMS: dict[str, Callable[[Store], Document]] = {
    "a manifest": lambda store: manifest_of(store, b"one", b"two"),
    "a list of whole manifests": lambda store: list_of(
        manifest_of(store, b"one", b"two"), manifest_of(store, b"three")
    ),
    "a list of references": lambda store: list_of(
        reference(store, manifest_of(store, b"one", b"two")),
        reference(store, manifest_of(store, b"three")),
    ),
    "a list within a list": lambda store: list_of(
        list_of(reference(store, manifest_of(store, b"one", b"two")))
    ),
    "an image index": lambda store: {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": "m",
                "digest": written(store, manifest_of(store, b"one", b"two")),
                "size": 1,
            }
        ],
    },
    "a list that has content too": lambda store: {
        **list_of(),
        **manifest_of(store, b"one", b"two"),
    },
}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, as_link) for form in FORMS),
        ("a list of references", as_hard_link),
        ("a manifest", as_copy_without_blob),
    ],
)
def test_what_can_be_reached_stays_and_the_rest_goes(
    store: Store, form: str, kind: Callable[[Path], None]
) -> None:
    commit_model(store, "m", b"one", b"mine")
    path = linked(store, FORMS[form](store))
    kind(path)
    needed = blobs(store)
    layer_by_hand(store, "", b"orphan")
    assert {model.unique for model in measure_usage(store).models} == {len(b"mine")}
    assert measure_usage(store).reclaimable == len(b"orphan")
    assert [blob.size for blob in prune(store, grace_s=0, sole_owner=True).removed] == [
        len(b"orphan")
    ]
    assert blobs(store) == needed
    removal = store.remove(M)
    assert ([blob.size for blob in removal.removed], removal.reason) == ([len(b"mine")], None)
    assert blobs(store) == needed - {blob_path(store, b"mine").name}
    result = verify(store)
    assert (result.is_sound, result.odd) == (True, ())


def test_a_manifest_of_a_list_may_be_missing(store: Store) -> None:
    """Ollama pulls only the one that it runs."""
    left, pulled = (reference(store, manifest_of(store, data)) for data in (b"left", b"pulled"))
    linked(store, list_of(left, pulled))
    (store.root / "blobs" / left["digest"].replace(":", "-")).unlink()
    assert [blob.size for blob in prune(store, grace_s=0, sole_owner=True).removed] == [
        len(b"left")
    ]


def damaged_blob(store: Store) -> None:
    path = linked(store, manifest_of(store, b"one"))
    path.resolve().write_bytes(json.dumps(manifest_of(store, b"two")).encode())


def damaged_child(store: Store) -> None:
    child = reference(store, manifest_of(store, b"one"))
    linked(store, list_of(child))
    (store.root / "blobs" / child["digest"].replace(":", "-")).write_bytes(b"{}")


def of_other_place(store: Store) -> None:
    path = linked(store, manifest_of(store, b"one"))
    outside = store.root.parent / path.resolve().name
    shutil.copyfile(path, outside)
    path.unlink()
    path.symlink_to(outside)


def linked_folder(store: Store) -> None:
    path = linked(store, manifest_of(store, b"one"))
    path.parent.rename(store.root.parent / "outside")
    path.parent.symlink_to(store.root.parent / "outside")


def dangling_tree(store: Store) -> None:
    (store.root / "manifests-v2").symlink_to("/nowhere")


def document(value: object) -> Callable[[Store], object]:
    def make(store: Store) -> None:
        path = store.root / "manifests-v2" / PLACE
        path.parent.mkdir(parents=True)
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())

    return make


DAMAGE: dict[str, Callable[[Store], object]] = {
    "a link to nothing": lambda store: linked(store, manifest_of(store, b"one")).resolve().unlink(),
    "a link to a blob of another store": of_other_place,
    "a folder that is a link": linked_folder,
    "a tree that is not there": dangling_tree,
    "bytes that are not the digest's": damaged_blob,
    "bytes of a list's manifest that are not": damaged_child,
    "a file at another depth": lambda store: linked(
        store, manifest_of(store, b"one"), "ollama.com/new/latest"
    ),
    "no JSON": document(b"{"),
    "a manifest of nothing": document({"schemaVersion": 2}),
    "a reference that is no digest": document(
        {"schemaVersion": 2, "manifests": [{"digest": "sha256:../../x"}]}
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_goes_while_one_can_not_be_read(store: Store, damage: str) -> None:
    commit_model(store, "m", b"mine")
    layer_by_hand(store, "", b"orphan")
    DAMAGE[damage](store)
    before = blobs(store)
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match="manifests-v2") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    if damage != "a tree that is not there":  # that is an error of listing, as of manifests/
        assert measure_usage(store).reclaimable == 0
        assert any("no blob is removed" in odd.reason for odd in verify(store).odd)
        removal = store.remove(M)
        assert removal.removed == ()
        assert "manifests-v2" in (removal.reason or "")
    assert blobs(store) == before


def test_names_are_those_that_manifests_would_have(store: Store) -> None:
    document = manifest_of(store, b"one")
    for place in (
        "ollama.com/library/a/latest",
        "registry.ollama.ai/me/b/x",
        "localhost%3A5000/me/c/y",
        "hf.co/o/D/Q4_K_M",
    ):
        linked(store, document, place)
    linked(store, document, "ollama.com/library/e/.manifest-1")
    assert list(map(str, store.newer.names())) == [
        "hf.co/o/D:Q4_K_M",
        "localhost:5000/me/c:y",
        "a:latest",
        "me/b:x",
    ]
    for name in (
        "a",
        "A:Latest",
        "ollama.com/library/a",
        "localhost:5000/me/c:y",
        "hf.co/o/d:q4_k_m",
    ):
        assert store.newer.has(ModelName.parse(name)), name
    assert not store.newer.has(ModelName.parse("localhost/me/c:y"))


def test_a_model_that_only_a_newer_ollama_has_is_not_found_and_that_is_said(store: Store) -> None:
    linked(store, manifest_of(store, b"one"))
    with pytest.raises(NotFoundError) as caught:
        store.find("new")
    assert "manifests-v2" in (caught.value.hint or "")
    with pytest.raises(NotFoundError) as caught:
        store.find("other")
    assert "manifests-v2" not in (caught.value.hint or "")
