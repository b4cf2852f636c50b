"""Folders and files to import: shards, links, pipes, partial downloads, odd names and shapes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore import errors
from blobstore.names import ModelName
from blobstore.store.local.store import Store


def dangling(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("config.json", os.mkfifo),
        ("tokenizer.json", dangling),
        ("model.safetensors.index.json", dangling),
    ],
)
def test_a_file_of_the_checkpoint_that_can_not_be_read_is_not_left_out(
    store: Store, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A partial download is a folder with dangling links, which belong to the model."""
    source = write_checkpoint(tmp_path / "m")
    (source / name).unlink(missing_ok=True)
    make(source / name)
    with pytest.raises((errors.NotFoundError, errors.StorageError), match=name):
        blobstore.import_model(source, store=store)
    assert not store.root.exists()


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    data = (source / "model.safetensors").read_bytes()
    for number in (1, 2):
        (source / f"model-0000{number}-of-00002.safetensors").write_bytes(data)
    with pytest.raises(errors.UnsupportedSourceError, match=r"model\.safetensors"):
        blobstore.plan_import(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(errors.CorruptDataError, match="both hold"):
        blobstore.plan_import(source)


def cut(path: Path) -> None:
    path.write_bytes(safetensors_bytes(small_tensors())[:-1])


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (dangling, errors.NotFoundError, "model.safetensors"),
        (lambda path: path.symlink_to("/dev/zero"), errors.StorageError, "model.safetensors"),
        (Path.touch, errors.CorruptDataError, "model.safetensors"),
        (cut, errors.CorruptDataError, "model.safetensors"),
        (lfs_pointer, errors.CorruptDataError, "git-lfs"),
    ],
)
def test_weights_that_can_not_be_read_are_an_error_at_once(
    store: Store,
    tmp_path: Path,
    make: Callable[[Path], None],
    kind: type[errors.BlobStoreError],
    says: str,
) -> None:
    weights = write_checkpoint(tmp_path / "m") / "model.safetensors"
    weights.unlink()
    make(weights)
    for source in (tmp_path / "m", weights):
        with pytest.raises(kind, match=says):
            blobstore.import_model(source, "m", store=store)
    assert not store.root.exists()


@pytest.mark.parametrize("path", ["nowhere", "a" * 300, "a\0b", "\udcff/" + "x" * 300])
def test_a_path_where_no_file_can_be(path: str) -> None:
    with pytest.raises((errors.NotFoundError, errors.StorageError)):
        blobstore.plan_import(path)


@pytest.mark.parametrize("name", [b"\xff.json", b"new\nline.json", b"\xff.safetensors"])
def test_names_of_files_that_could_not_be_files_again(tmp_path: Path, name: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
    path.write_bytes(safetensors_bytes(small_tensors()) if b"safe" in name else b"{}")
    with pytest.raises(errors.UnsupportedSourceError, match="can't be stored"):
        blobstore.plan_import(path if b"safe" in name else folder)


def test_more_shards_than_files_may_be_open(tmp_path: Path, store: Store) -> None:
    (tmp_path / "m").mkdir()
    for number in range(40):
        path = tmp_path / "m" / f"model-{number + 1:05d}-of-00040.safetensors"
        path.write_bytes(safetensors_bytes({f"{number}.weight": normal(str(number), 4, 4)}))
    code = (
        "import resource, sys, blobstore\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, most))\n"
        "blobstore.import_model(sys.argv[1], 'm', store=blobstore.open_store(sys.argv[2]))\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m", store.root], check=True)
    with blobstore.open_model("m", store=store) as model:
        assert len(model) == 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("path", "quant", "name"),
    [
        ("llama-3.2", "q8", "llama-3.2:int8"),
        ("llama-3.2/../llama-3.2/.", None, "llama-3.2:latest"),
        ("llama-3.2/v1.5.safetensors", "mxfp4", "v1.5:mxfp4"),
    ],
)
def test_its_name(store: Store, tmp_path: Path, path: str, quant: str | None, name: str) -> None:
    folder = write_checkpoint(tmp_path / "llama-3.2")
    (folder / "v1.5.safetensors").symlink_to(folder / "model.safetensors")
    result = blobstore.import_model(f"{tmp_path}/{path}", store=store, quant=quant)
    assert [str(found) for found, _ in store.models()] == [str(result.name)] == [name]


@pytest.mark.parametrize("folder", ["with space", "é"])
def test_a_source_without_a_model_name_needs_one(store: Store, tmp_path: Path, folder: str) -> None:
    write_checkpoint(tmp_path / folder)
    for name in (None, "../x"):
        with pytest.raises(errors.InvalidNameError):
            blobstore.import_model(tmp_path / folder, name, store=store)
    assert not store.root.exists()
    text = blobstore.import_model(tmp_path / folder, "example.org/team/x:y", store=store)
    value = blobstore.import_model(tmp_path / folder, ModelName(model="z"), store=store)
    assert text.digest == value.digest


def test_imports_reuse_what_they_have_in_common(
    store: Store, source: Path, snapshot: Callable[[Store], dict[str, str]]
) -> None:
    first = blobstore.import_model(source, "m", store=store, quant="int4")
    before = snapshot(store)
    second = blobstore.import_model(source, "m", store=store, quant="int4")
    assert (second.created, second.reused, second.new_bytes) == (0, first.created, 0)
    assert (second.digest, second.stored_bytes) == (first.digest, first.stored_bytes)
    assert snapshot(store) == before
    other = blobstore.import_model(source, "m", store=store, quant="int8")
    # Embedding, norm, config.json; head and down_proj, which are int8 in both.
    assert other.reused == 5
    assert store.manifest(other.name).digest == other.digest  # the name is the new model's


@pytest.mark.parametrize(("quant", "experts"), [("int4", "stacked"), ("nvfp4", "packed")])
def test_odd_tensors_come_back(store: Store, tmp_path: Path, quant: str, experts: str) -> None:
    """Integers, scales of nothing, empty tensors, and names that quantized formats use."""
    group = "model.layers.0.mlp.experts"
    tensors = {f"{group}.{e}.up_proj.weight": normal(str(e), 32, 64) for e in range(2)}
    odd: dict[str, Any] = {
        f"{group}.map": np.arange(4, dtype=np.uint32),
        **{f"{group}.{e}.up_proj.bias": normal("b", 32) for e in range(2)},
        "x.weight": np.arange(64, dtype=np.uint32),
        "x.scale": np.ones(3, np.uint8),
        "y.weight": np.zeros((0, 64), np.float32),
        "stem_blocks": normal("s", 4, 8, dtype=np.float32),
    }
    source = write_checkpoint(tmp_path / "odd", tensors | odd)
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name, array in odd.items():
            assert bits(model[name].numpy()) == bits(array), name
