"""Names that differ only in case are one model, as for Ollama: writes reuse a spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from support.checkpoints import safetensors_bytes, write_checkpoint
from support.stores import blob_path, commit_model, link_by_hand, manifest_path

import blobstore
from blobstore.errors import AmbiguousNameError, StorageError, UsageError
from blobstore.names import ModelName
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
parse = ModelName.parse


def names(store: Store) -> list[str]:
    return [str(name) for name, _ in store.models()]


@pytest.fixture
def qwen(store: Store, tmp_path: Path) -> Store:
    """A store with a model ``Qwen:Int4``, imported from ``s``."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "Qwen:Int4", store=store, quant="int4")
    return store


def test_an_import_replaces_the_model_of_another_case(qwen: Store, tmp_path: Path) -> None:
    result = blobstore.import_model(tmp_path / "s", "QWEN:int4", store=qwen, force=True)
    assert (str(result.name), names(qwen)) == ("Qwen:Int4", ["Qwen:Int4"])
    assert str(blobstore.import_model(tmp_path / "s", "qwen", store=qwen).name) == "Qwen:latest"
    assert (
        str(blobstore.import_model(tmp_path / "s", "LIBRARY/qwen2", store=qwen).name)
        == "qwen2:latest"
    )
    assert verify(qwen).odd == ()


def test_cp_and_mv_reuse_a_spelling(qwen: Store) -> None:
    commit_model(qwen, "Team/Other", safetensors_bytes({}))
    copied = qwen.copy(parse("qwen:int4"), parse("team/other"), replace=True)
    assert str(copied) == "Team/Other:latest"
    assert str(qwen.copy(parse("qwen:int4"), parse("TEAM/new"))) == "Team/new:latest"
    assert str(qwen.move(parse("team/NEW"), parse("qwen:New"))) == "Qwen:New"
    assert sorted(names(qwen)) == ["Qwen:Int4", "Qwen:New", "Team/Other:latest"]


def test_mv_does_not_replace_another_model_in_another_case(
    store: Store, snapshot: Snapshot
) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "n", b"two")
    before = snapshot(store)
    with pytest.raises(UsageError, match="model n:latest already exists"):
        store.move(parse("m"), parse("N"))
    assert snapshot(store) == before
    store.move(parse("M"), parse("N"), replace=True)
    assert names(store) == ["n:latest"]


@pytest.mark.parametrize("act", [Store.copy, Store.move])
def test_a_model_is_not_its_own_copy(
    store: Store, snapshot: Snapshot, act: Callable[..., object]
) -> None:
    commit_model(store, "m", b"one")
    before = snapshot(store)
    with pytest.raises(UsageError, match="differ only in case are one model"):
        act(store, parse("M"), parse("m:Latest"))
    assert snapshot(store) == before
    act(store, parse("M"), parse("M"))
    assert names(store) == ["m:latest"]


def by_hand(store: Store, *which: str) -> None:
    """Write models as other programs may, one blob of its own each."""
    for name in which:
        link_by_hand(store, name, {"x": name.encode()})


def test_of_two_spellings_the_exact_one_counts_and_no_other(
    store: Store, snapshot: Snapshot
) -> None:
    by_hand(store, "Qwen", "qwen")
    assert str(store.find("qwen")) == "qwen:latest"
    before = snapshot(store)
    for act in (
        lambda: store.find("QWEN"),
        lambda: store.remove(parse("QWEN")),
        lambda: store.copy(parse("qwen"), parse("QWEN")),
        lambda: store.move(parse("qwen"), parse("QWEN")),
        lambda: blobstore.open_model("QWEN", store=store),
        lambda: measure_usage(store, ["QWEN"]),
    ):
        with pytest.raises(AmbiguousNameError, match="Qwen:latest or qwen:latest") as caught:
            act()
        assert caught.value.hint
    assert snapshot(store) == before
    assert [blob.size for blob in store.remove(parse("Qwen")).removed] == [len(b"Qwen")]
    assert names(store) == ["qwen:latest"]
    assert blob_path(store, b"qwen").exists()


def test_a_tag_is_spelled_as_in_the_folder_that_was_asked_for(store: Store) -> None:
    by_hand(store, "Qwen:a", "qwen:b")
    assert [
        str(store.target(name)) for name in ("qwen:A", "Qwen:B", "qwen:new", "Qwen:new", "QWEN:new")
    ] == [
        "Qwen:a",
        "qwen:b",
        "qwen:new",
        "Qwen:new",
        "QWEN:new",
    ]


def test_a_folder_behind_a_link_has_a_spelling_and_is_not_written_through(
    store: Store, tmp_path: Path
) -> None:
    commit_model(store, "m", b"one")
    (tmp_path / "outside").mkdir()
    manifest_path(store, "Qwen").parent.symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="symbolic link"):
        store.copy(parse("m"), parse("qwen"))
    assert list((tmp_path / "outside").iterdir()) == []


PART = st.sampled_from(["a", "A", "b", "B"])
NAMES = st.builds(lambda model, tag: ModelName(model=model, tag=tag), PART, PART)


@settings(max_examples=40)
@given(st.lists(NAMES, max_size=4), NAMES)
def test_a_spelling_is_one_that_is_there_or_none_is(
    tmp_path_factory: pytest.TempPathFactory, made: list[ModelName], name: ModelName
) -> None:
    store = blobstore.open_store(tmp_path_factory.mktemp("s"))
    for one in made:
        path = store.root.joinpath("manifests", *one.path_parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    same = {one for one in made if one.folded == name.folded}
    if name not in same and len(same) > 1:
        with pytest.raises(AmbiguousNameError):
            store.target(name)
        return
    found = store.target(name)
    assert found.folded == name.folded
    assert found in same or not same
    assert found == name or name not in same
