"""What an import does to values: casts, copies, runs of any size; options that contradict them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits, plain
from support.checkpoints import (
    BF16,
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.chunks import LEAST, chunks_of
from support.stores import wrong_digests
from support.weights import assert_same_parts, random_importance

import blobstore
from blobstore import QuantizedArray, errors
from blobstore.importer.writing import least_memory
from blobstore.kernels.arrays import Array
from blobstore.model.loader import Model
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore

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
        with pytest.raises(errors.UnsupportedSourceError) as caught:
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
    with pytest.raises(errors.NonFiniteWeightError, match=str(value)) as caught:
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

    def error() -> errors.BlobStoreError:
        with pytest.raises((errors.UnsupportedSourceError, errors.NonFiniteWeightError)) as caught:
            imported(store, tmp_path, {W: values}, **options)
        return caught.value

    for row, column in ((39, 200), (33, 71), (33, 7)):  # the last, then others before it
        values[row, [column, column + 1]] = 3e38, -2e38
        found = error()
        assert isinstance(found, errors.UnsupportedSourceError)
        assert (found.tensor, found.index) == (W, (row, column // 64 * 64))
    values[39, 255] = np.nan
    found = error()
    assert isinstance(found, errors.NonFiniteWeightError)
    assert found.index == (39, 255)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_bad_weight_of_an_expert_is_named(store: Store, tmp_path: Path, experts: str) -> None:
    tensors = {EXPERT.format(e): normal(str(e), 32, 64) for e in range(3)}
    tensors[EXPERT.format(2)][5, 6] = np.nan
    with pytest.raises(errors.NonFiniteWeightError) as caught:
        imported(store, tmp_path, tensors, quant="int8", experts=experts)
    assert (caught.value.tensor, caught.value.index) == (EXPERT.format(2), (5, 6))


@pytest.mark.parametrize(
    "options", [{}, {"quant": "int4"}, {"dtype": "float32"}, {"dtype": "float16"}], ids=str
)
def test_copies_keep_bits_of_a_nan(store: Store, tmp_path: Path, options: dict[str, str]) -> None:
    wide = [0x7FC12345, 0xFFC00001, 0x7F800001, 0xFFBFFFFF, 0x80000000, 1]
    patterns: dict[str, Array] = {
        "float32": np.array(wide, np.uint32).view(np.float32),
        "bfloat16": np.array([0x7FC1, 0xFFC1, 0x7F81, 0xFFBF, 0x8000, 1], np.uint16).view(BF16),
        "float16": np.array([0x7E01, 0xFE01, 0x7C01, 0xFDFF, 0x8000, 1], np.uint16).view(F16),
    }
    model = imported(store, tmp_path, {**patterns, W: normal("o", 32, 64)}, **options)
    for name in {options.get("dtype", name) for name in patterns}:
        assert bits(model[name].numpy()) == bits(patterns[name])


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
        with pytest.raises(errors.UnsupportedSourceError, match="complex"):
            model["x"].dequantize()


# Searches, importance and global scales store what the kernels find

IMPORTANCE = random_importance(192)


@pytest.mark.parametrize(
    ("quant", "kind", "scale", "options"),
    [
        ("int4", BF16, 0.02, {"importance": IMPORTANCE}),
        ("int8", BF16, 0.02, {}),
        ("mxfp4", F32, 0.02, {"importance": IMPORTANCE}),
        ("mxfp8", BF16, 0.02, {}),
        ("nvfp4", BF16, 0.02, {"global_scale": True}),
        ("nvfp4", BF16, 30, {"global_scale": True, "method": "minmax"}),
    ],
)
def test_what_the_kernel_finds_is_stored(
    store: Store, tmp_path: Path, quant: str, kind: Any, scale: float, options: dict[str, Any]
) -> None:
    weights = normal("w", 70, 192, dtype=kind, scale=scale)
    options = {"method": "search", **options}
    wanted = blobstore.quantize(weights, quant, **options)
    if "importance" in options:
        options["importance"] = {W: IMPORTANCE}
    model = imported(store, tmp_path, {W: weights}, quant=quant, **options)
    assert_same_parts(parts(model), wanted)
    np.testing.assert_array_equal(model[W].dequantize(), blobstore.dequantize(wanted))
    if wanted.global_scale is not None:
        for library in ("torch", "mlx"):
            stored = getattr(model[W], library)().global_scale
            assert float(stored[0]) == float(wanted.global_scale[0])


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


# Runs: equal bytes for runs of any size, any threads and any memory

ODD: dict[str, Array] = {
    "odd.empty": np.zeros((0, 64), np.float32),
    "odd.scalar": np.array(3, np.int64),
    "odd.f64": np.arange(3000, dtype=np.float64),
    "odd.bytes": np.arange(5001, dtype=np.uint32).astype(np.uint8),
    "odd." + "long name " * 5000: normal("long", 100, dtype=np.float16),
}


MIXTURE = {
    f"model.layers.1.mlp.experts.{expert}.{name}.weight": normal(f"{expert}{name}", 32, 64)
    for expert in range(6)
    for name in ("down_proj", "up_proj")
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    return write_checkpoint(folder, {**small_tensors(), **ODD, **MIXTURE})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"quant": "int4"},
        {"quant": "nvfp4", "global_scale": True, "experts": "stacked"},
    ],
    ids=str,
)
def test_runs_and_memory_change_nothing(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = blobstore.import_model(source, store=MemoryStore(), jobs=1, **options).digest
    told: list[tuple[int, str]] = []
    for chunk, jobs, more in ((LEAST, 8, 10**8), (4096, 2, 0)):
        store = open_store(tmp_path / str(chunk))
        told.clear()
        with chunks_of(chunk):
            result = blobstore.import_model(
                source,
                store=store,
                jobs=jobs,
                memory=least_memory(jobs) + more,
                progress=lambda nbytes, name: told.append((nbytes, name)),
                **options,
            )
        assert result.digest == wanted
        assert sum(nbytes for nbytes, _ in told) == result.source_bytes
        assert wrong_digests(store) == []


def test_too_few_threads_and_too_little_memory_are_usage_errors(source: Path, store: Store) -> None:
    with pytest.raises(errors.UsageError, match="-1"):
        blobstore.import_model(source, store=store, jobs=-1)
    with pytest.raises(errors.UsageError, match="8 threads") as caught:
        blobstore.import_model(source, store=store, jobs=8, memory=least_memory(8) - 1)
    assert f"{least_memory(8):,}" in str(caught.value.hint)
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("kind", "after", "jobs"),
    [(ZeroDivisionError, 0, 1), (KeyboardInterrupt, 10_000, 8), (errors.StorageError, 100_000, 8)],
)
def test_an_error_of_the_progress_function_is_that_error(
    source: Path, store: Store, jobs: int, kind: type[BaseException], after: int
) -> None:
    """Also at the last run of a blob, and whatever other threads wait for."""
    done = 0

    def progress(nbytes: int, blob: str) -> None:
        nonlocal done
        done += nbytes
        if done >= after:
            raise kind(blob)

    with chunks_of(LEAST), pytest.raises(kind):
        blobstore.import_model(source, store=store, quant="int4", jobs=jobs, progress=progress)
    assert list(store.models()) == []
    assert list(store.root.glob(".blobstore/tmp/*")) == []


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_error_is_the_same_by_any_threads(store: Store, tmp_path: Path, jobs: int) -> None:
    tensors: dict[str, Array] = {"0.good.weight": normal("g", 32, 64)}
    tensors["1.slow.weight"] = np.zeros((1000, 1024), np.float32)
    tensors["1.slow.weight"][-1, -1] = np.nan
    for number in range(2, 20):
        tensors[f"{number}.quick.weight"] = np.full((64, 1024), np.inf, np.float32)
    source = write_checkpoint(tmp_path / "bad", tensors)
    with pytest.raises(errors.NonFiniteWeightError) as caught:
        blobstore.import_model(source, store=store, quant="int8", jobs=jobs)
    assert (caught.value.tensor, caught.value.index) == ("1.slow.weight", (999, 1023))
    assert list(store.models()) == []
    assert list((store.root / ".blobstore/tmp").iterdir()) == []


# Options that contradict each other or the tensors

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
ONES = np.ones(64, np.float32)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"qaunt": "int4"}, "'qaunt'"),
        ({"rules": "*=int4"}, "rules"),
        ({"alignment": 2**26}, "power of two"),
        ({"requantize": True}, "quantization type"),
        ({"pure": True}, "quantization type"),
        ({"pure": True, "quant": "int4", "target_bpw": 5.0}, "target"),
        ({"importance": {UP: ONES}, "quant": "int4"}, "method search"),
        ({"global_scale": True, "quant": "mxfp4"}, "nvfp4"),
    ],
)
def test_options_that_are_wrong_use(tiny: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(errors.UsageError, match=names):
        blobstore.plan_import(tiny, **options)


@pytest.mark.parametrize(
    ("vectors", "names"),
    [
        ({"nobody.weight": ONES}, "'nobody.weight'"),
        ({NORM: ONES}, NORM),
        ({UP: np.ones(65, np.float32)}, "65 values for 64 columns"),
        ({UP: np.where(np.arange(64) == 5, -1, ONES)}, "column 5"),
        ({UP: np.where(np.arange(64) == 5, np.nan, ONES)}, "column 5"),
        ({UP: np.ones((1, 64), np.float32)}, "[1, 64]"),
    ],
)
def test_wrong_importance(tiny: Path, tmp_path: Path, vectors: dict[str, Any], names: str) -> None:
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes({name: v.astype("f4") for name, v in vectors.items()}))
    for importance in (vectors, file):
        with pytest.raises(errors.UsageError, match="importance") as caught:
            blobstore.plan_import(tiny, importance=importance, quant="int4", method="search")
        assert names in caught.value.message


def test_a_name_that_a_global_scale_needs_is_refused(store: Store, tmp_path: Path) -> None:
    tensors = {"x.weight": normal("x", 32, 64), "x.weight.global_scale": normal("g", 1)}
    source = write_checkpoint(tmp_path / "m", tensors)
    with pytest.raises(errors.UnsupportedSourceError, match=r"x\.weight\.global_scale"):
        blobstore.import_model(source, "m", store=store, quant="nvfp4", global_scale=True)
    assert not list(store.root.rglob("sha256-*"))
