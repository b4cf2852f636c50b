"""Tensor: numpy and torch share the stored bytes, MLX equals them, rows equal the whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support import PYCODE, PYCODE_MOE
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import normal, raw_safetensors, safetensors_bytes
from support.stores import link_by_hand, stored_arrays

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import InvalidIndexError, UnsupportedSourceError, UsageError
from blobstore.formats.quant import QuantType
from blobstore.model.loader import Model
from blobstore.store.local.store import Store, open_store

Array = np.ndarray[Any, Any]
UP = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.up_proj.weight"
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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The small dense model in int4."""
    store = open_store(tmp_path_factory.mktemp("dense"))
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    with blobstore.open_model("m", store=store) as model:
        yield model


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The small mixture of experts, stacked to rank 3, in mxfp8."""
    store = open_store(tmp_path_factory.mktemp("stacked"))
    blobstore.import_model(PYCODE_MOE, "m", store=store, quant="mxfp8", experts="stacked")
    with blobstore.open_model("m", store=store) as model:
        yield model


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


def test_a_quantized_tensor_is_its_parts_in_every_library(dense: Model) -> None:
    parts = dense[UP].numpy()
    assert isinstance(parts, QuantizedArray)
    assert (parts.quant_type, parts.group_size, parts.shape) == (QuantType.INT4, 32, (768, 256))
    assert parts.bias is not None
    every = (parts.weight, parts.scale, parts.bias)
    assert [part.shape for part in every] == [(768, 32), (768, 8), (768, 8)]
    assert not any(part.flags.writeable for part in every)
    for other in (dense[UP].torch(), dense[UP].mlx()):
        assert other.quantization == parts.quantization
        assert bits_of_parts(other) == bits_of_parts(parts)
    assert dense[UP].torch().scale.data_ptr() == parts.scale.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dequantize_gives_new_arrays_rounded_to_a_dtype(dense: Model, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for tensor in (dense[UP], dense["model.norm.weight"]):
        array = tensor.dequantize(dtype)
        assert (array.dtype, array.shape, array.flags.writeable) == (kind, tensor.shape, True)
        assert array.tobytes() == tensor.dequantize().astype(kind).tobytes()
        with pytest.raises(UsageError):
            tensor.dequantize("int8")


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_rows_are_those_of_the_whole(dense: Model, name: str) -> None:
    tensor = dense[f"model.layers.0.{name}.weight"]
    indices: list[Any] = [
        *(-1, slice(None, None, -7), [4, 0, 4, -2], np.array([], np.int64), (slice(1, 3),)),
        *(np.arange(256) % 5 == 0, ..., np.s_[:: 2**40], (True, 1)),
    ]
    for index in indices:
        assert np.array_equal(tensor[index], tensor.dequantize()[index])
        assert tensor[index].dtype == np.float32


def test_rows_of_rank_3_and_no_columns(stacked: Model) -> None:
    tensor, mask = stacked[EXPERTS], np.eye(8, 128, dtype=bool)
    assert tensor.shape == (8, 128, 256)
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


@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_an_index_that_numpy_refuses_is_one_error(dense: Model, name: str) -> None:
    for index in REFUSED:
        with pytest.raises(InvalidIndexError) as caught:
            dense[name][index]
        assert isinstance(caught.value, IndexError)
        assert isinstance(caught.value, UsageError)
        assert caught.value.tensor == name


def test_what_a_library_can_not_hold_is_an_unsupported_source(store: Store) -> None:
    header = {
        "f4": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "e5m2": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [2, 4]},
        "f64": {"dtype": "F64", "shape": [1], "data_offsets": [4, 12]},
        "f32": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
        "wide": {"dtype": "F32", "shape": [2**31, 0], "data_offsets": [16, 16]},
    }
    link_by_hand(store, "m", {"all": raw_safetensors(header, bytes(16))})
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


def test_numpy_asarray(dense: Model) -> None:
    values = np.asarray(dense[UP])
    assert (values.astype(np.float32) == dense[UP].dequantize()).all()
    assert np.asarray(dense[UP], np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        dense[UP].__array__(copy=False)
    kept = dense["model.norm.weight"]
    assert np.shares_memory(np.asarray(kept), kept.numpy())
    assert np.array(kept).flags.writeable
