"""Which files are inspected, and what is said of the others; damage is refused."""

import json
from pathlib import Path

import pytest
from support.checkpoints import raw_safetensors, safetensors_bytes, small_tensors, write_checkpoint
from support.sparse import write_sparse, write_sparse_folder
from support.stores import blob_path, commit_model

import blobstore
from blobstore import errors
from blobstore.inspection.inspect import inspect
from blobstore.inspection.inspection import TargetKind
from blobstore.store.local.store import Store

TENSORS = {f"layers.{number}.weight": ("BF16", (8, number + 1)) for number in range(10)}
COUNT = {"BF16": 8 * 55}
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


def test_a_file_a_folder_and_an_index(tmp_path: Path) -> None:
    single = write_sparse_folder(tmp_path / "a", TENSORS)
    sharded = write_sparse_folder(tmp_path / "b", TENSORS, shards=3)
    targets = {
        single / "model.safetensors": TargetKind.FILE,
        single: TargetKind.FOLDER,
        sharded: TargetKind.FOLDER,
        sharded / INDEX: TargetKind.INDEX,
    }
    for target, kind in targets.items():
        found = inspect(target)
        assert (found.kind, found.name, found.notes) == (kind, str(target), ())
        assert found.parameter_count == COUNT
        assert (found.index is not None) == found.sharded == target.is_relative_to(sharded)
    places = {tensor.name: tensor.file for tensor in inspect(sharded).tensors}
    assert places == json.loads((sharded / INDEX).read_text())["weight_map"]


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = write_sparse_folder(tmp_path, TENSORS, shards=5)
    (folder / INDEX).unlink()
    assert inspect(folder).parameter_count == COUNT
    assert len(inspect(folder / "model-00002-of-00005.safetensors").tensors) == 2
    (folder / "model-00004-of-00005.safetensors").unlink()
    with pytest.raises(errors.NotFoundError, match="model-00004-of-00005"):
        inspect(folder)


def test_files_of_any_name_each_for_itself(tmp_path: Path) -> None:
    """Two adapters have tensors of the same names: what lies in two files stays apart."""
    packed = {"x.qweight": ("I32", (128, 12)), "x.scales": ("F16", (4, 96))}
    write_sparse(tmp_path / "a.safetensors", packed)
    write_sparse(tmp_path / "b.safetensors", {"x.qweight": ("I32", (64, 64))})
    found = inspect(tmp_path)
    assert found.sharded
    assert [(tensor.name, tensor.file, tensor.parameters) for tensor in found.tensors] == [
        ("x.weight", "a.safetensors", 128 * 96),
        ("x.qweight", "b.safetensors", 64 * 64),
    ]
    assert found.notes[0].startswith("no index and no model.safetensors")


def test_a_folder_without_weights_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(errors.NotFoundError, match=r"no \.safetensors or \.gguf file") as caught:
        inspect(tmp_path)
    assert (caught.value.hint or "").endswith("model.onnx is neither safetensors nor GGUF.")
    write_checkpoint(tmp_path / "other" / "unet")
    with pytest.raises(errors.NotFoundError) as caught:
        inspect(tmp_path / "other")
    assert (caught.value.hint or "").endswith("unet has some.")


def test_an_index_of_too_many_files(tmp_path: Path) -> None:
    """Behind a server each would be a request."""
    weight_map = {f"x{number}": f"{number}.safetensors" for number in range(10_001)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(errors.LimitExceededError, match="10,001 files"):
        inspect(tmp_path)


WRONG: list[tuple[str, str | None, type[errors.BlobStoreError], str]] = [
    ("ghost", SHARD, errors.CorruptDataError, "'ghost'"),
    ("layers.3.weight", None, errors.CorruptDataError, r"layers\.3\.weight"),
    ("x", "../x.safetensors", errors.DocumentError, "I1"),
    ("x", "absent.safetensors", errors.NotFoundError, "absent.safetensors"),
]


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    folder = write_sparse_folder(tmp_path, TENSORS, shards=2)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, file, kind, says in WRONG:
        places = {name: file for name, file in {**weight_map, name: file}.items() if file}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        with pytest.raises(kind, match=says):
            inspect(folder)


def test_damaged_files_are_refused_by_rule(tmp_path: Path) -> None:
    folder = write_sparse_folder(tmp_path, TENSORS, shards=2)
    (folder / INDEX).write_text("{" * 100)
    with pytest.raises(errors.DocumentError, match="I1"):
        inspect(folder)
    (folder / INDEX).unlink()
    write_sparse(folder / SHARD, {"layers.9.weight": ("F32", (3,))})
    with pytest.raises(errors.DocumentError, match=r"both hold the tensor 'layers\.9\.weight'"):
        inspect(folder)
    (folder / SHARD).write_bytes(b"{}")
    with pytest.raises(errors.HeaderError, match="F1"):
        inspect(folder)


def test_a_stored_model_has_the_metadata_of_its_source(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    source.write_bytes(
        safetensors_bytes(small_tensors(), {"format": "pt", "modelspec.title": "Tiny"})
    )
    blobstore.import_model(source, "m", store=store, quant="int4")
    found = inspect("m", store=store)
    assert found.metadata == {"format": "pt", "modelspec.title": "Tiny"}
    assert found.modelspec == {"title": "Tiny"}
    assert list(found.headers) == sorted(small_tensors())


def test_a_damaged_stored_model_is_refused_by_model_and_blob(store: Store) -> None:
    tensor = {"dtype": "U32", "shape": [4], "data_offsets": [0, 16]}
    data = raw_safetensors({"x": tensor, "__metadata__": {"quant_type": "int4"}}, b"0" * 16)
    blob = str(commit_model(store, "m", data).layers[0].digest)
    for kind in (errors.CorruptDataError, errors.NotFoundError):
        with pytest.raises(kind) as caught:
            inspect("m", store=store)
        assert (caught.value.model, caught.value.blob) == ("m:latest", blob)
        blob_path(store, data).unlink(missing_ok=True)


def test_a_filter_keeps_what_matches_with_its_parts(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store, quant="int4")
    everything = inspect("m", store=store)
    found = everything.only(["*.mlp.*", "lm_head*"])
    assert [tensor.name.split(".")[-2] for tensor in found.tensors] == [
        *("lm_head", "down_proj", "up_proj")
    ]
    assert found.parameters == 96 * 64 + 2 * 64 * 128
    held = {name for header in found.headers.values() for name in header.tensors}
    assert held == {part for tensor in found.tensors for part in tensor.parts}
    assert len(everything.only(["*q_proj*.scale"]).tensors) == 1
    assert everything.only(["nothing"]).bits_per_weight is None
    sharded = inspect(write_sparse_folder(tmp_path / "s", TENSORS, shards=3))
    index = sharded.only(["layers.[12].*"]).index
    assert index is not None
    assert set(index["weight_map"]) == {"layers.1.weight", "layers.2.weight"}
