"""What an import does to values: ml_dtypes' casts, copies of every bit, no seams of chunks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits, plain
from support.checkpoints import BF16, normal, raw_safetensors, write_checkpoint
from support.chunks import chunks_of
from support.weights import assert_same_parts, random_importance

import blobstore
from blobstore import QuantizedArray
from blobstore.errors import BlobStoreError, NonFiniteWeightError, UnsupportedSourceError
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
W = "x.weight"
EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"
STACK = "model.layers.0.mlp.experts.up_proj.weight"


def imported(store: Store, folder: Path, tensors: dict[str, Array], **options: Any) -> Model:
    source = write_checkpoint(folder / "m", tensors)
    with chunks_of(8192):  # ends inside a row of 192
        blobstore.import_model(source, "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


def parts(model: Model, name: str = W) -> QuantizedArray[Array]:
    array = model[name].numpy()
    assert isinstance(array, QuantizedArray)
    return array


def quantized(weights: Array, quant: str, **options: Any) -> QuantizedArray[Array]:
    return blobstore.quantize(weights, quant, **options)


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
def test_a_bad_weight_of_an_expert_is_named(store: Store, tmp_path: Path, experts: str) -> None:
    tensors = {EXPERT.format(e): normal(str(e), 32, 64) for e in range(3)}
    tensors[EXPERT.format(2)][5, 6] = np.nan
    with pytest.raises(NonFiniteWeightError) as caught:
        imported(store, tmp_path, tensors, quant="int8", experts=experts)
    assert (caught.value.tensor, caught.value.index) == (EXPERT.format(2), (5, 6))


@pytest.mark.parametrize("options", [{}, {"dtype": "same"}, {"quant": "int4"}], ids=str)
def test_copies_keep_bits_of_a_nan(store: Store, tmp_path: Path, options: dict[str, str]) -> None:
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


def test_types_that_numpy_lacks_and_complex_ones_are_copied(store: Store, tmp_path: Path) -> None:
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


# Searches, importance and global scales store what the kernels find


@pytest.mark.parametrize(
    ("quant", "kind", "is_weighed"),
    [
        ("int4", BF16, True),
        ("int8", BF16, False),
        ("nvfp4", BF16, False),
        ("mxfp4", np.float32, True),
        ("mxfp8", BF16, False),
    ],
)
def test_a_search_stores_what_the_kernel_finds(
    store: Store, tmp_path: Path, quant: str, kind: Any, is_weighed: bool
) -> None:
    weights = normal("w", 70, 192, dtype=kind)
    importance = random_importance(192) if is_weighed else None
    given = None if importance is None else {W: importance}
    model = imported(store, tmp_path, {W: weights}, quant=quant, method="search", importance=given)
    wanted = blobstore.quantize(weights, quant, method="search", importance=importance)
    assert_same_parts(parts(model), wanted)


def test_each_expert_has_its_own_importance(store: Store, tmp_path: Path) -> None:
    tensors = {EXPERT.format(e): normal(f"e{e}", 32, 64) for e in range(3)}
    importance = {EXPERT.format(e): random_importance(64, seed=e) for e in (0, 2)}
    options: dict[str, Any] = {"quant": "int4", "method": "search", "importance": importance}
    stacked = parts(imported(store, tmp_path, tensors, experts="stacked", **options), STACK)
    packed = imported(store, tmp_path, tensors, experts="packed", **options)
    for e, (name, weights) in enumerate(tensors.items()):
        weighed = importance.get(name)
        wanted = blobstore.quantize(weights, "int4", method="search", importance=weighed)
        assert_same_parts(parts(packed, name), wanted)
        assert stacked.weight[e].tobytes() == wanted.weight.tobytes()
        assert stacked.scale[e].tobytes() == wanted.scale.tobytes()


@pytest.mark.parametrize(("method", "scale"), [("minmax", 1e-4), ("search", 0.02), ("minmax", 30)])
def test_a_global_scale_comes_back(store: Store, tmp_path: Path, method: str, scale: float) -> None:
    weights = normal("w", 70, 192, scale=scale)
    options: dict[str, Any] = {"quant": "nvfp4", "method": method, "global_scale": True}
    model = imported(store, tmp_path, {W: weights}, **options)
    wanted = quantized(weights, **options)
    assert wanted.global_scale is not None
    assert_same_parts(parts(model), wanted)
    np.testing.assert_array_equal(model[W].dequantize(), blobstore.dequantize(wanted))
    for library in ("torch", "mlx"):
        stored = getattr(model[W], library)().global_scale
        assert float(stored[0]) == float(wanted.global_scale[0])
