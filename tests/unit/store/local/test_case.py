"""Names that differ only in case are one model, as for Ollama: writes reuse a spelling."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st
from support.stores import commit_model, link_by_hand, manifest_path

import blobstore
from blobstore.errors import AmbiguousNameError, UsageError
from blobstore.names import ModelName
from blobstore.store.care.usage import measure_usage
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]


def test_cp_and_mv_reuse_a_spelling(store: Store) -> None:
    commit_model(store, "Qwen:Int4", b"one")
    commit_model(store, "Team/Other", b"other")
    copied = store.copy("qwen:int4", "team/other", replace=True)
    assert str(copied) == "Team/Other:latest"
    assert str(store.copy("qwen:int4", "TEAM/new")) == "Team/new:latest"
    assert str(store.move("team/NEW", "qwen:New")) == "Qwen:New"
    assert sorted(map(str, store.manifests.names())) == [
        "Qwen:Int4",
        "Qwen:New",
        "Team/Other:latest",
    ]


def test_mv_replaces_no_model_in_another_case(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "n", b"two")
    before = snapshot(store)
    with pytest.raises(UsageError, match="n:latest already exists"):
        store.move("m", "N")
    for act in (store.copy, store.move):
        with pytest.raises(UsageError, match="only in case"):
            act("M", "m:Latest")
        act("M", "M")
    assert snapshot(store) == before
    store.move("M", "N", replace=True)
    assert list(map(str, store.manifests.names())) == ["n:latest"]


def test_of_two_spellings_the_exact_one_counts(store: Store, snapshot: Snapshot) -> None:
    for name in ("Qwen", "qwen"):
        link_by_hand(store, name, {"x": name.encode()})
    assert str(store.find("qwen")) == "qwen:latest"
    before = snapshot(store)
    for act in (
        lambda: store.find("QWEN"),
        lambda: store.remove("QWEN"),
        lambda: store.copy("qwen", "QWEN"),
        lambda: store.move("qwen", "QWEN"),
        lambda: blobstore.open_model("QWEN", store=store),
        lambda: measure_usage(store, ["QWEN"]),
    ):
        with pytest.raises(AmbiguousNameError, match="Qwen:latest or qwen:latest") as caught:
            act()
        assert caught.value.hint
    assert snapshot(store) == before
    assert [blob.size for blob in store.remove("Qwen").removed] == [len(b"Qwen")]
    assert list(map(str, store.manifests.names())) == ["qwen:latest"]


PART = st.sampled_from(["a", "A", "b", "B"])
NAMES = st.builds(lambda model, tag: ModelName(model=model, tag=tag), PART, PART)


@settings(max_examples=20)
@given(st.lists(NAMES, max_size=4), NAMES)
def test_a_spelling_is_one_that_is_there_or_none_is(
    tmp_path_factory: pytest.TempPathFactory, made: list[ModelName], name: ModelName
) -> None:
    store = blobstore.open_store(tmp_path_factory.mktemp("s"))
    for one in made:
        path = manifest_path(store, str(one))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    same = {one for one in made if one.folded == name.folded}
    if name not in same and len(same) > 1:
        with pytest.raises(AmbiguousNameError):
            store.target(name)
        return
    found = store.target(name)
    assert found.folded == name.folded
    assert found in same or not same
    assert found == name or name not in same
