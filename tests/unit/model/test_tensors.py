"""Tensor: numpy and torch share the stored bytes, MLX equals them, rows equal the whole."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support import PYCODE, PYCODE_MOE
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import normal, raw_safetensors, safetensors_bytes, write_checkpoint
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
    "f32": normal("f32", 4, 6, dtype=np.float32),
    "i64": np.arange(-3, 3, dtype=np.int64).reshape(2, 3),
    "i32": np.arange(-3, 3, dtype=np.int32),
    "u32": np.arange(5, dtype=np.uint32),
    "u8": np.arange(7, dtype=np.uint8),
    "f8": normal("f8", 3, 5, dtype=ml_dtypes.float8_e4m3fn, scale=1.0),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
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


def owner(array: Array) -> type:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    return type(base)


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_numpy_is_a_read_only_view(
    every_dtype: Model, name: str, request: pytest.FixtureRequest
) -> None:
    how = request.node.callspec.params["every_dtype"]
    array, wanted = every_dtype[name].numpy(), EVERY_DTYPE[name]
    assert isinstance(array, np.ndarray)
    assert (array.dtype, array.shape, bits(array)) == (wanted.dtype, wanted.shape, bits(wanted))
    assert not array.flags.owndata
    assert array.size == 0 or owner(array) is {"read": bytes, "mapped": mmap.mmap}[how]
    assert array.size == 0 or np.shares_memory(array, every_dtype[name].numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_raw_is_the_stored_bytes(every_dtype: Model, name: str) -> None:
    raw = every_dtype[name].raw()
    assert bytes(raw) == bits(EVERY_DTYPE[name])
    assert raw.readonly


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_torch_shares_the_map(every_dtype: Model, name: str) -> None:
    tensor, array = every_dtype[name].torch(), plain(every_dtype[name])
    assert (tuple(tensor.shape), bits(tensor)) == (array.shape, bits(array))
    assert str(tensor.dtype).removeprefix("torch.") == str(array.dtype)
    assert array.size == 0 or tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("name", EVERY_DTYPE)
def test_mlx_has_the_same_bits(every_dtype: Model, name: str) -> None:
    array, wanted = every_dtype[name].mlx(), EVERY_DTYPE[name]
    assert (tuple(array.shape), bits(array)) == (wanted.shape, bits(wanted))
    assert str(array.dtype).removeprefix("mlx.core.") == (
        "uint8" if name == "f8" else str(wanted.dtype)
    )


def test_bool_in_all_libraries(store: Store) -> None:
    header = {"mask": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}
    link_by_hand(store, "m", {"mask": raw_safetensors(header, b"\1\0\1")})
    mask = blobstore.open_model("m", store=store)["mask"]
    assert (
        plain(mask).tolist() == mask.torch().tolist() == mask.mlx().tolist() == [True, False, True]
    )


def test_arrays_that_begin_at_odd_addresses(store: Store) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    link_by_hand(
        store, "m", {"a": raw_safetensors(header, b"\7" + np.array([1, 2], np.float32).tobytes())}
    )
    b = blobstore.open_model("m", store=store)["b"]
    assert (
        plain(b).tolist()
        == b.torch().tolist()
        == b.mlx().tolist()
        == b.dequantize().tolist()
        == [1, 2]
    )


def test_quantized_arrays_that_begin_at_odd_addresses(store: Store) -> None:
    parts, metadata = stored_arrays("w", normal("w", 4, 64), "int4")
    link_by_hand(
        store, "m", {"w": safetensors_bytes({"a": np.ones(1, np.uint8), **parts}, metadata)}
    )
    w = blobstore.open_model("m", store=store)["w"]
    assert bits_of_parts(w.mlx()) == bits_of_parts(w.torch()) == bits_of_parts(w.numpy())
    assert np.array_equal(
        w.dequantize(), blobstore.dequantize(blobstore.quantize(normal("w", 4, 64), "int4"))
    )


def test_a_quantized_tensor_is_its_parts_in_every_library(dense: Model) -> None:
    parts = dense[UP].numpy()
    assert isinstance(parts, QuantizedArray)
    assert (parts.quant_type, parts.group_size, parts.shape) == (QuantType.INT4, 32, (768, 256))
    assert (parts.weight.dtype, parts.weight.shape) == (np.uint32, (768, 32))
    assert (parts.scale.dtype, parts.scale.shape) == (ml_dtypes.bfloat16, (768, 8))
    assert parts.bias is not None
    assert (parts.bias.dtype, parts.bias.shape, parts.global_scale) == (
        ml_dtypes.bfloat16,
        (768, 8),
        None,
    )
    assert not any(part.flags.writeable for part in (parts.weight, parts.scale, parts.bias))
    for other in (dense[UP].torch(), dense[UP].mlx()):
        assert isinstance(other, QuantizedArray)
        assert other.quantization == parts.quantization
        assert bits_of_parts(other) == bits_of_parts(parts)
    assert dense[UP].torch().scale.data_ptr() == parts.scale.ctypes.data


def test_array_takes_the_library_by_name(dense: Model) -> None:
    norm = dense["model.norm.weight"]
    assert isinstance(norm.array("numpy"), np.ndarray)
    assert isinstance(norm.array("torch"), torch.Tensor)
    with pytest.raises(UsageError, match="jax"):
        norm.array("jax")  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dequantize_rounds_float32_values_to_a_dtype(dense: Model, dtype: str) -> None:
    kind = np.dtype(
        {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    )
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        array = dense[name].dequantize(dtype)
        assert array.dtype == kind
        assert array.tobytes() == dense[name].dequantize().astype(kind).tobytes()
        array[...] = 0
        with pytest.raises(UsageError):
            dense[name].dequantize("int8")


def test_dequantize_gives_new_float32_arrays(dense: Model) -> None:
    for name in (UP, "model.norm.weight"):
        array = dense[name].dequantize()
        assert (array.dtype, array.shape, array.flags.writeable) == (
            np.float32,
            dense[name].shape,
            True,
        )


ROWS: list[Any] = [
    0,
    -1,
    np.int64(5),
    slice(3, 9),
    slice(None, None, -7),
    slice(5, 5),
    [4, 0, 4, -2],
    np.array([], np.int64),
    np.array([1, 200]),
    (2,),
    (slice(1, 3),),
    np.arange(256) % 5 == 0,
    ...,
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"]
)
def test_rows_are_those_of_the_whole(dense: Model, name: str, rows: Any) -> None:
    tensor = dense[name]
    assert np.array_equal(tensor[rows], tensor.dequantize()[rows])
    assert tensor[rows].dtype == np.float32


@pytest.mark.parametrize("rows", [0, slice(3, 5), [4, 0], (1, 2), (slice(None), -1)], ids=str)
def test_any_index_of_an_unquantized_tensor(dense: Model, rows: Any) -> None:
    embedding = dense["model.embed_tokens.weight"]
    assert bits(embedding[rows]) == bits(plain(embedding)[rows])


def test_rows_of_an_unquantized_tensor_are_a_view(dense: Model) -> None:
    embedding = dense["model.embed_tokens.weight"]
    assert np.shares_memory(embedding[3:5], embedding.numpy())
    assert not embedding[3:5].flags.writeable


@pytest.mark.parametrize(
    "rows",
    [
        0,
        -8,
        slice(2, 6, 2),
        [7, 0],
        (3,),
        (3, 5),
        (slice(1, 3), 0),
        (slice(None), [1, 2]),
        ([0, 1], [5, 6]),
        (-1, slice(4, 8)),
        (0, ...),
        np.eye(8, 128, dtype=bool),
    ],
)
def test_rows_of_rank_3(stacked: Model, rows: Any) -> None:
    tensor = stacked[EXPERTS]
    assert tensor.shape == (8, 128, 256)
    assert np.array_equal(tensor[rows], tensor.dequantize()[rows])


@pytest.mark.parametrize(
    "index",
    [(0, 0, 0), (0, 0, slice(0, 8)), (..., 0), (..., slice(0, 32)), (slice(None), ..., 0)],
    ids=str,
)
def test_quantized_columns_are_refused(stacked: Model, index: Any) -> None:
    with pytest.raises(InvalidIndexError, match="invalid index"):
        stacked[EXPERTS][index]


def test_columns_where_a_row_is_one_group_are_refused_too(store: Store) -> None:
    arrays, metadata = stored_arrays("w", normal("w", 2, 4, 64), "int8", 64)
    link_by_hand(store, "m", {"w": safetensors_bytes(arrays, metadata)})
    with pytest.raises(UsageError):
        blobstore.open_model("m", store=store)["w"][..., 0:16]


def test_what_a_library_can_not_hold_is_an_unsupported_source(store: Store) -> None:
    header = {
        "f4": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "e5m2": {"dtype": "F8_E5M2", "shape": [2], "data_offsets": [2, 4]},
        "f64": {"dtype": "F64", "shape": [1], "data_offsets": [4, 12]},
        "wide": {"dtype": "F32", "shape": [2**31, 0], "data_offsets": [12, 12]},
    }
    link_by_hand(store, "m", {"all": raw_safetensors(header, bytes(12))})
    model = blobstore.open_model("m", store=store)
    refused: tuple[tuple[str, Any], ...] = (
        ("f4", "numpy"),
        ("f4", "torch"),
        ("f4", "mlx"),
        ("e5m2", "mlx"),
        ("f64", "mlx"),
        ("wide", "mlx"),
    )
    for name, library in refused:
        with pytest.raises(UnsupportedSourceError):
            model[name].array(library)
    assert bytes(model["f4"].raw()) == bytes(2)
    assert plain(model["f64"]).tolist() == model["f64"].torch().tolist() == [0]
    assert model["e5m2"].torch().dtype is torch.float8_e5m2
    with pytest.raises(UnsupportedSourceError):
        model.arrays("mlx")


def test_mlx_gives_an_array_that_lies_beside_one_it_can_not_hold(store: Store) -> None:
    tensors = {"f32": np.arange(4, dtype=np.float32), "f64": np.arange(3.0)}
    link_by_hand(store, "m", {"both": safetensors_bytes(tensors)})
    assert blobstore.open_model("m", store=store)["f32"].mlx().tolist() == [0, 1, 2, 3]


REFUSED = {
    "a step of zero": np.s_[::0],
    "beyond the end": 10**6,
    "beyond 64 bits": 2**70,
    "before the beginning": -(10**6),
    "a float": 1.5,
    "text": "rows",
    "a slice of text": slice("rows"),
    "a ragged list": [[0], [0, 1]],
    "a mask of another length": np.zeros(3, bool),
    "an object": object(),
    "65 new axes": (None,) * 65,
}


@pytest.mark.parametrize("index", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
def test_an_index_that_numpy_refuses_is_one_error(dense: Model, name: str, index: Any) -> None:
    with pytest.raises(InvalidIndexError, match="invalid index of") as caught:
        dense[name][index]
    assert isinstance(caught.value, IndexError)
    assert isinstance(caught.value, UsageError)
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    "index", [np.s_[:: 2**40], np.s_[:: -(2**40)], np.s_[2**40 :], True, (True, 1), []], ids=str
)
def test_odd_indices_select_what_numpy_selects(dense: Model, index: Any) -> None:
    np.testing.assert_array_equal(dense[UP][index], dense[UP].dequantize()[index])


def test_rows_are_iterated_to_their_end(dense: Model) -> None:
    norm: Any = dense["model.norm.weight"]  # mypy does not know iteration by __getitem__
    assert sum(1 for _ in norm) == norm.shape[0]


@pytest.mark.parametrize("quant", [None, "int8"])
def test_numpy_asarray(quant: str | None, store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store, quant=quant)
    with blobstore.open_model("m", store=store) as model:
        for tensor in model.values():
            values = np.asarray(tensor)
            assert values.shape == tensor.shape
            assert (values.astype(np.float32) == tensor.dequantize()).all()
            assert np.asarray(tensor, np.float64).dtype == np.float64
            assert np.array(tensor).flags.writeable
            if tensor.quant_type is None:
                assert not values.flags.writeable
                assert np.shares_memory(values, tensor.numpy())
            else:
                with pytest.raises(ValueError, match="without a copy"):
                    tensor.__array__(copy=False)
