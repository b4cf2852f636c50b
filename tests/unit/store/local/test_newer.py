"""manifests-v2: blobs of newer manifests stay (all, if one is unreadable: test_removal.py)."""

from collections.abc import Callable
from typing import Any

import pytest
from support.newer import linked, list_of, manifest_of, reference
from support.stores import commit_model, layer_by_hand

from blobstore.errors import NotFoundError
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Document = dict[str, Any]


def manifest(store: Store) -> Document:
    return manifest_of(store, b"one", b"two")


def list_of_manifests(store: Store) -> Document:
    return list_of(manifest(store), reference(store, manifest_of(store, b"three")))


def list_within_a_list(store: Store) -> Document:
    return list_of(list_of(reference(store, manifest(store))))


@pytest.mark.parametrize("form", [manifest, list_of_manifests, list_within_a_list, "a file"])
def test_what_can_be_reached_stays_and_the_rest_goes(
    store: Store, form: Callable[[Store], Document] | str
) -> None:
    commit_model(store, "m", b"one", b"mine")
    path = linked(store, manifest(store) if isinstance(form, str) else form(store))
    if form == "a file":  # and no blob
        path.resolve().rename(path)
    needed = store.blobs.digests()
    layer_by_hand(store, "", b"orphan")
    usage = measure_usage(store)
    assert {model.unique for model in usage.models} == {len(b"mine")}
    assert usage.reclaimable == len(b"orphan")
    result = prune(store, grace_s=0, sole_owner=True)
    assert [blob.size for blob in result.removed] == [len(b"orphan")]
    assert store.blobs.digests() == needed
    removal = store.remove("m")
    assert ([blob.size for blob in removal.removed], removal.reason) == ([len(b"mine")], None)
    assert store.blobs.digests() == needed - {Digest.of(b"mine").hex}
    assert verify(store).is_sound
    assert verify(store).odd == ()


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
