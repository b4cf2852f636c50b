"""Quality through the API: what is measured and compared, the order, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import BF16, LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.producers import COPIED, Kind, nvfp4
from support.stores import blob_path, commit_model, link_by_hand, open_files, stored_arrays

import blobstore
from blobstore import ModelQuality
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.inspection.comparison import Errors
from blobstore.names import ModelName
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Snapshot = Callable[[Store], dict[str, str]]
W = "x.weight"


def measured(
    store: Store, folder: Path, stored: dict[str, Array], source: dict[str, Array], **options: Any
) -> ModelQuality:
    """Import ``stored`` and return its report against ``source``."""
    blobstore.import_model(write_checkpoint(folder / "stored", stored), "m", store=store, **options)
    return blobstore.measure_quality("m", write_checkpoint(folder / "source", source), store=store)


def test_a_report_is_the_same_for_any_threads_and_source(store: Store, snapshot: Snapshot) -> None:
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    before, counts = snapshot(store), list[int]()
    report = blobstore.measure_quality(
        "m", PYCODE, store=store, jobs=1, progress=lambda count, _: counts.append(count)
    )
    assert sum(counts) == blobstore.plan_import(PYCODE).inventory.nbytes
    assert max(counts) <= 2**20  # a tensor of any size is read in pieces
    file = str(PYCODE / "model.safetensors")
    assert blobstore.measure_quality(ModelName.parse("m"), file, store=store, jobs=7) == report
    assert snapshot(store) == before
    # The most damaged come first, then names.
    keys = [(-(tensor.errors.relative_rmse or 0), tensor.name) for tensor in report.tensors]
    assert keys == sorted(keys)
    assert keys[0][0] < -0.05
    assert report.tensors[-1].errors.count == 0


def test_empty_tensors(store: Store, tmp_path: Path) -> None:
    shapes = [(0, 64), (32, 0), (0,)]
    tensors = {f"e{number}": np.zeros(shape, np.float32) for number, shape in enumerate(shapes)}
    report = measured(store, tmp_path, tensors, tensors, dtype="float16")
    found = [(tensor.shape, tensor.errors) for tensor in report.tensors]
    assert found == [(shape, Errors()) for shape in shapes]
    arrays, metadata = stored_arrays(W, np.zeros((0, 64), BF16), "int4")  # of another writer
    link_by_hand(store, "n", {W: safetensors_bytes(arrays, metadata)})
    source = write_checkpoint(tmp_path / "s", {W: np.zeros((0, 64), BF16)})
    (tensor,) = blobstore.measure_quality("n", source, store=store).tensors
    assert (tensor.type_name, tensor.quantized, tensor.errors.count) == ("int4", True, 0)


def test_a_byte_that_differs_in_an_unquantized_tensor_is_corrupt(
    store: Store, tmp_path: Path
) -> None:
    data = np.zeros(2**20 + 8, np.uint8)
    for kind, place in ((BF16, 0), (ml_dtypes.float8_e4m3fn, -1)):
        other = data.copy()
        other[place] = 1
        stored, source = ({"n": array.view(kind), "a": data[:9]} for array in (data, other))
        with pytest.raises(CorruptDataError, match="'n'") as caught:
            measured(store, tmp_path, stored, source)
        assert caught.value.tensor == "n"


def test_conversions_to_another_dtype_are_measured(store: Store, tmp_path: Path) -> None:
    tensors = {W: normal("x", 32, 64, dtype=np.float32).astype(np.float64) / 3}
    (tensor,) = measured(store, tmp_path, tensors, tensors, dtype="float32").tensors
    assert 0 < (tensor.errors.relative_rmse or 0) < 1e-7
    odd = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0], np.float32)
    odd.view(np.uint32)[4] = 0x7F800001  # a signalling NaN
    (tensor,) = measured(store, tmp_path, {"n": odd}, {"n": odd}, dtype="bfloat16").tensors
    assert (tensor.errors.rmse, tensor.errors.max_error) == (0, 0)


def test_another_checkpoint_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    others: list[tuple[dict[str, Array], type[BlobStoreError]]] = [
        ({"other.weight": normal("x", 32, 64)}, TensorNotFoundError),
        ({W: normal("x", 64, 32)}, UnsupportedSourceError),
        ({W: np.zeros((32, 64), np.int32)}, UnsupportedSourceError),
    ]
    for source, kind in others:
        with pytest.raises(kind, match=r"x\.weight") as caught:
            measured(store, tmp_path, {W: normal("x", 32, 64)}, source, quant="int4")
        assert (caught.value.tensor, caught.value.model) == (W, "m:latest")


def test_missing_models_and_sources(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    blobstore.import_model(source, "m", store=store)
    link_by_hand(store, "gguf", {})
    refused: list[tuple[str, Path, type[BlobStoreError], str]] = [
        ("ghost", source, NotFoundError, "ghost:latest"),
        ("m", tmp_path / "nowhere", NotFoundError, "nowhere"),
        ("m", tmp_path, NotFoundError, "no weights"),
        ("gguf", source, UnsupportedSourceError, "no tensor blobs"),
    ]
    for name, against, kind, says in refused:
        with pytest.raises(kind, match=says):
            blobstore.measure_quality(name, against, store=store)
    with pytest.raises(UsageError):
        blobstore.measure_quality("m", source, store=store, jobs=0)


def test_a_damaged_model_or_source_is_corrupt(store: Store, tmp_path: Path) -> None:
    data = safetensors_bytes({"x": normal("x", 3)})
    commit_model(store, "m", data)
    source = write_checkpoint(tmp_path / "s", {"x": normal("x", 3)})
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=r"model\.safetensors"):
        blobstore.measure_quality("m", source, store=store)
    blob_path(store, data).write_bytes(data[:-1])
    with pytest.raises(CorruptDataError, match="m:latest"):
        blobstore.measure_quality("m", source, store=store)


def test_a_source_that_changes_while_it_is_read_is_an_error(store: Store, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "s") / "model.safetensors"
    blobstore.import_model(file.parent, "m", store=store, quant="int4")
    with pytest.raises(CorruptDataError, match=r"model\.safetensors"):
        blobstore.measure_quality(
            "m", file.parent, store=store, progress=lambda *_: file.write_bytes(file.read_bytes())
        )
    assert not open_files(tmp_path)


UP = "model.layers.0.mlp.up_proj"
NORM = "model.layers.0.norm.weight"
NVFP4 = nvfp4(modelopt=False)
MLX, MODELOPT = COPIED["mlx int4/64 bfloat16"], COPIED["modelopt"]


def source_of(folder: Path, kind: Kind, *weights: Any) -> Path:
    tensors = {NORM: normal("norm", 64)}
    for weight in weights:
        tensors |= weight.tensors
    return write_checkpoint(folder, tensors, {**LLAMA_CONFIG, **kind.config})


@pytest.mark.parametrize("kind", [MLX, MODELOPT, NVFP4], ids=["mlx", "modelopt", "nvfp4"])
def test_a_copy_has_no_error(store: Store, tmp_path: Path, kind: Kind) -> None:
    weight = kind.make(UP, (6, 256))
    source = source_of(tmp_path / "s", kind, weight)
    blobstore.import_model(source, "m", store=store)
    tensors = blobstore.measure_quality("m", source, store=store).tensors
    (found,) = (tensor for tensor in tensors if tensor.name == weight.name)
    assert {tensor.name for tensor in tensors} == {weight.name, NORM}
    assert (found.type_name, found.shape) == (weight.quant_type, (6, 256))
    errors = found.errors
    assert (errors.count, errors.max_error, errors.rmse, errors.cosine) == (6 * 256, 0, 0, 1)


def test_a_float_model_against_a_quantized_source_and_back(store: Store, tmp_path: Path) -> None:
    weight = MLX.make(UP, (6, 256))
    quantized = source_of(tmp_path / "q", MLX, weight)
    plain = write_checkpoint(tmp_path / "p", {NORM: normal("norm", 64), weight.name: weight.values})
    for stored, source in ((quantized, plain), (plain, quantized)):
        blobstore.import_model(stored, "m", store=store)
        report = blobstore.measure_quality("m", source, store=store)
        assert (report.errors.rmse, report.errors.count) == (0, 6 * 256)
