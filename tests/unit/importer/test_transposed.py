"""Weights stored as ``[..., in, out]``: grouped along the inputs, and restored."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits_of_parts
from support.checkpoints import BF16, normal, safetensors_bytes, write_checkpoint
from support.chunks import LEAST, chunks_of

import blobstore
from blobstore.errors import (
    CorruptDataError,
    NonFiniteWeightError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import Header, lay_out
from blobstore.inspection.comparison import diff_models
from blobstore.inspection.quality import measure_quality
from blobstore.kernels.quantize import quantize
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders
from blobstore.store.local.store import Store
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
    ("quant", "dtype", "chunk"),
    [("int4", BF16, LEAST), ("nvfp4", np.float32, 2**22), ("mxfp4", np.float16, LEAST)],
)
def test_along_inputs(store: Store, tmp_path: Path, quant: str, dtype: Any, chunk: int) -> None:
    tensors = fused(dtype)
    source = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    with chunks_of(chunk):
        blobstore.import_model(source, "m", store=store, quant=quant, rules=["*o_proj*=none"])
    with blobstore.open_model("m", store=store, verify=True) as model:
        for name in (GATE_UP, DOWN):
            size, kind = model[name].group_size, model[name].quant_type
            wanted = quantize(turned(tensors[name]), kind or "", group_size=size)
            assert bits_of_parts(model[name].numpy()) == bits_of_parts(wanted)
        assert {name for name in model if model[name].transposed} == {GATE_UP, DOWN}


def test_values_of_every_range(tmp_path: Path) -> None:
    for shape in ((5, 3), (2, 1, 3, 4)):
        array = normal("w", *shape)
        (tmp_path / "m.safetensors").write_bytes(safetensors_bytes({"x.weight": array}))
        weight = read_inventory(tmp_path / "m.safetensors").weights[0].as_transposed()
        wanted = turned(array).reshape(-1)
        with closing(SourceReaders()) as readers:
            for start, end in itertools.combinations(range(array.size + 1), 2):
                values = readers.values(weight, start, end - start)
                assert values.tobytes() == wanted[start:end].tobytes()
        assert [array[weight.stored_index(at)] for at in range(array.size)] == wanted.tolist()


def test_an_export_of_our_form_stores_the_same_again_and_can_be_quantized_again(
    store: Store, source: Path, tmp_path: Path
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int8")
    blobstore.export_model("m", tmp_path / "own", store=store)
    blobstore.import_model(tmp_path / "own", "again", store=store)
    blobstore.import_model(tmp_path / "own", "other", store=store, quant="int4", requantize=True)
    names = ("m", "again", "other")
    model, again, other = (blobstore.open_model(name, store=store) for name in names)
    facts = [{name: (t.blob, t.transposed) for name, t in one.items()} for one in (model, again)]
    assert facts[0] == facts[1]
    assert other[GATE_UP].transposed
    wanted = quantize(model[GATE_UP].dequantize("bfloat16"), "int4")
    assert bits_of_parts(other[GATE_UP].numpy()) == bits_of_parts(wanted)


def test_diff_and_quality_compare_the_same_weights(store: Store, source: Path) -> None:
    blobstore.import_model(source, "turned", store=store, quant="int4")
    blobstore.import_model(source, "other", store=store, quant="int8", profile="ollama")
    changes = diff_models("turned", "other", store=store, error=True).changed
    (compared,) = (change.errors for change in changes if change.before.name == DOWN)
    tensors = measure_quality("turned", source, store=store).tensors
    (measured,) = (tensor.errors for tensor in tensors if tensor.name == DOWN)
    for errors in (compared, measured):
        assert errors is not None
        assert errors.count == fused()[DOWN].size
        assert 0 < (errors.relative_rmse or 0) < 0.2


def test_a_bad_value_is_named_by_its_place_in_the_source(store: Store, tmp_path: Path) -> None:
    tensors = fused()
    tensors[DOWN][2, 7, 31] = 1e6
    source = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    blobstore.import_model(source, "m", store=store, quant="mxfp8")
    with pytest.raises(UnsupportedSourceError, match="does not fit F16") as exported:
        blobstore.export_model("m", tmp_path / "out", store=store, dequantize="float16")
    tensors[DOWN][2, 7, 31] = np.nan
    source = write_checkpoint(tmp_path / "m", tensors, CONFIG)
    with pytest.raises(NonFiniteWeightError) as imported:
        blobstore.import_model(source, "m", store=store, quant="int4")
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
    weights = turned(fused()[GATE_UP])
    how: dict[str, Any] = {"method": "search", "importance": weighed}
    with blobstore.open_model("m", store=store) as model:
        wanted = quantize(weights, "int4", group_size=model[GATE_UP].group_size, **how)
        assert bits_of_parts(model[GATE_UP].numpy()) == bits_of_parts(wanted)
    of_outputs = {GATE_UP: np.ones(2 * INNER, np.float32)}
    with pytest.raises(UsageError, match=str(HIDDEN)):
        blobstore.plan_import(source, importance=of_outputs, **options)
