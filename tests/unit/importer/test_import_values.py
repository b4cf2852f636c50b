"""What an import does to values: casts are ml_dtypes', copies keep every bit, chunks leave no seam.

Bad weights are told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import QUANT_TYPES
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import BF16, normal, safetensors_bytes, write_checkpoint

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import NonFiniteWeightError, UnsupportedSourceError
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Snapshot = Callable[[Store], dict[str, str]]
CHUNK = 4 * 2**20
KINDS: dict[str, Any] = {
    "bfloat16": BF16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
W = "x.weight"


def imported(store: Store, folder: Path, tensors: dict[str, Array], **options: Any) -> Model:
    blobstore.import_model(write_checkpoint(folder / "m", tensors), "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("kind", [*KINDS.values(), np.dtype(np.float64)], ids=str)
def test_conversion_is_ml_dtypes_cast(store: Store, tmp_path: Path, kind: Any, to: str) -> None:
    values = normal("w", 31, 64, dtype=np.float32, scale=1.0).astype(kind)
    values[0, :8] = np.array(
        [np.inf, -np.inf, np.nan, 0.0, -0.0, 6e-8, -1e-7, 61440], np.float64
    ).astype(kind)
    tensor = imported(store, tmp_path, {W: values, "s": values[1, 1]}, dtype=to)[W]
    with np.errstate(over="ignore"):
        wanted = values.astype(KINDS[to])
    assert (plain(tensor).dtype, bits(plain(tensor))) == (KINDS[to], bits(wanted))


def test_conversion_leaves_what_is_no_float(store: Store, tmp_path: Path) -> None:
    tensors: dict[str, Array] = {
        "i64": np.arange(4),
        "u8": np.arange(4, dtype=np.uint8),
        "f8": normal("f", 4, dtype=ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 2), np.float32),
    }
    model = imported(store, tmp_path, tensors, dtype="bfloat16")
    assert {name: (plain(tensor).dtype, bits(plain(tensor))) for name, tensor in model.items()} == {
        name: (BF16 if name == "empty" else array.dtype, bits(array))
        for name, array in tensors.items()
    }


@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_conversion_comes_before_quantization(store: Store, tmp_path: Path, quant: str) -> None:
    values = normal("w", 32, 64, dtype=np.float32)
    parts = imported(store, tmp_path, {W: values}, dtype="float16", quant=quant)[W].numpy()
    assert bits_of_parts(parts) == bits_of_parts(
        blobstore.quantize(values.astype(np.float16), quant)
    )


def test_float64_can_be_quantized_when_it_is_converted(
    store: Store, tmp_path: Path, snapshot: Snapshot
) -> None:
    values = normal("w", 32, 64, dtype=np.float32).astype(np.float64)
    with pytest.raises(UnsupportedSourceError) as caught:
        imported(store, tmp_path, {W: values}, quant="int8")
    assert caught.value.tensor == W
    assert snapshot(store) == {}
    parts = imported(store, tmp_path, {W: values}, quant="int8", dtype="float32")[W].numpy()
    assert bits_of_parts(parts) == bits_of_parts(
        blobstore.quantize(values.astype(np.float32), "int8")
    )


@pytest.mark.parametrize(
    ("kind", "value", "to", "shown"),
    [
        (np.float32, 1e5, "float16", "100000"),
        (np.float32, -65520.0, "float16", "-65520"),
        (BF16, 1e5, "float16", "99840"),
        (np.float64, 1e39, "float32", "1e+39"),
        (np.float64, -1e39, "bfloat16", "-1e+39"),
        (np.float32, 3.4e38, "bfloat16", "3.39999"),
    ],
)
@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_value_that_does_not_fit_is_named(
    store: Store,
    tmp_path: Path,
    snapshot: Snapshot,
    kind: Any,
    value: float,
    to: str,
    shown: str,
    quant: str | None,
) -> None:
    values = np.zeros((40, 64), np.float64).astype(kind)
    values[0, 0], values[33, 7], values[34, 0] = np.nan if quant is None else 0, value, value
    with pytest.raises(UnsupportedSourceError) as caught:
        imported(store, tmp_path, {W: values}, dtype=to, quant=quant)
    assert (caught.value.tensor, caught.value.index) == (W, (33, 7))
    assert W in caught.value.message
    assert "[33, 7]" in caught.value.message
    assert shown in caught.value.message
    assert snapshot(store) == {}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_a_weight_that_is_not_finite_is_named(
    store: Store, tmp_path: Path, snapshot: Snapshot, quant: str, kind: Any, value: float
) -> None:
    values = normal("w", 32, 64, dtype=kind)
    values[17, 33] = value
    with pytest.raises(NonFiniteWeightError) as caught:
        imported(store, tmp_path, {W: values}, quant=quant)
    assert (caught.value.tensor, caught.value.index) == (W, (17, 33))
    assert caught.value.path == str(tmp_path / "m/model.safetensors")
    assert all(part in caught.value.message for part in (W, "[17, 33]", str(value)))
    assert snapshot(store) == {}


def test_the_index_counts_from_the_start_of_the_tensor_not_of_a_chunk(
    store: Store, tmp_path: Path
) -> None:
    values = np.zeros((5000, 512), np.float32)
    values[4321, 123] = np.nan
    with pytest.raises(NonFiniteWeightError) as caught:
        imported(store, tmp_path, {W: values}, quant="int4")
    assert caught.value.index == (4321, 123)
    values[4321, 123] = 1e6
    with pytest.raises(UnsupportedSourceError) as overflow:
        imported(store, tmp_path, {W: values}, dtype="float16")
    assert overflow.value.index == (4321, 123)
    values[4321, 123] = 3e38
    values[4321, 124] = -3e38
    with pytest.raises(UnsupportedSourceError) as group:
        imported(store, tmp_path, {W: values}, quant="int4")
    assert group.value.index == (4321, 96)


@pytest.mark.parametrize("method", ["minmax", "search"])
@pytest.mark.parametrize("kind", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("quant", ["int4", "int8"])
def test_a_group_that_overflows_its_scale_is_named_by_its_first_weight(
    store: Store, tmp_path: Path, snapshot: Snapshot, quant: str, kind: Any, method: str
) -> None:
    values = normal("w", 40, 256).astype(kind)
    for row, column in ((39, 200), (33, 71), (33, 7)):  # the last, then others before it
        values[row, [column, column + 1]] = 3e38, -2e38
        with pytest.raises(UnsupportedSourceError) as caught:
            imported(store, tmp_path, {W: values}, quant=quant, group_size=64, method=method)
        assert (caught.value.tensor, caught.value.index) == (W, (row, column // 64 * 64))
        dtype = "F32" if kind is np.float32 else "BF16"
        what = f"is the first of a group that spans more than {dtype} can scale"
        assert what in caught.value.message
    values[39, 255] = np.nan
    with pytest.raises(NonFiniteWeightError) as behind:
        imported(store, tmp_path, {W: values}, quant=quant, group_size=64, method=method)
    assert behind.value.index == (39, 255)
    assert snapshot(store) == {}


def test_a_bad_weight_of_a_stacked_expert_is_named_as_in_its_file(
    store: Store, tmp_path: Path
) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{e}.up_proj.weight": normal(str(e), 32, 64) for e in range(3)
    }
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"][5, 6] = np.nan
    for experts in ("packed", "stacked"):
        with pytest.raises(NonFiniteWeightError) as caught:
            imported(store, tmp_path, tensors, quant="int8", experts=experts)
        assert (caught.value.tensor, caught.value.index) == (
            "model.layers.0.mlp.experts.2.up_proj.weight",
            (5, 6),
        )


@pytest.mark.parametrize("options", [{}, {"dtype": "same"}, {"quant": "int4"}])
def test_copies_keep_every_bit_of_a_nan(
    store: Store, tmp_path: Path, options: dict[str, str]
) -> None:
    patterns = {
        "float32": np.array(
            [0x7FC12345, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x80000000, 1], np.uint32
        ).view(np.float32),
        "bfloat16": np.array([0x7FC1, 0xFFC1, 0x7F81, 0xFFBF, 0x8000, 1], np.uint16).view(BF16),
        "float16": np.array([0x7E01, 0xFE01, 0x7C01, 0xFDFF, 0x8000, 1], np.uint16).view(
            np.float16
        ),
    }
    for name, array in patterns.items():
        chosen = {key: name if value == "same" else value for key, value in options.items()}
        good = {"other.weight": normal("o", 32, 64, dtype=array.dtype)}
        tensor = imported(store, tmp_path, {"norm.weight": array, **good}, **chosen)["norm.weight"]
        assert bits(tensor.numpy()) == bits(array)


@pytest.mark.parametrize("kind", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_a_tensor_of_several_chunks_is_quantized_as_one(
    store: Store, tmp_path: Path, quant: str, kind: Any
) -> None:
    values = normal("big", 2 * CHUNK // kind.itemsize // 192 + 7, 192, dtype=kind)
    assert values.nbytes > 2 * CHUNK
    assert CHUNK % (192 * kind.itemsize) != 0, "a chunk ends inside a row"
    parts = imported(store, tmp_path, {W: values}, quant=quant)[W].numpy()
    assert isinstance(parts, QuantizedArray)
    wanted = blobstore.quantize(values, quant)
    assert bits_of_parts(parts) == bits_of_parts(wanted)


def test_a_tensor_of_several_chunks_is_copied_and_converted_as_one(
    store: Store, tmp_path: Path
) -> None:
    values = normal("big", CHUNK // 4 + 12_345, dtype=np.float32)
    assert bits(imported(store, tmp_path, {W: values})[W].numpy()) == bits(values)
    assert bits(imported(store, tmp_path, {W: values}, dtype="bfloat16")[W].numpy()) == bits(
        values.astype(BF16)
    )


def test_types_that_numpy_does_not_have_are_copied(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    header = safetensors_bytes({"f4": np.frombuffer(data, np.uint8)})
    file = header.replace(b'"U8", "shape": [768]', b'"F4", "shape": [1536]'.ljust(20))
    length = int.from_bytes(file[:8], "little") + len(file) - len(header)
    (tmp_path / "f4.safetensors").write_bytes(length.to_bytes(8, "little") + file[8:])
    blobstore.import_model(tmp_path / "f4.safetensors", store=store, dtype="bfloat16")
    assert bytes(blobstore.open_model("f4", store=store)["f4"].raw()) == data
