"""open_model: a mapping of tensors by name, arrays for three libraries, their lifetime."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support import PYCODE
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import (
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.sparse import Tensor, header
from support.stores import commit_model, files_may_be_open, link_by_hand, open_files, stored_arrays

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import (
    InvalidIndexError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.formats.dtypes import DType, QuantType
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
    arrays[other] = np.ones(3, np.float32)
    link_by_hand(store, "m", {"all": safetensors_bytes(arrays, metadata)})
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
    with model_of_400_blobs(store) as model:
        arrays = model.arrays("mlx")
        assert not open_files(store.root)
    assert [arrays[f"t{n}"].item() for n in range(400)] == list(range(400))


@pytest.mark.usefixtures("mapped")
def test_a_model_may_have_more_blobs_than_a_process_may_have_files_open(store: Store) -> None:
    with model_of_400_blobs(store) as model, files_may_be_open(400):
        assert [int(plain(model[f"t{n}"])[0]) for n in range(400)] == list(range(400))


EVERY_DTYPE: dict[str, Array] = {
    "bf16": normal("bf16", 4, 6),
    "f16": normal("f16", 4, 6, dtype=np.float16),
    "i64": np.arange(-3, 3, dtype=np.int64).reshape(2, 3),
    "u32": np.arange(5, dtype=np.uint32),
    "u8": np.arange(7, dtype=np.uint8),
    "f8": normal("f8", 3, 5, dtype=ml_dtypes.float8_e4m3fn, scale=1.0),
    "scalar": np.array(3.5, np.float32),
    "empty_bf16": normal("e", 3, 0),
}


@pytest.fixture(params=["read", "mapped"])
def every_dtype(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model with a tensor of every common dtype, imported without quantization."""
    if request.param == "mapped":
        request.getfixturevalue("mapped")
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(EVERY_DTYPE))
    blobstore.import_model(tmp_path / "m.safetensors", store=store)
    with blobstore.open_model("m", store=store) as model:
        yield model


def test_numpy_is_a_read_only_view_of_the_bits_in_torch_and_mlx(every_dtype: Model) -> None:
    for name, wanted in EVERY_DTYPE.items():
        array, raw = plain(every_dtype[name]), every_dtype[name].raw()
        torched, mlx = (every_dtype[name].array(library) for library in ("torch", "mlx"))
        assert (array.dtype, array.shape, bits(array)) == (wanted.dtype, wanted.shape, bits(wanted))
        assert (bytes(raw), raw.readonly) == (bits(wanted), True)
        assert not array.flags.owndata
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        assert array.size == 0 or torched.data_ptr() == array.ctypes.data
        for other in (torched, mlx):
            assert (tuple(other.shape), bits(other)) == (wanted.shape, bits(wanted))
        dtype = "uint8" if name == "f8" else str(wanted.dtype)
        assert str(mlx.dtype).removeprefix("mlx.core.") == dtype


def test_arrays_that_begin_at_odd_addresses(store: Store) -> None:
    parts, metadata = stored_arrays("w", normal("w", 4, 64), "int4")
    arrays: dict[str, Any] = {"a": np.ones(1, np.uint8), "b": np.array([1, 2], np.float32), **parts}
    link_by_hand(store, "m", {"all": safetensors_bytes(arrays, metadata)})
    model = blobstore.open_model("m", store=store)
    b, w = model["b"], model["w"]
    for array in (plain(b), b.torch(), b.mlx(), b.dequantize()):
        assert array.tolist() == [1, 2]
    assert bits_of_parts(w.mlx()) == bits_of_parts(w.torch()) == bits_of_parts(w.numpy())
    wanted = blobstore.dequantize(blobstore.quantize(normal("w", 4, 64), "int4"))
    assert np.array_equal(w.dequantize(), wanted)


def test_a_quantized_tensor_is_its_parts_in_every_library(pycode: Model) -> None:
    parts = pycode[UP].numpy()
    assert isinstance(parts, QuantizedArray)
    assert (parts.quant_type, parts.group_size, parts.shape) == (QuantType.INT4, 32, (768, 256))
    assert parts.bias is not None
    every = (parts.weight, parts.scale, parts.bias)
    assert [part.shape for part in every] == [(768, 32), (768, 8), (768, 8)]
    assert not any(part.flags.writeable for part in every)
    for other in (pycode[UP].torch(), pycode[UP].mlx()):
        assert other.quantization == parts.quantization
        assert bits_of_parts(other) == bits_of_parts(parts)
    assert pycode[UP].torch().scale.data_ptr() == parts.scale.ctypes.data


def test_dequantize_gives_new_arrays_rounded_to_a_dtype(pycode: Model) -> None:
    kinds: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    kinds["bfloat16"] = ml_dtypes.bfloat16
    for tensor in (pycode[UP], pycode["model.norm.weight"]):
        for dtype, kind in kinds.items():
            array = tensor.dequantize(dtype)
            assert (array.dtype, array.shape, array.flags.writeable) == (kind, tensor.shape, True)
            assert array.tobytes() == tensor.dequantize().astype(kind).tobytes()
        with pytest.raises(UsageError):
            tensor.dequantize("int8")


def test_rows_are_those_of_the_whole(pycode: Model) -> None:
    tensor = pycode["model.layers.0.self_attn.q_proj.weight"]
    indices: list[Any] = [
        *(-1, slice(None, None, -7), [4, 0, 4, -2], np.array([], np.int64), (slice(1, 3),)),
        *(np.arange(256) % 5 == 0, ..., np.s_[:: 2**40], (True, 1)),
    ]
    for index in indices:
        assert np.array_equal(tensor[index], tensor.dequantize()[index])
        assert tensor[index].dtype == np.float32


def test_rows_of_rank_3_and_no_columns(store: Store) -> None:
    arrays, metadata = stored_arrays("experts", normal("experts", 8, 128, 64), "mxfp8")
    link_by_hand(store, "m", {"experts": safetensors_bytes(arrays, metadata)})
    tensor, mask = blobstore.open_model("m", store=store)["experts"], np.eye(8, 128, dtype=bool)
    assert tensor.shape == (8, 128, 64)
    indices: list[Any] = [-8, [7, 0], (slice(1, 3), 0), ([0, 1], [5, 6]), (0, ...), mask]
    for index in indices:
        assert np.array_equal(tensor[index], tensor.dequantize()[index])
    columns: list[Any] = [(0, 0, slice(0, 8)), (..., 0), (slice(None), ..., 0)]
    for index in columns:
        with pytest.raises(InvalidIndexError):
            tensor[index]


REFUSED: list[Any] = [
    *(np.s_[::0], 10**6, 2**70, 1.5, "rows", [[0], [0, 1]], np.zeros(3, bool), (None,) * 65)
]


def test_an_index_that_numpy_refuses_is_one_error(pycode: Model) -> None:
    for name, index in product((UP, "model.norm.weight"), REFUSED):
        with pytest.raises(InvalidIndexError) as caught:
            pycode[name][index]
        assert isinstance(caught.value, IndexError)
        assert isinstance(caught.value, UsageError)
        assert caught.value.tensor == name


def test_what_a_library_can_not_hold_is_an_unsupported_source(store: Store) -> None:
    tensors: dict[str, Tensor] = {"f4": ("F4", (4,)), "e5m2": ("F8_E5M2", (2,))}
    tensors |= {"f64": ("F64", (1,)), "f32": ("F32", (1,)), "wide": ("F32", (2**31, 0))}
    entries, nbytes = header(tensors)
    link_by_hand(store, "m", {"all": raw_safetensors(entries, bytes(nbytes))})
    model = blobstore.open_model("m", store=store)
    refused: tuple[tuple[str, Any], ...] = (
        *(("f4", "numpy"), ("f4", "torch"), ("f4", "mlx")),
        *(("e5m2", "mlx"), ("f64", "mlx"), ("wide", "mlx")),
    )
    for name, library in refused:
        with pytest.raises(UnsupportedSourceError):
            model[name].array(library)
    assert bytes(model["f4"].raw()) == bytes(2)
    assert plain(model["f64"]).tolist() == model["f64"].torch().tolist() == [0]
    assert model["f32"].mlx().tolist() == [0]
    assert model["e5m2"].torch().dtype is torch.float8_e5m2
    with pytest.raises(UnsupportedSourceError):
        model.arrays("mlx")
    with pytest.raises(UsageError, match="jax"):
        model["f32"].array("jax")  # type: ignore[arg-type]  # refused


def test_numpy_asarray(pycode: Model) -> None:
    values = np.asarray(pycode[UP])
    assert (values.astype(np.float32) == pycode[UP].dequantize()).all()
    assert np.asarray(pycode[UP], np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        pycode[UP].__array__(copy=False)
    kept = pycode["model.norm.weight"]
    assert np.shares_memory(np.asarray(kept), kept.numpy())
    assert np.array(kept).flags.writeable
