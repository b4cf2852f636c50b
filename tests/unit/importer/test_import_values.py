"""What an import does to values: casts are ml_dtypes', copies keep every bit, chunks leave no seam.

Bad weights are named by their tensor and index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits, bits_of_parts, plain
from support.checkpoints import BF16, normal, raw_safetensors, write_checkpoint
from support.chunks import chunks_of

import blobstore
from blobstore.errors import BlobStoreError, NonFiniteWeightError, UnsupportedSourceError
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
W = "x.weight"


def imported(store: Store, folder: Path, tensors: dict[str, Array], **options: Any) -> Model:
    source = write_checkpoint(folder / "m", tensors)
    with chunks_of(8192):
        blobstore.import_model(source, "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


@pytest.mark.parametrize(
    ("kind", "to"),
    [(BF16, "float16"), (BF16, "float32"), (F16, "bfloat16"), (F32, "float16"), (F64, "bfloat16")],
    ids=str,
)
def test_conversion_is_ml_dtypes_cast(store: Store, tmp_path: Path, kind: Any, to: str) -> None:
    values = normal("w", 31, 64, dtype=np.float32, scale=1.0).astype(kind)
    corners = [np.inf, -np.inf, np.nan, 0.0, -0.0, 6e-8, -1e-7, 61440]
    values[0, :8] = np.array(corners, np.float64).astype(kind)
    tensor = plain(imported(store, tmp_path, {W: values, "s": values[1, 1]}, dtype=to)[W])
    wanted = values.astype({"bfloat16": BF16}.get(to, to))
    assert (tensor.dtype, bits(tensor)) == (wanted.dtype, bits(wanted))


def test_conversion_comes_before_quantization(store: Store, tmp_path: Path) -> None:
    values = normal("w", 32, 64, dtype=np.float32)
    parts = imported(store, tmp_path, {W: values}, dtype="float16", quant="int4")[W].numpy()
    wanted = blobstore.quantize(values.astype(np.float16), "int4")
    assert bits_of_parts(parts) == bits_of_parts(wanted)
    wide = values.astype(np.float64)
    parts = imported(store, tmp_path, {W: wide}, quant="int8", dtype="float32")[W].numpy()
    assert bits_of_parts(parts) == bits_of_parts(blobstore.quantize(values, "int8"))


@pytest.mark.parametrize(
    ("kind", "value", "to", "shown"),
    [
        (F32, -65520.0, "float16", "-65520"),
        (BF16, 1e5, "float16", "99840"),
        (F64, 1e39, "float32", "1e+39"),
        (F32, 3.4e38, "bfloat16", "3.39999"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    store: Store, tmp_path: Path, kind: Any, value: float, to: str, shown: str
) -> None:
    values = np.zeros((70, 192), np.float64).astype(kind)
    values[63, 7], values[64, 0] = value, value
    for quant in (None, "int8"):
        with pytest.raises(UnsupportedSourceError) as caught:
            imported(store, tmp_path, {W: values}, dtype=to, quant=quant)
        assert (caught.value.tensor, caught.value.index) == (W, (63, 7))
        assert shown in caught.value.message


@pytest.mark.parametrize(
    ("quant", "kind", "method", "value"),
    [
        ("int4", BF16, "search", np.nan),
        ("int8", F16, "minmax", np.inf),
        ("nvfp4", F32, "minmax", -np.inf),
        ("mxfp4", BF16, "search", np.inf),
        ("mxfp8", F32, "search", np.nan),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    store: Store, tmp_path: Path, quant: str, kind: Any, method: str, value: float
) -> None:
    values = normal("w", 70, 192, dtype=kind)
    values[67, 33] = value
    with pytest.raises(NonFiniteWeightError, match=str(value)) as caught:
        imported(store, tmp_path, {W: values}, quant=quant, method=method)
    assert (caught.value.tensor, caught.value.index) == (W, (67, 33))
    assert caught.value.path == str(tmp_path / "m/model.safetensors")
    assert not store.blobs.digests()


@pytest.mark.parametrize(
    ("quant", "kind", "method"),
    [("int4", F32, "minmax"), ("int4", BF16, "search"), ("int8", F32, "search")],
)
def test_a_group_that_overflows_its_scale_is_named_by_its_first_weight(
    store: Store, tmp_path: Path, quant: str, kind: Any, method: str
) -> None:
    values = normal("w", 40, 256).astype(kind)
    options: dict[str, Any] = {"quant": quant, "group_size": 64, "method": method}

    def error() -> BlobStoreError:
        with pytest.raises((UnsupportedSourceError, NonFiniteWeightError)) as caught:
            imported(store, tmp_path, {W: values}, **options)
        return caught.value

    for row, column in ((39, 200), (33, 71), (33, 7)):  # the last, then others before it
        values[row, [column, column + 1]] = 3e38, -2e38
        found = error()
        assert isinstance(found, UnsupportedSourceError)
        assert (found.tensor, found.index) == (W, (row, column // 64 * 64))
    values[39, 255] = np.nan
    found = error()
    assert isinstance(found, NonFiniteWeightError)
    assert found.index == (39, 255)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_bad_weight_of_an_expert_is_named_as_in_its_file(
    store: Store, tmp_path: Path, experts: str
) -> None:
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    tensors = {name.format(e): normal(str(e), 32, 64) for e in range(3)}
    tensors[name.format(2)][5, 6] = np.nan
    with pytest.raises(NonFiniteWeightError) as caught:
        imported(store, tmp_path, tensors, quant="int8", experts=experts)
    assert (caught.value.tensor, caught.value.index) == (name.format(2), (5, 6))


@pytest.mark.parametrize("options", [{}, {"dtype": "same"}, {"quant": "int4"}], ids=str)
def test_copies_keep_every_bit_of_a_nan(
    store: Store, tmp_path: Path, options: dict[str, str]
) -> None:
    wide = [0x7FC12345, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x80000000, 1]
    patterns = {
        "float32": np.array(wide, np.uint32).view(np.float32),
        "bfloat16": np.array([0x7FC1, 0xFFC1, 0x7F81, 0xFFBF, 0x8000, 1], np.uint16).view(BF16),
        "float16": np.array([0x7E01, 0xFE01, 0x7C01, 0xFDFF, 0x8000, 1], np.uint16).view(F16),
    }
    for name, array in patterns.items():
        chosen = {key: name if value == "same" else value for key, value in options.items()}
        good = {"other.weight": normal("o", 32, 64, dtype=array.dtype)}
        tensor = imported(store, tmp_path, {"norm.weight": array, **good}, **chosen)["norm.weight"]
        assert bits(tensor.numpy()) == bits(array)


def test_types_that_numpy_does_not_have_and_complex_ones_are_copied(
    store: Store, tmp_path: Path
) -> None:
    four = bytes(range(256))
    data = np.array([1 + 2j], np.complex64).tobytes() + four
    header = {
        "x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        "f4": {"dtype": "F4", "shape": [512], "data_offsets": [8, 264]},
    }
    (tmp_path / "m.safetensors").write_bytes(raw_safetensors(header, data))
    blobstore.import_model(tmp_path / "m.safetensors", store=store, dtype="bfloat16")
    with blobstore.open_model("m", store=store) as model:
        assert bytes(model["f4"].raw()) == four
        assert plain(model["x"])[0] == 1 + 2j
        with pytest.raises(UnsupportedSourceError, match="complex"):
            model["x"].dequantize()
