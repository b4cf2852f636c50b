"""Every manifest and index of the corpus gets its verdict, also from a store and a folder."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.corpus import (
    Case,
    accepted,
    case_id,
    find,
    index_tensor,
    layers,
    load,
    refusal,
    rejected,
    write_index_folder,
)

from blobstore import open_model
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
)
from blobstore.formats import documents
from blobstore.formats.documents import MAX_LAYERS, Manifest
from blobstore.importer.run import import_model
from blobstore.inspection.listing import BrokenModel, ListedModel, list_models, summarize
from blobstore.names import ModelName
from blobstore.source.inventory import read_inventory
from blobstore.store.local.store import Store, open_store

# Good manifests that a store can't keep its side of: the error, and the digest that it names.
ABOUT_A_STORE: dict[str, tuple[type[BlobStoreError], str]] = {
    "manifest-size-wrong": (CorruptDataError, "sha256:" + "a3f5" * 16),
    "manifest-size-zero-for-nonempty": (CorruptDataError, "sha256:" + "a3f5" * 16),
    "manifest-blob-missing": (NotFoundError, "sha256:" + "c" * 64),
}
FROM_A_REGISTRY = ("manifest-size-5MiB",)
BROKEN_ALONE = [
    case for case in rejected("manifest") if case.id not in {*ABOUT_A_STORE, *FROM_A_REGISTRY}
]
NAME = ModelName.parse("corpus")


@pytest.mark.parametrize("case", accepted("manifest"), ids=case_id)
def test_manifests(case: Case) -> None:
    raw = case.data
    manifest = Manifest.parse(raw)
    document = json.loads(raw)
    assert manifest.raw == raw
    assert manifest.digest.hex == hashlib.sha256(raw).hexdigest()
    assert manifest.media_type == document.get("mediaType", manifest.media_type)
    assert (manifest.config is None) == ("config" not in document)
    assert len(manifest.layers) == len(document["layers"])
    for descriptor, wanted in zip(
        manifest.descriptors, [*document["layers"], document.get("config")], strict=False
    ):
        assert str(descriptor.digest) == wanted["digest"]
        assert (descriptor.media_type, descriptor.size) == (wanted["mediaType"], wanted["size"])
        assert descriptor.name == wanted.get("name")


@pytest.mark.parametrize("case", BROKEN_ALONE, ids=case_id)
def test_manifests_to_refuse(case: Case) -> None:
    raw = case.data
    error = refusal(lambda: Manifest.parse(raw))
    assert isinstance(error, DocumentError | LimitExceededError)
    assert error.rule == case.rule
    assert len(str(error)) < 2000


def test_an_image_index_is_called_so() -> None:
    assert "image index" in str(
        refusal(lambda: Manifest.parse(find("manifest", "manifest-index-type").data))
    )


@pytest.mark.parametrize("name", ["manifest-size-5MiB", "manifest-layers-100k"])
def test_a_manifest_of_too_many_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = find("manifest", name).data
    assert Manifest.parse(raw).raw == raw
    monkeypatch.setattr(documents, "MAX_MANIFEST", 4 * 2**20)
    error = refusal(lambda: Manifest.parse(raw))
    assert isinstance(error, LimitExceededError)
    assert error.rule == "M1"


def test_one_layer_beyond_the_limit() -> None:
    assert isinstance(refusal(lambda: Manifest.parse(layers(MAX_LAYERS + 1))), LimitExceededError)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with one good model, ``small``, which no test may change."""
    folder = tmp_path_factory.mktemp("original")
    import_model(write_checkpoint(folder / "small"), "small", store=open_store(folder / "store"))
    return folder / "store"


@pytest.fixture
def held(original: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store; gone after the test, since some manifests are large."""
    yield open_store(shutil.copytree(original, tmp_path / "store"))
    shutil.rmtree(tmp_path / "store")


def link(store: Store, raw: bytes) -> None:
    """Write ``raw`` over the manifest of ``corpus``, as other programs or power cuts may."""
    path = store.root / "manifests" / Path(*NAME.path_parts)
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)


def broken(store: Store) -> BlobStoreError:
    """Return the error of the listed model ``corpus``; check that ``small`` is unchanged."""
    corpus, small = list_models(store)
    assert isinstance(small, ListedModel)
    assert isinstance(corpus, BrokenModel)
    assert (str(small.name), corpus.name) == ("small:latest", NAME)
    return corpus.error


@pytest.mark.parametrize(
    "case", [case for case in load("manifest") if case.id in ABOUT_A_STORE], ids=case_id
)
def test_manifests_that_the_store_does_not_bear_out(case: Case, held: Store) -> None:
    kind, digest = ABOUT_A_STORE[case.id]
    (held.root / "blobs" / ("sha256-" + "a3f5" * 16)).write_bytes(b"blob")
    link(held, case.data)
    manifest = held.manifest(NAME)
    for error in (
        refusal(lambda: open_model("corpus", store=held)),
        refusal(lambda: summarize(held, NAME, manifest)),
        broken(held),
    ):
        assert type(error) is kind
        assert error.blob == digest
        assert digest in str(error)
    assert refusal(lambda: open_model("corpus", store=held)).model == str(NAME)


@pytest.mark.parametrize("case", BROKEN_ALONE, ids=case_id)
def test_beside_a_broken_manifest_models_are_listed_and_no_blob_is_removed(
    case: Case, held: Store
) -> None:
    link(held, case.data)
    for error in (
        refusal(lambda: held.manifest(NAME)),
        refusal(lambda: open_model("corpus", store=held)),
        broken(held),
    ):
        assert isinstance(error, DocumentError | LimitExceededError)
        assert error.model == str(NAME)
    blobs = sorted((held.root / "blobs").iterdir())
    removal = held.remove(ModelName.parse("small"))
    assert removal.removed == ()
    assert removal.kept
    assert str(NAME) in str(removal.reason)
    assert sorted((held.root / "blobs").iterdir()) == blobs


@pytest.mark.parametrize("case", BROKEN_ALONE, ids=case_id)
def test_a_broken_manifest_can_be_removed(case: Case, held: Store) -> None:
    link(held, case.data)
    assert held.remove(NAME).removed == ()
    assert [str(model.name) for model in list_models(held)] == ["small:latest"]
    with open_model("small", store=held, verify=True) as model:
        assert len(model) == 6


def test_a_manifest_beyond_a_limit_can_be_removed(held: Store) -> None:
    link(held, layers(MAX_LAYERS + 1))
    held.remove(NAME)
    assert [str(model.name) for model in list_models(held)] == ["small:latest"]


@pytest.mark.parametrize("case", accepted("index"), ids=case_id)
def test_indexes(case: Case, tmp_path: Path) -> None:
    shards = write_index_folder(case, tmp_path / "model")
    inventory = read_inventory(tmp_path / "model")
    assert {tensor.file.name: name for name, tensor in inventory.tensors.items()} == shards
    assert list(inventory.tensors) == sorted(shards.values())
    for name, tensor in inventory.tensors.items():
        values = index_tensor(name, len(shards))
        stored = Path(tensor.file.path).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert (tensor.dtype.value, tensor.shape) == ("F32", values.shape)
        assert stored == values.tobytes()
    assert inventory.nbytes == 8
    assert inventory.left_out == ()


@dataclass
class Bomb:
    """A pickle that leaves a file behind when anything unpickles it."""

    path: Path

    def __reduce__(self) -> tuple[object, ...]:
        """Say what unpickling calls."""
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("case", rejected("index"), ids=case_id)
def test_indexes_to_refuse(case: Case, tmp_path: Path) -> None:
    write_index_folder(case, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(
        pickle.dumps(Bomb(tmp_path / "unpickled"))
    )
    error = refusal(lambda: read_inventory(tmp_path / "model"))
    assert isinstance(
        error, NotFoundError if case.id == "index-missing-shard" else CorruptDataError
    )
    assert error.rule == case.rule
    assert str(tmp_path / "model") in str(error)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("name", "empty", "tensor"),
    [
        ("index-missing-tensor", "model-00001-of-00002.safetensors", "zzz"),
        ("index-wrong-shard", "model-00002-of-00002.safetensors", "a"),
    ],
)
def test_a_shard_without_the_tensor_that_the_index_promises(
    name: str, empty: str, tensor: str, tmp_path: Path
) -> None:
    write_index_folder(find("index", name), tmp_path / "model", empty)
    error = refusal(lambda: read_inventory(tmp_path / "model"))
    assert isinstance(error, CorruptDataError)
    assert (error.rule, error.tensor) == ("I1", tensor)
    assert empty in str(error)


@pytest.mark.parametrize("case", rejected("index"), ids=case_id)
def test_without_the_index_nothing_is_wrong_with_the_shards(case: Case, tmp_path: Path) -> None:
    shards = write_index_folder(case, tmp_path / "model")
    for file, name in shards.items():
        assert list(read_inventory(tmp_path / "model" / file).tensors) == [name]
