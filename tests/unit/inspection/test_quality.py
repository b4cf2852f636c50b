"""Quality through the API: what is measured and compared, the order, little memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import (
    BF16,
    LLAMA_CONFIG,
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.quality import imported, measured
from support.stores import link_by_hand, stored_arrays

import blobstore
from blobstore import kernels
from blobstore.errors import CorruptDataError
from blobstore.inspection.comparison import Errors
from blobstore.names import ModelName
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Snapshot = Callable[[Store], dict[str, str]]
W = "x.weight"


def test_what_is_stored_as_it_was_is_compared_and_counts_no_weights(
    store: Store, tmp_path: Path
) -> None:
    tensors = small_tensors()
    report = measured(store, tmp_path, tensors, tensors)
    assert report.name == ModelName.parse("m")
    assert [tensor.name for tensor in report.tensors] == sorted(tensors)
    assert {(tensor.type_name, tensor.quantized) for tensor in report.tensors} == {("BF16", False)}
    assert {tensor.errors for tensor in report.tensors} | {report.errors} == {Errors()}
    assert (report.errors.rmse, report.errors.relative_rmse, report.errors.cosine) == (0, 0, 1)


def test_the_most_damaged_come_first_then_names(store: Store, tmp_path: Path) -> None:
    report = blobstore.measure_quality(imported(store, PYCODE, quant="int4"), PYCODE, store=store)
    keys = [(-(tensor.errors.relative_rmse or 0), tensor.name) for tensor in report.tensors]
    assert keys == sorted(keys)
    assert keys[0][0] < -0.05
    assert [tensor.errors.count for tensor in report.tensors][-1] == 0


def test_threads_change_nothing_and_nothing_is_written(store: Store, snapshot: Snapshot) -> None:
    imported(store, PYCODE, quant="nvfp4")
    before = snapshot(store)
    reports = [
        blobstore.measure_quality("m", PYCODE, store=store, jobs=jobs) for jobs in (None, 1, 7)
    ]
    assert reports == reports[:1] * 3
    assert snapshot(store) == before


def test_the_kernel_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for quant in ("int4", "nvfp4"):
        imported(store, PYCODE, quant=quant)
        reports = []
        for kernel in kernels.KERNELS.values():
            monkeypatch.setattr("blobstore.kernels.native._active", kernel)
            reports.append(blobstore.measure_quality("m", PYCODE, store=store))
        assert reports == reports[:1] * len(reports)


def test_sums_that_float64_does_not_hold_are_no_accident(store: Store, tmp_path: Path) -> None:
    stored = {W: normal("x", 32, 64, dtype=np.float32)}
    source = {W: stored[W].astype(np.float64)}
    source[W][3, 3] = 1e200
    (tensor,) = measured(store, tmp_path, stored, source, quant="int4").tensors
    assert (tensor.errors.max_error, tensor.errors.squared_weight) == (1e200, math.inf)
    assert tensor.errors.saturated_count > 0


def test_progress_is_told_every_byte_of_the_source(store: Store) -> None:
    told: Counter[str] = Counter()
    imported(store, PYCODE, quant="int8")
    blobstore.measure_quality(
        "m",
        PYCODE,
        store=store,
        jobs=1,
        progress=lambda nbytes, tensor: told.update({tensor: nbytes}),
    )
    assert sum(told.values()) == blobstore.plan_import(PYCODE).inventory.nbytes
    assert set(told) == set(blobstore.open_model("m", store=store))


def test_a_source_of_another_form_is_the_same_source(store: Store, tmp_path: Path) -> None:
    tensors = {W: normal("x", 32, 64)}
    source = write_checkpoint(tmp_path / "source", tensors)
    report = blobstore.measure_quality(imported(store, source, quant="int4"), source, store=store)
    assert (
        blobstore.measure_quality("m:latest", source / "model.safetensors", store=store) == report
    )
    assert blobstore.measure_quality(ModelName.parse("m"), str(source), store=store) == report


def test_tensors_of_zeros_lose_nothing(store: Store, tmp_path: Path) -> None:
    for quant in ("int4", "int8", "nvfp4", "mxfp4", "mxfp8"):
        tensors = {W: np.zeros((32, 64), BF16)}
        (tensor,) = measured(store, tmp_path / quant, tensors, tensors, quant=quant).tensors
        assert (tensor.errors.rmse, tensor.errors.relative_rmse, tensor.errors.cosine) == (0, 0, 1)
        assert tensor.errors.count == 2048


def test_a_source_of_zeros_for_a_model_of_others_has_no_relative_error_and_comes_first(
    store: Store, tmp_path: Path
) -> None:
    good = {"a.weight": normal("a", 32, 64), W: normal("x", 32, 64)}
    report = measured(store, tmp_path, good, good | {W: np.zeros((32, 64), BF16)}, quant="int8")
    first, second = report.tensors
    assert (first.name, first.errors.relative_rmse, first.errors.cosine) == (W, None, 0)
    assert first.errors.rmse > 0
    assert second.errors.relative_rmse is not None
    assert report.errors.relative_rmse is not None


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (0,)])
@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}], ids=["kept", "converted"])
def test_empty_tensors(
    store: Store, tmp_path: Path, shape: tuple[int, ...], options: dict[str, str]
) -> None:
    tensors = {"e": np.zeros(shape, np.float32), "s": np.array(2.5, np.float32)}
    report = measured(store, tmp_path, tensors, tensors, **options)
    empty = next(tensor for tensor in report.tensors if tensor.name == "e")
    assert (empty.shape, empty.errors) == (shape, Errors())
    assert (empty.errors.saturated, empty.errors.max_error) == (0, 0)


def test_an_empty_quantized_tensor_of_another_writer(store: Store, tmp_path: Path) -> None:
    arrays, metadata = stored_arrays(W, np.zeros((0, 64), BF16), "int4")
    link_by_hand(store, "m", {W: safetensors_bytes(arrays, metadata)})
    source = write_checkpoint(tmp_path / "s", {W: np.zeros((0, 64), BF16)})
    (tensor,) = blobstore.measure_quality("m", source, store=store).tensors
    assert (tensor.type_name, tensor.quantized, tensor.errors.count) == ("int4", True, 0)


@pytest.mark.parametrize("place", [0, 4321, -1])
@pytest.mark.parametrize(
    "kind",
    [BF16, np.dtype(np.int64), np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)],
    ids=str,
)
def test_a_byte_that_differs_in_what_is_stored_as_it_was_is_corrupt(
    store: Store, tmp_path: Path, kind: Any, place: int
) -> None:
    data = np.arange(2**13 * kind.itemsize, dtype=np.uint32).astype(np.uint8) & 63
    other = data.copy()
    other[place] ^= 1
    with pytest.raises(CorruptDataError, match="'n'") as caught:
        measured(
            store, tmp_path, {"n": data.view(kind), "a": data}, {"n": other.view(kind), "a": data}
        )
    assert caught.value.tensor == "n"


def test_a_byte_that_differs_behind_the_first_chunk_is_seen(store: Store, tmp_path: Path) -> None:
    data = np.zeros(2**19 + 5, np.uint8)
    other = data.copy()
    other[-1] = 1
    with pytest.raises(CorruptDataError, match="'n'"):
        measured(store, tmp_path, {"n": data}, {"n": other})


def test_types_that_numpy_does_not_have_are_compared_by_their_bytes(
    store: Store, tmp_path: Path
) -> None:
    header = {"f4": {"dtype": "F4", "shape": [2**20 + 6], "data_offsets": [0, 2**19 + 3]}}
    data = bytes(range(256)) * 2048 + b"abc"
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw_safetensors(header, data))
    blobstore.import_model(path, "m", store=store)
    (tensor,) = blobstore.measure_quality("m", path, store=store).tensors
    assert (tensor.type_name, tensor.errors) == ("F4", Errors())
    path.write_bytes(raw_safetensors(header, data[:-1] + b"d"))
    with pytest.raises(CorruptDataError, match="'f4'"):
        blobstore.measure_quality("m", path, store=store)


def test_sums_of_two_runs_add_up() -> None:
    left, right = Errors(2, 1.0, 4.0, 5.0, 3.0, 0.5, 1), Errors(6, 3.0, 12.0, 3.0, 2.0, 0.25, 1)
    both = left + right
    assert both == Errors(8, 4.0, 16.0, 8.0, 5.0, 0.5, 2)
    assert (both.rmse, both.relative_rmse, both.saturated) == (math.sqrt(0.5), 0.5, 0.25)
    assert both.cosine == pytest.approx(5 / math.sqrt(128))
    assert Errors(1, 1.0, 0.0, 1.0, 0.0, 1.0).relative_rmse is None


MEMORY = """
import sys, threading, time
from pathlib import Path
import blobstore, blobstore.inspection.quality
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if "RssAnon" in line)
store, source = blobstore.open_store(sys.argv[1]), sys.argv[2]
blobstore.import_model(source, "m", store=store, jobs=2, quant="int8")
start, seen = anonymous(), []
progress = lambda nbytes, tensor: seen.append(anonymous())
blobstore.measure_quality("m", source, store=store, jobs=2, progress=progress)
print(max(seen) - start, len(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    nbytes = 120 * 2**20
    rows = nbytes // 2 // 4096
    header = {W: {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, nbytes]}}
    source = tmp_path / "big.safetensors"
    source.write_bytes(raw_safetensors(header))
    with source.open("r+b") as file:
        file.truncate(source.stat().st_size + nbytes)  # a hole: zeros that take no disk
    line = [sys.executable, "-c", MEMORY, str(tmp_path / "store"), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    grown, chunks = map(int, done.stdout.split())
    assert chunks == nbytes // 2 // 2**19
    assert grown * 1024 < 60 * 2**20


def test_a_config_of_another_architecture_does_not_matter(store: Store, tmp_path: Path) -> None:
    tensors = small_tensors()
    blobstore.import_model(
        write_checkpoint(tmp_path / "a", tensors), "m", store=store, quant="int4"
    )
    other = write_checkpoint(
        tmp_path / "b", tensors, LLAMA_CONFIG | {"architectures": ["Qwen3ForCausalLM"]}
    )
    assert len(blobstore.measure_quality("m", other, store=store).tensors) == len(tensors)


def test_float64_that_was_converted_is_measured(store: Store, tmp_path: Path) -> None:
    tensors = {W: normal("x", 32, 64, dtype=np.float32).astype(np.float64) / 3}
    (tensor,) = measured(store, tmp_path, tensors, tensors, dtype="float32").tensors
    assert 0 < (tensor.errors.relative_rmse or 0) < 1e-7


def test_values_that_are_not_finite_and_come_back_as_they_were_are_no_error(
    store: Store, tmp_path: Path
) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0], np.float32)
    values.view(np.uint32)[4] = 0x7F800001  # a signalling NaN
    (tensor,) = measured(store, tmp_path, {"n": values}, {"n": values}, dtype="bfloat16").tensors
    assert (tensor.errors.rmse, tensor.errors.max_error) == (0, 0)


def test_a_source_with_a_document_of_our_name_is_measured_as_it_was_imported(
    store: Store, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "s")
    (source / "blobstore.json").write_text("{}")
    assert blobstore.measure_quality(
        imported(store, source, profile="ollama"), source, store=store
    ).tensors
