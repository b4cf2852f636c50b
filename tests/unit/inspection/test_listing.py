"""list: headers of models never listed before are read; hints are not trusted over the store."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.gguf_files import model
from support.producers import COPIED, DECODED
from support.sparse import Tensors, write_sparse
from support.stores import blob_path, commit_model, gguf_by_hand, link_by_hand, stored_arrays

import blobstore
from blobstore.errors import CorruptDataError, UnsupportedSourceError
from blobstore.inspection.inspect import inspect
from blobstore.inspection.listing import BrokenModel, ListedModel, list_models, summarize
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store

A, B = (safetensors_bytes({name: np.zeros((3, n), np.float16)}) for n, name in enumerate("ab", 4))


def test_what_was_listed_once_is_remembered(store: Store) -> None:
    commit_model(store, "m", A, B)
    link_by_hand(store, "n", {"a": A})  # a manifest with spaces
    first = list_models(store)
    facts = [
        (str(one.name), one.parameters, one.quant_type)
        for one in first
        if isinstance(one, ListedModel)
    ]
    assert facts == [("m:latest", 27, "F16"), ("n:latest", 12, "F16")]
    store.copy(ModelName.parse("m"), ModelName.parse("o"))
    blob_path(store, A).write_bytes(bytes(len(A)))  # no header is read again
    assert list_models(open_store(store.root))[:2] == first
    assert all(isinstance(one, ListedModel) for one in list_models(store))


def test_it_says_what_the_headers_say(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    name = ModelName.parse("m")
    full, _ = summarize(store, name, store.manifest(name))
    for _ in range(2):
        (model,) = list_models(store)
        assert isinstance(model, ListedModel)
        for field in ("name", "id", "modified", "size", "parameters", "quant_type"):
            assert getattr(model, field) == getattr(full, field)


def test_models_of_ollama_are_gguf_files(store: Store) -> None:
    file = model("Q8_0", bytes(2 * 2 * 34), (2, 64)).raw
    gguf_by_hand(store, "m", file, "Q8_0")
    gguf_by_hand(store, "damaged", file[:-1], "Q4_K_M")
    for _ in range(2):  # the second time from notes
        facts = {
            str(one.name): (one.quant_type, one.parameters)
            for one in list_models(store)
            if isinstance(one, ListedModel)
        }
        assert facts == {"m:latest": ("GGUF Q8_0", 256), "damaged:latest": ("GGUF Q4_K_M", 0)}
    details, _ = summarize(store, ModelName.parse("m"), store.manifest("m"))
    assert (details.quant_type, details.parameters) == ("GGUF Q8_0", 256)
    with pytest.raises(UnsupportedSourceError, match="ollama run m:latest") as caught:
        blobstore.open_model("m", store=store)
    assert f"blobstore import {blob_path(store, file)} NAME" in str(caught.value.hint)


def test_a_blob_that_a_manifest_names_again_is_an_error(store: Store) -> None:
    """A manifest of 1 MB had room for 4,000 names: `inspect` took 500 MB."""
    link_by_hand(store, "m", {"a": A, "again": A})
    with pytest.raises(CorruptDataError, match="twice") as caught:
        blobstore.inspect("m", store=store)
    assert (caught.value.model, caught.value.tensor) == ("m:latest", "again")


def test_a_blob_that_goes_missing_or_comes_back_is_noticed(store: Store) -> None:
    commit_model(store, "m", A)
    path = blob_path(store, A)
    assert isinstance(list_models(store)[0], ListedModel)
    path.rename(path.with_name("away"))
    (model,) = list_models(store)
    assert isinstance(model, BrokenModel)
    assert (model.error.model, model.error.blob) == ("m:latest", path.name.replace("-", ":"))
    first = path.with_name(path.name.replace("-", ":"))  # as the first Ollamas named it
    path.with_name("away").rename(first)
    assert isinstance(list_models(store)[0], ListedModel)


def test_a_damaged_model_is_broken_and_named(store: Store) -> None:
    arrays, metadata = stored_arrays("x.weight", normal("x", 4, 64), "int4", 32)
    blob = safetensors_bytes(arrays, metadata)
    link_by_hand(store, "m", {"a": A, "x.weight": blob, "b": B})
    for damaged in (
        *(blob[:-1], bytes(len(blob)), blob.replace(b"weight.scale", b"weight.scalf")),
        blob.replace(b'"int4"', b'"int5"'),
    ):
        blob_path(store, blob).write_bytes(damaged)
        (model,) = list_models(store)
        assert isinstance(model, BrokenModel)
        assert isinstance(model.error, CorruptDataError | UnsupportedSourceError)
        assert model.error.model == "m:latest"


def test_without_a_cache_models_are_listed_too(store: Store, tmp_path: Path) -> None:
    link_by_hand(store, "m", {"a": A})
    (tmp_path / "outside").mkdir()
    place = store.root / ".blobstore"
    place.symlink_to(tmp_path / "outside")
    for _ in range(2):
        assert isinstance(list_models(store)[0], ListedModel)
    place.unlink()
    place.touch()
    assert isinstance(list_models(store)[0], ListedModel)
    assert list((tmp_path / "outside").iterdir()) == []


PLAIN = {"model.norm.weight": normal("n", 64), "model.embed_tokens.weight": normal("embed", 96, 64)}


@pytest.mark.parametrize("shape", [(128, 256), (4, 64, 128)], ids=["matrix", "experts"])
def test_quantized_weights_count_as_their_values(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for number, (name, kind) in enumerate({**COPIED, **DECODED}.items()):
        stored = [kind.make(f"model.layers.{layer}.mlp.up_proj", shape) for layer in range(2)]
        tensors = {**PLAIN, **stored[0].tensors, **stored[1].tensors}
        found = inspect(write_checkpoint(tmp_path / str(number), tensors, kind.config))
        plain = sum(array.size for array in PLAIN.values())
        assert found.parameters == plain + 2 * math.prod(shape), name
        packed = {tensor.name: tensor.shape for tensor in found.tensors if tensor.packing}
        assert packed == {one.name: shape for one in stored}
        (one,) = found.quantizations
        assert (one.tensors, one.parameters) == (2, 2 * math.prod(shape))
        assert one.type == ("fp8" if name in DECODED else stored[0].quant_type)
        assert one.group_size == (None if name in DECODED else stored[0].group_size)
        assert found.nbytes == sum(array.nbytes for array in tensors.values())
        assert found.notes == ()


@pytest.mark.parametrize(("quant", "experts"), [("int4", "packed"), ("nvfp4", "stacked")])
def test_a_model_counts_as_its_source(
    store: Store, tmp_path: Path, quant: str, experts: str
) -> None:
    tensors = small_tensors() | {
        f"model.layers.1.mlp.experts.{number}.{name}.weight": normal(f"{number}{name}", 64, 128)
        for number in range(3)
        for name in ("down_proj", "up_proj")
    }
    source = write_checkpoint(tmp_path / "m", tensors | {"scale": normal("scale").reshape(())})
    blobstore.import_model(source, "m", store=store, quant=quant, experts=experts)
    found = inspect("m", store=store)
    count = sum(array.size for array in tensors.values())
    assert (found.parameters, inspect(source).parameters) == (count, count)
    assert quant in {one.type for one in found.quantizations}
    assert {one.format for one in found.quantizations} == {"Ollama"}
    with blobstore.open_model("m", store=store) as model:
        assert model.parameters == found.parameters
        facts = [(tensor.name, tensor.shape) for tensor in found.tensors]
        assert facts == [(tensor.name, tensor.shape) for tensor in model.values()]


def test_buffers_masks_and_positions_count_as_they_are(tmp_path: Path) -> None:
    """GPT-NeoX: a mask of U8, and rank-0 tensors, which the Hub's counts leave out."""
    tensors: Tensors = {
        "attention.bias": ("U8", (1, 1, 2048, 2048)),
        "attention.masked_bias": ("F16", ()),
        "attention.rotary_emb.inv_freq": ("F16", (12,)),
        "embeddings.position_ids": ("I64", (1, 514)),
        "empty": ("F32", (0, 3)),
    }
    found = inspect(write_sparse(tmp_path / "m.safetensors", tensors))
    assert found.parameter_count == {"F16": 12, "I64": 514, "U8": 4_194_304}
    assert found.notes == ()
    assert len(found.tensors) == 5
