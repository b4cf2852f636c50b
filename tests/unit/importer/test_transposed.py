"""Weights stored as ``[..., in, out]``: grouped along the inputs, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.arrays import bits_of_parts, plain
from support.checkpoints import BF16, normal, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.stores import wrong_digests

import blobstore
from blobstore.errors import CorruptDataError, UnsupportedSourceError, UsageError
from blobstore.export import values
from blobstore.export.folder import export_model
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import Header, lay_out
from blobstore.inspection.comparison import diff_models
from blobstore.inspection.quality import measure_quality
from blobstore.kernels.quantize import quantize
from blobstore.store.local.store import Store, open_store
from blobstore.store.stored import stored_tensors

Array = np.ndarray[Any, Any]
HIDDEN, INNER = 64, 128
EXPERTS = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
CONFIG = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN}


def fused(dtype: Any = BF16) -> dict[str, Array]:
    """Return gpt-oss's experts as in its BF16 checkpoints, and an ordinary matrix."""
    shapes = {
        GATE_UP: (3, HIDDEN, 2 * INNER),
        f"{GATE_UP}_bias": (3, 2 * INNER),
        DOWN: (3, INNER, HIDDEN),
        O_PROJ: (HIDDEN, 64),
    }
    return {name: normal(name, *shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", fused(), CONFIG)


def turned(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [("int4", BF16), ("nvfp4", np.float32), ("mxfp4", np.float16), ("mxfp8", BF16)],
    ids=str,
)
def test_groups_run_along_inputs(store: Store, tmp_path: Path, quant: str, dtype: Any) -> None:
    tensors = fused(dtype)
    source = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    blobstore.import_model(source, "m", store=store, quant=quant, rules=["*o_proj*=none"])
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name in (GATE_UP, DOWN):
            size, kind = model[name].group_size, model[name].quant_type
            wanted = quantize(turned(tensors[name]), kind or "", group_size=size)
            assert bits_of_parts(model[name].numpy()) == bits_of_parts(wanted)
        assert {name for name in model if model[name].transposed} == {GATE_UP, DOWN}


@pytest.mark.parametrize("options", [{"profile": "ollama"}, {"rules": ["*_proj=none"]}])
def test_what_is_kept_or_ollamas_is_not_transposed(
    store: Store, source: Path, options: dict[str, Any]
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int8", **options)
    with blobstore.open_model("m", store=store) as model:
        assert not any(tensor.transposed for tensor in model.values())
        assert model[DOWN].shape == fused()[DOWN].shape


@pytest.mark.parametrize(
    "options", [{"quant": "int4"}, {"quant": "nvfp4", "global_scale": True, "dtype": "float32"}]
)
def test_the_size_of_runs_and_the_number_of_threads_change_nothing(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = blobstore.import_model(source, store=open_store(tmp_path / "0"), jobs=1, **options)
    for chunk, jobs in ((LEAST, 1), (4096, 3)):
        store = open_store(tmp_path / str(chunk))
        with chunks_of(chunk):
            found = blobstore.import_model(source, store=store, jobs=jobs, **options)
        assert found.digest == wanted.digest
        assert wrong_digests(store) == []


def test_an_export_of_values_has_the_sources_layout(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="nvfp4")
    export_model("m", tmp_path / "values", store=store, dequantize="float32")
    blobstore.import_model(tmp_path / "values", "again", store=store)
    model, again = (blobstore.open_model(name, store=store) for name in ("m", "again"))
    for name, array in fused().items():
        found = model[name].dequantize()
        assert again[name].shape == array.shape
        wanted = turned(found) if model[name].transposed else found
        np.testing.assert_array_equal(plain(again[name]), wanted)


def test_an_export_of_our_form_stores_the_same_again_and_can_be_quantized_again(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int8")
    export_model("m", tmp_path / "own", store=store)
    blobstore.import_model(tmp_path / "own", "again", store=store)
    blobstore.import_model(tmp_path / "own", "other", store=store, quant="int4", requantize=True)
    model, again, other = (
        blobstore.open_model(name, store=store) for name in ("m", "again", "other")
    )
    facts = [{name: (t.blob, t.transposed) for name, t in one.items()} for one in (model, again)]
    assert facts[0] == facts[1]
    assert other[GATE_UP].transposed
    wanted = quantize(model[GATE_UP].dequantize("bfloat16"), "int4")
    assert bits_of_parts(other[GATE_UP].numpy()) == bits_of_parts(wanted)


@pytest.mark.parametrize(
    ("other", "is_first"), [({}, True), ({"quant": "int8", "profile": "ollama"}, False)], ids=str
)
def test_diff_and_quality_compare_the_same_weights(
    store: Store, source: Path, other: dict[str, Any], is_first: bool
) -> None:
    blobstore.import_model(source, "turned", store=store, quant="int4")
    blobstore.import_model(source, "other", store=store, **other)
    names = ("turned", "other") if is_first else ("other", "turned")
    changes = diff_models(*names, store=store, error=True).changed
    (errors,) = (change.errors for change in changes if change.before.name == DOWN)
    assert errors is not None
    assert errors.count == fused()[DOWN].size
    assert 0 < (errors.relative_rmse or 0) < 0.2
    measured = measure_quality("turned", source, store=store).tensors
    (quality,) = (tensor for tensor in measured if tensor.name == GATE_UP)
    assert 0 < (quality.errors.relative_rmse or 0) < 0.2


def test_values_come_back_in_chunks_of_any_size(store: Store, source: Path, tmp_path: Path) -> None:
    blobstore.import_model(source, "m", store=store, quant="int4")
    files = []
    for number, (at_once, band) in enumerate(((2**20, 2**16), (2048, 256), (64, 2**16))):
        with (
            mock.patch.object(values, "VALUES_AT_ONCE", at_once),  # the last: less than a row
            mock.patch.object(values, "_BAND_VALUES", band),
        ):
            export_model("m", tmp_path / str(number), store=store, dequantize="bfloat16", jobs=2)
        files.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_value_that_does_not_fit_is_named_by_its_place_in_the_source(
    store: Store, tmp_path: Path
) -> None:
    tensors = fused()
    tensors[DOWN][2, 7, 31] = 1e6
    source = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    blobstore.import_model(source, "m", store=store, quant="mxfp8")
    with pytest.raises(UnsupportedSourceError, match="does not fit F16") as exported:
        export_model("m", tmp_path / "out", store=store, dequantize="float16")
    tensors[DOWN][2, 7, 31] = np.nan
    with pytest.raises(blobstore.errors.NonFiniteWeightError) as imported:
        blobstore.import_model(
            write_checkpoint(tmp_path / "m", tensors, CONFIG), "m", store=store, quant="int4"
        )
    for error in (exported.value, imported.value):
        assert (error.tensor, error.index) == (DOWN, (2, 7, 31))


@pytest.mark.parametrize(
    "metadata", [{"x.transposed": "yes"}, {"x.transposed": "false"}, {"y.transposed": "true"}]
)
def test_metadata_that_can_not_be_are_damage(metadata: dict[str, str]) -> None:
    shapes = {"x": (DType.U32, (4, 8)), "x.scale": (DType.BF16, (4, 2))}
    shapes |= {"x.bias": (DType.BF16, (4, 2)), "y": (DType.BF16, (4, 8))}
    entries = lay_out([(name, *array) for name, array in shapes.items()])
    usual = {"quant_type": "int4", "group_size": "32"}
    tensors = stored_tensors(Header(entries, {**usual, "x.transposed": "true"}, 8))
    assert {tensor.name: tensor.transposed for tensor in tensors} == {"x": True, "y": False}
    with pytest.raises(CorruptDataError, match="transposed") as caught:
        list(stored_tensors(Header(entries, {**usual, **metadata}, 8)))
    assert caught.value.tensor == next(iter(metadata))[0]


def test_importance_is_that_of_inputs(store: Store, source: Path) -> None:
    weighed = np.linspace(0.1, 9, HIDDEN, dtype=np.float32)
    options: dict[str, Any] = {"quant": "int4", "method": "search"}
    blobstore.import_model(source, "m", store=store, importance={GATE_UP: weighed}, **options)
    with blobstore.open_model("m", store=store) as model:
        wanted = quantize(
            turned(fused()[GATE_UP]),
            "int4",
            group_size=model[GATE_UP].group_size,
            method="search",
            importance=weighed,
        )
        assert bits_of_parts(model[GATE_UP].numpy()) == bits_of_parts(wanted)
    of_outputs = {GATE_UP: np.ones(2 * INNER, np.float32)}
    with pytest.raises(UsageError, match=str(HIDDEN)):
        blobstore.plan_import(source, importance=of_outputs, **options)
