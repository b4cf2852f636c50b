"""Packing: a model is at any moment whole or packed, and Ollama's folders have only whole ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import BF16, normal, safetensors_bytes, write_checkpoint
from support.packed_format import decoded
from support.stores import commit_model

import blobstore
from blobstore.errors import (
    BlobStoreError,
    BusyError,
    ConflictError,
    CorruptDataError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.inspection.listing import ListedModel, list_models
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store, open_store, pack, unpack
from blobstore.store.memory import MemoryStore


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def visible(store: Store) -> dict[str, bytes]:
    """What Ollama sees."""
    return {
        name: data
        for name, data in files(store.root).items()
        if name.startswith(("blobs/", "manifests/"))
    }


def packed_files(store: Store) -> list[Path]:
    return sorted((store.root / ".blobstore" / "packed" / "blobs").glob("*"))


def tuned(amount: float) -> Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Return tensors of a model: one large one, which differs by ``amount``, and small ones."""
    large = normal("large", 256, 256, dtype=np.float32)
    large = large + normal("tuned", 256, 256, dtype=np.float32, scale=amount)
    return {"large.weight": large.astype(BF16), "norm.weight": normal("norm", 256)}


def add(store: Store, folder: Path, name: str, amount: float = 0.0) -> None:
    source = write_checkpoint(folder / f"source-{name}", tuned(amount))
    blobstore.import_model(source, name, store=store, jobs=1)


@pytest.fixture
def one(store: Store, tmp_path: Path) -> Store:
    """A store with a model of a large blob and small ones."""
    add(store, tmp_path, "m")
    return store


M = ModelName.parse("m")


def test_a_model_comes_back_byte_for_byte(one: Store) -> None:
    os.utime(one.manifests.path.joinpath(*M.path_parts), (10**9, 10**9))
    before, modified = visible(one), one.manifests.modified(M)
    blobs = {name[-71:]: data for name, data in before.items() if name.startswith("blobs/")}
    done = pack(one, "m")
    assert visible(one) == {}
    assert {path.name: decoded(path.read_bytes()) for path in packed_files(one)} == blobs
    assert done.nbytes == sum(map(len, blobs.values()))
    assert done.stored < 0.8 * done.nbytes
    assert {blob.digest.file_name for blob in done.removal.removed} == blobs.keys()
    assert one.packed.manifests.modified(M) == modified
    assert unpack(one, "m").nbytes == done.nbytes
    assert (visible(one), one.manifests.modified(M)) == (before, modified)
    assert packed_files(one) == []
    assert verify(one).is_sound


@pytest.mark.parametrize(
    "blobs", [(b"text " * 1000, b""), (safetensors_bytes({"w": normal("w", 8)})[:-1],)]
)
def test_blobs_without_tensors_are_packed_as_text(store: Store, blobs: tuple[bytes, ...]) -> None:
    commit_model(store, "m", *blobs)
    before = visible(store)
    pack(store, "m")
    assert visible(store) == {}
    unpack(store, "m")
    assert visible(store) == before


def test_any_number_of_threads_makes_the_same_files(one: Store) -> None:
    pack(one, "m", jobs=1)
    first = kept(one)
    unpack(one, "m")
    pack(one, "m", jobs=4)
    assert kept(one) == first


def test_a_blob_that_another_model_needs_stays(one: Store, tmp_path: Path) -> None:
    one.copy("m", "n")
    before = visible(one)
    done = pack(one, "m")
    assert done.removal.removed == ()
    expected = {name: data for name, data in before.items() if "/m/" not in name}
    assert visible(one) == expected
    pack(one, "n")
    assert visible(one) == {}
    unpack(one, "m")
    assert packed_files(one) != []  # n needs them
    unpack(one, "n")
    assert packed_files(one) == []
    assert visible(one) == before


def test_a_damaged_manifest_is_not_a_whole_model(one: Store) -> None:
    """The packed model would be lost."""
    pack(one, "m")
    path = one.manifests.path.joinpath(*M.path_parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not a manifest")
    with pytest.raises(BlobStoreError):
        unpack(one, "m")
    with pytest.raises(BlobStoreError):
        prune(one, grace_s=0, sole_owner=True)
    path.unlink()
    assert unpack(one, "m").blobs


def test_a_packed_model_is_named_as_one(one: Store) -> None:
    pack(one, "m")
    with pytest.raises(ModelNotFoundError, match="m:latest is packed") as caught:
        one.find("m")
    assert caught.value.hint == "blobstore unpack m:latest restores it."
    assert one.is_packed("M")
    assert one.target("M") == M
    assert one.holder("m") is one.packed
    listed = list_models(one)
    assert [(model.name, getattr(model, "is_packed", None)) for model in listed] == [(M, True)]
    [model] = listed
    assert isinstance(model, ListedModel)
    assert (model.parameters, model.quant_type) == (256 * 256 + 256, "BF16")


def test_opening_a_packed_model_brings_it_back(one: Store) -> None:
    before = visible(one)
    values = {
        name: tensor.array("numpy") for name, tensor in blobstore.open_model("m", store=one).items()
    }
    pack(one, "m")
    with blobstore.open_model("m", store=one, verify=True) as model:
        for name, value in values.items():
            assert np.array_equal(model[name].array("numpy"), value)
    assert visible(one) == before
    pack(one, "m")
    assert LayeredStore(one, [MemoryStore()]).whole("m") == M
    assert not one.is_packed("m")


def test_a_removed_packed_model_is_gone(one: Store, tmp_path: Path) -> None:
    add(one, tmp_path, "n", 1e-4)
    pack(one, "m")
    pack(one, "n")
    sizes = {path.name: path.stat().st_size for path in packed_files(one)}
    removal = one.remove("m")
    left = {path.name for path in packed_files(one)}
    assert sum(blob.size for blob in removal.removed) == sum(
        size for name, size in sizes.items() if name not in left
    )
    unpack(one, "n")
    assert verify(one, ["n"]).is_sound
    with pytest.raises(ModelNotFoundError):
        one.remove("m")


def test_copies_and_moves_of_packed_models(one: Store) -> None:
    before = visible(one)
    pack(one, "m")
    stored = packed_files(one)
    one.copy("m", "n")
    one.move("m", "o")
    assert packed_files(one) == stored
    assert [str(name) for name in one.packed.manifests.names()] == ["n:latest", "o:latest"]
    commit_model(one, "x", b"x")
    pack(one, "x")
    with pytest.raises(UsageError, match="already exists"):
        one.copy("n", "x")
    one.remove("x")
    unpack(one, "o")
    one.move("o", "m")
    assert visible(one) == before
    with pytest.raises(UsageError, match="already exists"):
        one.move("n", "m", replace=True)


# Processes that were killed, and others meanwhile


def kept(store: Store) -> dict[str, bytes]:
    return files(store.root / ".blobstore" / "packed")


def put_back(store: Store, packed: Mapping[str, bytes]) -> None:
    """Write packed files that were there before, as a killed process leaves them."""
    for name, data in packed.items():
        path = store.root / ".blobstore" / "packed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_what_a_killed_unpack_left_is_not_seen(one: Store) -> None:
    pack(one, "m")
    packed = kept(one)
    unpack(one, "m")
    put_back(one, packed)
    assert [getattr(model, "is_packed", None) for model in list_models(one)] == [False]
    one.move("m", "n")
    assert [str(model.name) for model in list_models(one)] == ["n:latest"]


def test_what_a_killed_pack_left_is_removed_or_used(one: Store) -> None:
    before = visible(one)
    pack(one, "m")
    blobs = {name: data for name, data in kept(one).items() if name.startswith("blobs/")}
    unpack(one, "m")
    put_back(one, blobs)
    left = {path: path.stat().st_ino for path in packed_files(one)}
    pack(one, "m")
    assert {path: path.stat().st_ino for path in packed_files(one)} == left
    unpack(one, "m")
    put_back(one, blobs)
    leftovers = prune(one, dry_run=True).leftovers
    assert {left.reason for left in leftovers} == {"no packed model needs it"}
    prune(one)
    assert packed_files(one) == []
    assert visible(one) == before


def test_one_packs_at_a_time(one: Store) -> None:
    other = open_store(one.root, wait_s=0)
    with one.packing():
        for work in (pack, unpack):
            with pytest.raises(BusyError):
                work(other, "m")
        with pytest.raises(BusyError):
            prune(other, grace_s=0, sole_owner=True)
    pack(other, "m")


@pytest.mark.parametrize(("place", "is_link"), [("", True), ("blobs", True), ("manifests", False)])
def test_nothing_is_packed_into_anything_but_our_own_folders(
    one: Store, tmp_path: Path, place: str, *, is_link: bool
) -> None:
    folder = one.root / ".blobstore" / "packed" / place
    folder.parent.mkdir(parents=True, exist_ok=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere) if is_link else folder.touch()
    sound = visible(one)
    with pytest.raises(StorageError):
        pack(one, "m")
    assert visible(one) == sound
    assert not list(elsewhere.iterdir())


# Damage


def damage(path: Path, place: int = -200) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_never_unpacked(one: Store) -> None:
    large = next(layer for layer in one.manifest("m").layers if layer.size >= 2**16)
    pack(one, "m")
    path = one.root / ".blobstore" / "packed" / "blobs" / large.digest.file_name
    damage(path, 1000)
    result = verify(one)
    assert [blob.digest for blob in result.damaged] == [large.digest]
    assert result.damaged[0].models == (M,)
    assert str(path) in result.damaged[0].reason
    for _ in range(2):
        with pytest.raises(CorruptDataError) as caught:
            blobstore.open_model("m", store=one)
        assert caught.value.blob == str(large.digest)
        assert caught.value.path == str(path)
        assert visible(one) == {}
        assert one.is_packed("m")


def test_a_missing_file_is_damage(one: Store) -> None:
    pack(one, "m")
    path = packed_files(one)[0]
    path.unlink()
    result = verify(open_store(one.root), ["m"])
    assert {blob.digest.file_name for blob in result.damaged} == {path.name}
    with pytest.raises(NotFoundError):
        unpack(open_store(one.root), "m")


def test_a_damaged_packed_file_does_not_take_the_place_of_whole_blobs(
    one: Store, tmp_path: Path
) -> None:
    """The large blob is packed for another model already, and its file was damaged since."""
    add(one, tmp_path, "other")
    pack(one, "other")
    sound = visible(one)
    large = max(packed_files(one), key=lambda path: path.stat().st_size)
    damage(large, 1000)
    with pytest.raises(CorruptDataError, match="is damaged") as caught:
        pack(one, "m")
    assert caught.value.path == str(large)
    assert caught.value.hint is not None
    large.unlink()
    large.symlink_to(tmp_path)
    with pytest.raises(StorageError, match=r"can't open|not a regular file"):
        pack(one, "m")
    assert visible(one) == sound
    large.unlink()
    pack(one, "m")
    assert not verify(one).damaged


def test_nothing_packed_is_removed_while_a_packed_manifest_is_damaged(
    one: Store, tmp_path: Path
) -> None:
    add(one, tmp_path, "n", 1e-4)
    pack(one, "m")
    pack(one, "n")
    before = packed_files(one)
    path = one.root.joinpath(".blobstore", "packed", "manifests", *M.path_parts)
    path.write_bytes(b"{")
    with pytest.raises(CorruptDataError):
        prune(one, grace_s=0, sole_owner=True)
    assert one.remove("n").reason is not None
    assert packed_files(one) == before
    assert [broken.name for broken in verify(one).broken] == [M]
    assert one.remove("m").reason is None
    assert packed_files(one) == []


# Care


def test_usage_counts_packed_files(one: Store) -> None:
    plain = measure_usage(one)
    pack(one, "m")
    usage = measure_usage(one)
    on_disk = sum(path.stat().st_size for path in packed_files(one))
    assert (usage.blobs, usage.nbytes, usage.packed) == (0, 0, on_disk)
    [model] = usage.models
    assert (model.name, model.nbytes, model.unique, model.is_packed) == (M, on_disk, on_disk, True)
    one.copy("m", "n")
    assert [one.unique for one in measure_usage(one, ["m"]).models] == [0]
    assert plain.packed == 0


def test_an_import_meanwhile_is_not_overwritten(
    one: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process gives the name a new model while the old one is packed."""
    real = Store.become_packed

    def beaten(self: Store, *rest: object) -> None:
        commit_model(open_store(self.root), "m", b"new")
        real(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "become_packed", beaten)
    with pytest.raises(ConflictError):
        pack(one, "m")
    assert one.manifest("m").layers[0].size == 3
    assert not one.packed.has("m")
