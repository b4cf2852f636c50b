"""cp, mv and rm: names share blobs; a removal deletes only blobs that nobody can need."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from support.newer import PLACE, linked, list_of, manifest_of, reference
from support.stores import blob_path, commit_model, layer_by_hand, link_by_hand, manifest_path

import blobstore
from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    DocumentError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]


def blobs(store: Store) -> set[bytes]:
    return {path.read_bytes() for path in (store.root / "blobs").iterdir()}


def test_cp_of_a_missing_broken_or_incomplete_model(store: Store, snapshot: Snapshot) -> None:
    commit_model(store, "broken", b"two")
    manifest_path(store, "broken").write_bytes(b"{")
    commit_model(store, "incomplete", b"three")
    blob_path(store, b"three").unlink()
    before = snapshot(store)
    sources = {"missing": NotFoundError, "broken": DocumentError, "incomplete": NotFoundError}
    for source, error in sources.items():
        with pytest.raises(error):
            store.copy(source, "n")
    assert snapshot(store) == before


def test_mv_gives_a_model_another_name(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one")
    raw = manifest_path(store, "example.org/team/m").read_bytes()
    store.move("example.org/team/m", "n")
    store.move("n", "n")
    assert manifest_path(store, "n").read_bytes() == raw
    assert list(map(str, store.manifests.names())) == ["n:latest"]
    assert not (store.root / "manifests/example.org").exists()


def test_rm_deletes_the_model_and_its_blobs_and_the_empty_folders(store: Store) -> None:
    commit_model(store, "example.org/team/m", b"one", b"two", b"one")
    commit_model(store, "n", b"two", b"three")
    removal = store.remove("example.org/team/m")
    assert [blob.size for blob in removal.removed] == [3]
    assert (removal.kept, removal.reason) == ((), None)
    assert blobs(store) == {b"two", b"three"}
    assert len(store.remove("n").removed) == 2
    assert blobs(store) == set()
    assert list((store.root / "manifests").iterdir()) == []


def test_a_broken_manifest_can_be_removed_and_takes_no_blob_along(store: Store) -> None:
    commit_model(store, "m", b"one")
    manifest_path(store, "m").write_bytes(b"{")
    assert store.remove("m").removed == ()
    assert store.manifests.names() == []
    assert blobs(store) == {b"one"}


def test_the_manifest_goes_before_the_blobs(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    blob_path(store, b"one").unlink()
    blob_path(store, b"one").mkdir()
    with pytest.raises(StorageError):
        store.remove("m")
    assert not manifest_path(store, "m").exists()


def older(change: Callable[[Path], object]) -> Callable[[Store], object]:
    return lambda store: change(manifest_path(store, "other"))


def linked_folder(path: Path) -> None:
    """Link the folder of manifests to another, which has the model ``m`` again."""
    outside = path.parents[4] / "outside"
    outside.mkdir()
    (outside / "latest").write_bytes((path.parents[1] / "m" / "latest").read_bytes())
    path.parent.rmdir()
    path.parent.symlink_to(outside)


def newer(change: Callable[[Path], object], place: str = PLACE) -> Callable[[Store], object]:
    """Return what links a newer manifest to its blob, and changes the link or the blob."""
    return lambda store: change(linked(store, manifest_of(store, b"three", b"four"), place))


def to_another_store(link: Path) -> None:
    outside = link.resolve().rename(link.parents[5] / link.resolve().name)
    link.unlink()
    link.symlink_to(outside)


def text(raw: str) -> Callable[[Path], object]:
    def change(link: Path) -> None:
        link.unlink()
        link.write_text(raw)

    return change


OLDER: tuple[Callable[[Path], object], ...] = (
    lambda path: path.write_bytes(b"{"),
    lambda path: path.with_name("latest~").write_bytes(b"may be an older Ollama's"),
    lambda path: path.symlink_to("/nowhere"),
    linked_folder,
)
NEWER: tuple[Callable[[Path], object], ...] = (
    lambda link: link.resolve().unlink(),
    lambda link: link.write_bytes(link.read_bytes().replace(b"mlx", b"MLX")),  # another digest
    to_another_store,
    text("{"),
    text('{"schemaVersion": 2, "manifests": [{"digest": "sha256:../../x"}]}'),
)


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [
        *((older(change), "other") for change in OLDER),
        *((newer(change), "manifests-v2") for change in NEWER),
        (newer(Path.lstat, "ollama.com/new/latest"), "manifests-v2"),
    ],
)
def test_blobs_stay_while_something_that_may_need_them_can_not_be_read(
    store: Store, obstacle: Callable[[Store], object], says: str
) -> None:
    commit_model(store, "m", b"one", b"two")
    layer_by_hand(store, "", b"orphan")
    path = manifest_path(store, "m")
    path.parent.with_name("other").mkdir()
    obstacle(store)
    before, manifests = blobs(store), set(store.root.glob("manifests*/**/*"))
    for dry_run in (True, False):
        with pytest.raises(BlobStoreError, match=rf"nothing is removed: .*{says}") as caught:
            prune(store, grace_s=0, sole_owner=True, dry_run=dry_run)
        assert caught.value.hint
    assert measure_usage(store).reclaimable == 0
    removal = store.remove("m")
    assert (removal.removed, len(removal.kept)) == ((), 2)
    assert says in (removal.reason or "")
    assert blobs(store) == before
    assert manifests - set(store.root.glob("manifests*/**/*")) == {path, path.parent}


def test_blobs_stay_while_another_holds_the_store(store: Store) -> None:
    commit_model(store, "m", b"one")
    with store.session():
        removal = open_store(store.root, wait_s=0).remove("m")
    assert (removal.removed, len(removal.kept)) == ((), 1)
    assert "in use" in (removal.reason or "")
    assert store.manifests.names() == []
    assert blobs(store) == {b"one"}


# Names that differ only in case are one model, as for Ollama: writes reuse a spelling


def test_cp_and_mv_reuse_a_spelling(store: Store) -> None:
    commit_model(store, "Qwen:Int4", b"one")
    commit_model(store, "Team/Other", b"other")
    assert str(store.copy("qwen:int4", "team/other", replace=True)) == "Team/Other:latest"
    assert str(store.copy("qwen:int4", "TEAM/new")) == "Team/new:latest"
    assert str(store.move("team/NEW", "qwen:New")) == "Qwen:New"
    names = ["Team/Other:latest", "Qwen:Int4", "Qwen:New"]
    assert list(map(str, store.manifests.names())) == names


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


# manifests-v2: blobs of newer manifests stay


@pytest.mark.parametrize("levels", [0, 2, None])
def test_what_can_be_reached_stays_and_the_rest_goes(store: Store, levels: int | None) -> None:
    """From lists within lists, and from a manifest that is not a link to a blob (None)."""
    commit_model(store, "m", b"one", b"mine")
    document = manifest_of(store, b"one", b"two")
    for _ in range(levels or 0):
        document = list_of(document, reference(store, manifest_of(store, b"three")))
    path = linked(store, document)
    if levels is None:
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
    document = manifest_of(store, b"one")
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
    linked(store, manifest_of(store, b"one"))
    for name, is_said in (("new", True), ("other", False)):
        with pytest.raises(NotFoundError) as caught:
            store.find(name)
        assert ("manifests-v2" in (caught.value.hint or "")) == is_said
