"""Packing: a model is at any moment whole or packed, and Ollama's folders have only whole ones."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import BF16, normal, safetensors_bytes
from support.packed_format import decoded
from support.stores import commit_model, manifest_path, meanwhile

import blobstore
from blobstore import errors
from blobstore.inspection.listing import ListedModel, list_models
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store, open_store, pack, unpack
from blobstore.store.memory import MemoryStore

M = ModelName.parse("m")
LARGE, OTHER = (
    safetensors_bytes({"large": normal(name, 256, 256, dtype=BF16)}) for name in ("large", "other")
)
SMALL = safetensors_bytes({"norm": normal("norm", 256, dtype=BF16)})


@pytest.fixture
def one(store: Store) -> Store:
    commit_model(store, "m", LARGE, SMALL)
    return store


def files(folder: Path, *places: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for place in places
        for path in folder.joinpath(place).rglob("*")
        if path.is_file()
    }


def visible(store: Store) -> dict[str, bytes]:
    return files(store.root, "blobs", "manifests")


def kept(store: Store, what: str = "") -> dict[str, bytes]:
    """What is packed: ``blobs``, ``manifests``, or both."""
    return files(store.root, f".blobstore/packed/{what}")


def packed_path(store: Store, blob: bytes) -> Path:
    return store.root / ".blobstore/packed/blobs" / Digest.of(blob).file_name


def put_back(store: Store, packed: Mapping[str, bytes]) -> None:
    """Write packed files that were there before, as a killed process leaves them."""
    for name, data in packed.items():
        (store.root / name).parent.mkdir(parents=True, exist_ok=True)
        (store.root / name).write_bytes(data)


def names(store: Store) -> list[tuple[str, bool]]:
    return [(str(one.name), getattr(one, "is_packed", False)) for one in list_models(store)]


def test_a_model_comes_back_byte_for_byte(one: Store) -> None:
    commit_model(one, "m", LARGE, SMALL, b"text " * 1000, b"", SMALL[:-1])
    os.utime(manifest_path(one, "m"), (10**9, 10**9))
    before, modified = visible(one), one.manifests.modified_at(M)
    blobs = {Path(name).name: data for name, data in before.items() if name.startswith("blobs/")}
    done = pack(one, "m", jobs=1)
    assert visible(one) == {}
    packed = kept(one)
    assert {Path(name).name: decoded(data) for name, data in kept(one, "blobs").items()} == blobs
    assert done.nbytes == sum(map(len, blobs.values()))
    assert done.stored < 0.8 * done.nbytes
    assert {blob.digest.file_name for blob in done.removal.removed} == blobs.keys()
    assert one.packed.manifests.modified_at(M) == modified
    assert unpack(one, "m").nbytes == done.nbytes
    assert (visible(one), one.manifests.modified_at(M)) == (before, modified)
    assert kept(one) == {}
    pack(one, "m", jobs=4)
    assert kept(one) == packed


def test_a_blob_that_another_model_needs_stays(one: Store) -> None:
    one.copy("m", "n")
    before = visible(one)
    assert pack(one, "m").removal.removed == ()
    assert visible(one) == {name: data for name, data in before.items() if "/m/" not in name}
    pack(one, "n")
    assert visible(one) == {}
    unpack(one, "m")
    assert kept(one, "blobs")  # n needs them
    unpack(one, "n")
    assert kept(one) == {}
    assert visible(one) == before


def test_a_packed_model_is_named_as_one(one: Store) -> None:
    pack(one, "m")
    with pytest.raises(errors.ModelNotFoundError, match="m:latest is packed") as caught:
        one.find("m")
    assert "blobstore unpack m:latest" in (caught.value.hint or "")
    assert one.is_packed("M")
    assert one.target("M") == M
    assert one.holder("m") is one.packed
    assert names(one) == [("m:latest", True)]
    [model] = list_models(one)
    assert isinstance(model, ListedModel)
    assert (model.parameters, model.quant_type) == (256 * 256 + 256, "BF16")
    usage = measure_usage(one)
    on_disk = sum(map(len, kept(one, "blobs").values()))
    assert (usage.blobs, usage.nbytes, usage.packed) == (0, 0, on_disk)
    assert [(model.unique, model.is_packed) for model in usage.models] == [(on_disk, True)]


def test_opening_a_packed_model_brings_it_back(one: Store) -> None:
    before = visible(one)
    values = {n: t.array("numpy") for n, t in blobstore.open_model("m", store=one).items()}
    pack(one, "m")
    with blobstore.open_model("m", store=one, verify=True) as model:
        for name, value in values.items():
            assert np.array_equal(model[name].array("numpy"), value)
    assert visible(one) == before
    pack(one, "m")
    assert LayeredStore(one, [MemoryStore()]).whole("m") == M
    assert not one.is_packed("m")


# Processes that were killed, and others meanwhile


def test_what_a_killed_pack_or_unpack_left_is_not_seen_and_removed_or_used(one: Store) -> None:
    before = visible(one)
    pack(one, "m")
    packed, blobs = kept(one), kept(one, "blobs")
    unpack(one, "m")
    put_back(one, packed)
    assert names(one) == [("m:latest", False)]
    inode = packed_path(one, LARGE).stat().st_ino
    pack(one, "m")
    assert packed_path(one, LARGE).stat().st_ino == inode
    unpack(one, "m")
    put_back(one, blobs)
    assert len(prune(one, dry_run=True).leftovers) == len(blobs)
    prune(one)
    assert kept(one, "blobs") == {}
    assert visible(one) == before


def test_one_packs_at_a_time(one: Store) -> None:
    other = open_store(one.root, wait_s=0)
    with one.packing():
        for work in (pack, unpack):
            with pytest.raises(errors.BusyError):
                work(other, "m")
        with pytest.raises(errors.BusyError):
            prune(other, grace_s=0, sole_owner=True)


def test_an_import_meanwhile_is_kept(one: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process gives the name a new model while the old one is packed."""
    other = open_store(one.root)
    meanwhile(
        monkeypatch, "rename", packed_path(one, LARGE), lambda: commit_model(other, "m", b"new")
    )
    with pytest.raises(errors.ConflictError):
        pack(one, "m", jobs=1)
    assert one.manifest("m").layers[0].size == 3
    assert not one.packed.has("m")


# Damage


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_never_unpacked(one: Store) -> None:
    pack(one, "m")
    path = packed_path(one, LARGE)
    damage(path)
    [found] = verify(one).damaged
    assert (found.digest, found.models) == (Digest.of(LARGE), (M,))
    assert str(path) in found.reason
    with pytest.raises(errors.CorruptDataError) as caught:
        blobstore.open_model("m", store=one)
    assert (caught.value.blob, caught.value.path) == (str(found.digest), str(path))
    path.unlink()
    assert [blob.digest for blob in verify(open_store(one.root), ["m"]).damaged] == [found.digest]
    with pytest.raises(errors.NotFoundError):
        unpack(open_store(one.root), "m")
    assert visible(one) == {}
    assert one.is_packed("m")


def test_a_damaged_packed_file_does_not_replace_whole_blobs(one: Store, tmp_path: Path) -> None:
    """The large blob is packed for another model already, and its file was damaged since."""
    commit_model(one, "other", LARGE)
    pack(one, "other")
    sound = visible(one)
    path = packed_path(one, LARGE)
    damage(path)
    with pytest.raises(errors.CorruptDataError, match="is damaged") as caught:
        pack(one, "m")
    assert caught.value.path == str(path)
    assert caught.value.hint is not None
    path.unlink()
    path.symlink_to(tmp_path)
    with pytest.raises(errors.StorageError, match=r"can't open|not a regular file"):
        pack(one, "m")
    assert visible(one) == sound
    path.unlink()
    pack(one, "m")
    assert not verify(one).damaged


def test_nothing_packed_is_removed_while_a_manifest_is_damaged(one: Store) -> None:
    """It may be of the model that was packed, or it is of a packed one."""
    commit_model(one, "n", OTHER)
    pack(one, "m")
    pack(one, "n")
    before = kept(one, "blobs")
    plain = manifest_path(one, "m")
    for path in (plain, one.root.joinpath(".blobstore/packed/manifests", *M.path_parts)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{")
        with pytest.raises(errors.BlobStoreError):
            prune(one, grace_s=0, sole_owner=True)
        with pytest.raises(errors.BlobStoreError):
            unpack(one, "m")
        assert [broken.name for broken in verify(one).broken] == [M]
        plain.unlink(missing_ok=True)
    assert one.remove("n").reason is not None
    assert kept(one, "blobs") == before
    assert one.remove("m").reason is None
    assert kept(one, "blobs") == {}
