"""open_model: a mapping of tensors by name, arrays for three libraries, their lifetime."""

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import commit_model, link_by_hand, open_files, stored_arrays

import blobstore
from blobstore.errors import NotFoundError, TensorNotFoundError, UsageError
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import QuantType
from blobstore.model.loader import Model
from blobstore.store.local.store import Store, open_store

Array = np.ndarray[Any, Any]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pycode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The small dense model in int4."""
    store = open_store(tmp_path_factory.mktemp("pycode"))
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store, verify=True) as model:
        yield model


@pytest.fixture(scope="module")
def source() -> Mapping[str, Array]:
    """The weights that `pycode` was made of, read by the reference library."""
    return load_file(PYCODE / "model.safetensors")


def test_names_shapes_and_types_are_the_sources(pycode: Model, source: Mapping[str, Array]) -> None:
    assert set(pycode) == set(source)
    for name, tensor in pycode.items():
        assert (tensor.name, tensor.shape) == (name, source[name].shape)
        is_kept = "norm" in name or "embed" in name
        assert tensor.dtype is (DType.BF16 if is_kept else DType.U32)
        assert (tensor.quant_type is None) == is_kept
    assert (pycode[UP].quant_type, pycode[UP].group_size) == (QuantType.INT4, 32)
    assert pycode.parameters == sum(array.size for array in source.values()) == 5_245_696


def test_it_is_a_mapping_in_manifest_order(pycode: Model, source: Mapping[str, Array]) -> None:
    assert isinstance(pycode, Mapping)
    assert list(pycode) == sorted(source)
    assert not any(name in pycode for name in (f"{UP}.scale", "nothing", 3, None))
    with pytest.raises(KeyError) as caught:
        pycode["nothing"]
    assert isinstance(caught.value, TensorNotFoundError)
    assert (caught.value.tensor, caught.value.model) == ("nothing", "m:latest")


def test_documents_and_config(pycode: Model) -> None:
    documents = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert pycode.documents() == [*documents, "blobstore.json"]
    for name in documents:
        assert pycode.document(name) == (PYCODE / name).read_bytes()
    assert (pycode.config.model_format, pycode.config.file_type) == ("safetensors", "int4")
    with pytest.raises(NotFoundError):
        pycode.document("absent.json")


FLAT_NAMES = {
    "ollama": [UP, f"{UP}_scale", f"{UP}_qbias"],
    "mlx": [UP, "model.layers.0.mlp.up_proj.scales", "model.layers.0.mlp.up_proj.biases"],
}


@pytest.mark.parametrize(
    ("library", "names"), [("numpy", "ollama"), ("torch", "mlx"), ("mlx", "mlx")]
)
def test_arrays_are_flat_and_named_as_asked(pycode: Model, library: Any, names: Any) -> None:
    arrays = pycode.arrays(library, names=names)
    assert [name for name in arrays if ".0.mlp.up_proj" in name] == FLAT_NAMES[names]
    quantized = sum(tensor.quant_type is not None for tensor in pycode.values())
    assert len(arrays) == len(pycode) + 2 * quantized
    assert type(arrays[UP]).__module__.startswith(library)
    assert [bits(arrays[name]) for name in FLAT_NAMES[names]] == bits_of_parts(pycode[UP].numpy())


def test_tensors_named_like_companions_are_named_as_the_runner_names_them(store: Store) -> None:
    names = ["router.proj.weight", "router.scale", "ln.scale", "ln.bias", "x.bias", "scale"]
    link_by_hand(store, "m", {"all": safetensors_bytes({name: normal(name, 4) for name in names})})
    model = blobstore.open_model("m", store=store)
    renamed = {"router.scale": "router_scale", "ln.scale": "ln_scale", "ln.bias": "ln_qbias"}
    assert set(model.arrays()) == {renamed.get(name, name) for name in names}
    assert np.array_equal(model.arrays()["ln_qbias"], plain(model["ln.bias"]))
    assert set(model.arrays(names="mlx")) == set(names)


@pytest.mark.parametrize(("other", "names"), [("x.biases", "mlx"), ("x.weight_scale", "ollama")])
def test_arrays_keep_both_of_the_same_flat_name(store: Store, other: str, names: Any) -> None:
    arrays, metadata = stored_arrays("x.weight", normal("x", 4, 64), "int8")
    blobs = {
        "x.weight": safetensors_bytes(arrays, metadata),
        other: safetensors_bytes({other: np.ones(3, np.float32)}),
    }
    link_by_hand(store, "m", blobs)
    with pytest.raises(blobstore.BlobStoreError, match=other):
        blobstore.open_model("m", store=store).arrays(names=names)


@pytest.mark.usefixtures("mapped")
def test_arrays_outlive_the_removal_of_the_model(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), store=store, quant="int8")
    model = blobstore.open_model("m:int8", store=store)
    lazy = model["lm_head.weight"].mlx().weight
    held = model.arrays("torch")
    wanted = {name: array.copy() for name, array in model.arrays("numpy").items()}
    assert store.remove(model.name).reason is None
    assert list((store.root / "blobs").iterdir()) == []
    assert all(bits(array) == bits(wanted[name]) for name, array in held.items())
    assert all(bits(array) == bits(wanted[name]) for name, array in model.arrays("numpy").items())
    assert bits(lazy) == bits(wanted["lm_head.weight"])
    assert bits(model[UP].mlx().weight) == bits(wanted[UP])


def test_after_close_arrays_stay_and_no_new_ones_come(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), store=store)
    with blobstore.open_model("m", store=store) as model:
        held = model[UP].numpy()
    assert bits(held) == bits(small_tensors()[UP])
    with pytest.raises(TensorNotFoundError):
        model[UP]
    for use in (model.arrays, model.verify):
        with pytest.raises(UsageError, match="is closed"):
            use()
    model.close()


def model_of_400_blobs(store: Store) -> Model:
    blobs = (safetensors_bytes({f"t{n}": np.array([n], np.int64)}) for n in range(400))
    commit_model(store, "m", *blobs)
    return blobstore.open_model("m", store=store)


def test_small_blobs_are_not_mapped(store: Store) -> None:
    """A model may have 110,000 blobs, and Linux allows 65,530 maps."""
    before = open_files()
    with model_of_400_blobs(store) as model:
        arrays = model.arrays("mlx")
        assert open_files() == before
    assert [arrays[f"t{n}"].item() for n in range(400)] == list(range(400))


@pytest.mark.usefixtures("mapped")
def test_a_model_may_have_more_blobs_than_a_process_may_have_files_open(store: Store) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with model_of_400_blobs(store) as model:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 100, before[1]))
        try:
            assert [int(plain(model[f"t{n}"])[0]) for n in range(400)] == list(range(400))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
