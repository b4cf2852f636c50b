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
from blobstore import QuantizedArray
from blobstore.errors import (
    CorruptDataError,
    NonFiniteWeightError,
    UnsupportedSourceError,
    UsageError,
)
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
HIDDEN, INNER = 128, 192
EXPERTS = "model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
CONFIG = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN}


def fused(dtype: Any = BF16) -> dict[str, Array]:
    """Return gpt-oss's experts as in its BF16 checkpoints, and an ordinary matrix."""
    return {
        GATE_UP: normal("up", 3, HIDDEN, 2 * INNER, dtype=dtype),
        f"{GATE_UP}_bias": normal("up bias", 3, 2 * INNER, dtype=dtype),
        DOWN: normal("down", 3, INNER, HIDDEN, dtype=dtype),
        f"{DOWN}_bias": normal("down bias", 3, HIDDEN, dtype=dtype),
        "model.layers.0.self_attn.o_proj.weight": normal("o", HIDDEN, 64, dtype=dtype),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of fused experts."""
    return write_checkpoint(tmp_path / "m", fused(), CONFIG)


def turned(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        ("int4", BF16),
        ("int8", np.float16),
        ("nvfp4", np.float32),
        ("mxfp4", np.float16),
        ("mxfp8", BF16),
    ],
    ids=str,
)
def test_groups_run_along_inputs(store: Store, tmp_path: Path, quant: str, dtype: Any) -> None:
    tensors = fused(dtype)
    blobstore.import_model(
        write_checkpoint(tmp_path / "m", tensors, CONFIG), "m", store=store, quant=quant
    )
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name in (GATE_UP, DOWN):
            stored = model[name].numpy()
            assert isinstance(stored, QuantizedArray)
            assert model[name].transposed
            assert model[name].shape == tensors[name].swapaxes(-1, -2).shape
            wanted = quantize(
                turned(tensors[name]),
                model[name].quant_type or "",
                group_size=model[name].group_size,
            )
            assert bits_of_parts(stored) == bits_of_parts(wanted)
        others = model.keys() - {GATE_UP, DOWN}
        assert not any(model[name].transposed for name in others)


def test_what_is_not_quantized_stays_as_it_is(store: Store, source: Path) -> None:
    blobstore.import_model(source, "m", store=store, quant="int4", rules=[f"{DOWN}=none"])
    with blobstore.open_model("m", store=store) as model:
        assert (model[DOWN].transposed, model[DOWN].quant_type) == (False, None)
        assert model[DOWN].raw() == fused()[DOWN].tobytes()
        assert model[GATE_UP].transposed


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "int4"},
        {"quant": "nvfp4", "global_scale": True, "dtype": "float32"},
    ],
    ids=str,
)
def test_the_size_of_runs_and_the_number_of_threads_change_nothing(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = blobstore.import_model(
        source, store=open_store(tmp_path / "whole"), jobs=1, **options
    ).digest
    for number, (chunk, jobs) in enumerate([(LEAST, 1), (4096, 3), (65_536, 2)]):
        store = open_store(tmp_path / str(number))
        with chunks_of(chunk):
            assert (
                blobstore.import_model(source, store=store, jobs=jobs, **options).digest == wanted
            ), (chunk, jobs)
        assert wrong_digests(store) == []


def test_an_export_of_values_has_the_sources_layout(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="nvfp4")
    export_model("m", tmp_path / "values", store=store, dequantize="float32")
    blobstore.import_model(tmp_path / "values", "again", store=store)
    with (
        blobstore.open_model("m", store=store) as model,
        blobstore.open_model("again", store=store) as again,
    ):
        for name, array in fused().items():
            values = model[name].dequantize()
            assert again[name].shape == array.shape
            assert np.array_equal(
                plain(again[name]), turned(values) if model[name].transposed else values
            )


def test_an_export_of_our_form_stores_the_same_again(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int4")
    export_model("m", tmp_path / "own", store=store)
    blobstore.import_model(tmp_path / "own", "again", store=store)
    with (
        blobstore.open_model("m", store=store) as model,
        blobstore.open_model("again", store=store) as again,
    ):
        facts = [
            {name: (one.blob, one.transposed) for name, one in each.items()}
            for each in (model, again)
        ]
    assert facts[0] == facts[1]


def test_an_export_quantized_again_stays_transposed(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int8")
    export_model("m", tmp_path / "own", store=store)
    blobstore.import_model(tmp_path / "own", "again", store=store, quant="int4", requantize=True)
    with (
        blobstore.open_model("m", store=store) as model,
        blobstore.open_model("again", store=store) as again,
    ):
        assert again[GATE_UP].transposed
        wanted = quantize(model[GATE_UP].dequantize("bfloat16"), "int4")
        stored = again[GATE_UP].numpy()
        assert isinstance(stored, QuantizedArray)
        assert bits_of_parts(stored) == bits_of_parts(wanted)


def test_an_error_names_the_place_in_the_source(store: Store, tmp_path: Path) -> None:
    tensors = fused()
    tensors[DOWN][2, 7, 31] = np.inf
    with pytest.raises(NonFiniteWeightError) as caught:
        blobstore.import_model(
            write_checkpoint(tmp_path / "m", tensors, CONFIG), "m", store=store, quant="int4"
        )
    assert (caught.value.tensor, caught.value.index) == (DOWN, (2, 7, 31))


@pytest.mark.parametrize(
    ("other", "is_first"),
    [({}, True), ({"quant": "int8", "profile": "ollama"}, False), ({"quant": "mxfp8"}, True)],
    ids=str,
)
def test_diff_compares_the_same_weights(
    store: Store, source: Path, other: dict[str, Any], is_first: bool
) -> None:
    blobstore.import_model(source, "turned", store=store, quant="int4")
    blobstore.import_model(source, "other", store=store, **other)
    names = ("turned", "other") if is_first else ("other", "turned")
    found = {
        change.before.name: change
        for change in diff_models(*names, store=store, error=True).changed
    }
    errors = found[DOWN].errors
    assert errors is not None
    assert errors.count == fused()[DOWN].size
    assert 0 < (errors.relative_rmse or 0) < 0.2
    measured = measure_quality("turned", source, store=store).tensors
    (quality,) = (tensor for tensor in measured if tensor.name == GATE_UP)
    assert 0 < (quality.errors.relative_rmse or 0) < 0.2
    if other.get("profile") == "ollama":
        with blobstore.open_model("other", store=store) as model:
            assert not any(tensor.transposed for tensor in model.values())


def test_a_target_measures_what_will_be_stored(store: Store, source: Path) -> None:
    blobstore.import_model(source, "m", store=store, target_bpw=5.0, rules=["*_bias=none"])
    with blobstore.open_model("m", store=store) as model:
        assert model[GATE_UP].transposed
        assert model[DOWN].transposed


def test_values_come_back_in_chunks_of_any_size(store: Store, tmp_path: Path) -> None:
    tensors = {GATE_UP: normal("up", 2, 64, 96), DOWN: normal("down", 2, 64, 64)}
    source = write_checkpoint(tmp_path / "m", tensors, {**CONFIG, "hidden_size": 64})
    blobstore.import_model(source, "m", store=store, quant="int4")
    files = []
    for number, (at_once, band) in enumerate(((2**20, 2**16), (1024, 96), (48, 2**16))):
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
    blobstore.import_model(
        write_checkpoint(tmp_path / "m", tensors, CONFIG), "m", store=store, quant="mxfp8"
    )
    with pytest.raises(UnsupportedSourceError, match="does not fit F16") as caught:
        export_model("m", tmp_path / "out", store=store, dequantize="float16")
    assert (caught.value.tensor, caught.value.index) == (DOWN, (2, 7, 31))


def metadata_of(**metadata: str) -> Header:
    """Return the header of a blob with one quantized matrix, and these metadata."""
    entries = lay_out(
        [
            ("x", DType.U32, (4, 8)),
            ("x.scale", DType.BF16, (4, 2)),
            ("x.bias", DType.BF16, (4, 2)),
            ("y", DType.BF16, (4, 8)),
        ]
    )
    return Header(entries, {"quant_type": "int4", "group_size": "32", **metadata}, 8)


@pytest.mark.parametrize(
    "metadata",
    [{"x.transposed": "yes"}, {"x.transposed": "false"}, {"y.transposed": "true"}],
    ids=str,
)
def test_metadata_that_can_not_be_are_damage(metadata: dict[str, str]) -> None:
    with pytest.raises(CorruptDataError, match="transposed") as caught:
        list(stored_tensors(metadata_of(**metadata)))
    assert caught.value.tensor == next(iter(metadata))[0]


def test_metadata_are_read_for_the_tensor_that_they_name() -> None:
    read = {
        tensor.name: tensor.transposed
        for tensor in stored_tensors(metadata_of(**{"x.transposed": "true"}))
    }
    assert read == {"x": True, "y": False}


def test_importance_is_that_of_inputs(store: Store, source: Path) -> None:
    weighed = np.linspace(0.1, 9, HIDDEN, dtype=np.float32)
    options: dict[str, Any] = {
        "quant": "int4",
        "method": "search",
        "rules": [f"{DOWN}=none", "*o_proj*=none"],
    }
    vectors = {GATE_UP: weighed}
    blobstore.import_model(source, "m", store=store, importance=vectors, **options)
    with blobstore.open_model("m", store=store) as model:
        stored = model[GATE_UP].numpy()
        assert isinstance(stored, QuantizedArray)
        wanted = quantize(turned(fused()[GATE_UP]), "int4", method="search", importance=weighed)
        assert bits_of_parts(stored) == bits_of_parts(wanted)
    with pytest.raises(UsageError, match=str(HIDDEN)):
        blobstore.plan_import(
            source, importance={GATE_UP: np.ones(2 * INNER, np.float32)}, **options
        )
