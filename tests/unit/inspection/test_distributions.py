"""Distributions: every value and code is counted, of every type; samples are stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import raw_safetensors, small_tensors, write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.formats.quant import QuantType
from blobstore.inspection import quality
from blobstore.inspection.quality import Histogram, distribution_of, source_values, sources_of
from blobstore.kernels.arrays import QuantizedArray
from blobstore.model.loader import open_model
from blobstore.source.weights import SourceReaders
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj.weight"
Array = np.ndarray[Any, Any]


def histogram(values: Array) -> Histogram:
    exact = values.astype(np.float64)
    return quality._histogram(exact, *quality._range([exact]))


def codes_of(stored: QuantizedArray[Array]) -> Array:
    """Return the codes of a tensor, by their places in the words."""
    bits = stored.quant_type.bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (stored.weight[..., None] >> shifts) & np.uint32(2**bits - 1)


@pytest.mark.parametrize("kind", [QuantType.INT4, QuantType.NVFP4, QuantType.MXFP8])
def test_values_and_codes_of_every_quantized_type(
    store: Store, tmp_path: Path, kind: QuantType
) -> None:
    source = write_checkpoint(tmp_path / "s", small_tensors())
    blobstore.import_model(source, "m", store=store, quant=str(kind), rules=[f"{UP}={kind}"])
    with open_model("m", store=store) as model:
        found, tensor = distribution_of(model[UP]), model[UP]
        stored = tensor.numpy()
        assert isinstance(stored, QuantizedArray)
        values = tensor.dequantize()
        assert found.type_name == f"{kind}/{tensor.group_size}"
        assert (found.size, found.read, found.is_sample) == (values.size, values.size, False)
        assert (found.values.low, found.values.high) == (values.min(), values.max())
        wanted, _ = np.histogram(values.astype(np.float64), found.values.edges)
        assert abs(np.array(found.values.counts) - wanted).max() <= 2  # values on an edge
        assert sum(found.values.counts) == values.size
        counted = np.bincount(codes_of(stored).reshape(-1), minlength=2**kind.bits)
        assert found.codes == tuple(counted.tolist())
        assert found.code_values is not None
        assert len(found.code_values) == len(found.codes)
        assert sum(found.codes) == values.size


def test_codes_stand_for_numbers() -> None:
    assert quality._code_values(QuantType.INT4) == tuple(range(16))
    fp4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # OCP Microscaling Formats 1.0, table 5
    assert quality._code_values(QuantType.NVFP4) == (*fp4, *(-value for value in fp4))
    fp8 = quality._code_values(QuantType.MXFP8)
    assert (max(np.nan_to_num(fp8)), np.isnan(fp8).sum()) == (448, 2)


def test_the_source_is_counted_in_the_same_bins(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", tensors := small_tensors())
    blobstore.import_model(source, "m", store=store, quant="int4")
    readers = SourceReaders()
    with open_model("m", store=store) as model:
        pairs = {tensor.name: made_from for tensor, made_from in sources_of(model, str(source))}
        found = distribution_of(model[UP], source_values(pairs[UP], readers))
    readers.close()
    weights = tensors[UP].astype(np.float64)
    assert found.source is not None
    assert (found.source.low, found.source.high) == (found.values.low, found.values.high)
    assert found.source.high >= weights.max()
    assert sum(found.source.counts) == weights.size
    assert found.source.rms == pytest.approx(np.sqrt(np.mean(weights**2)))
    assert found.source.counts != found.values.counts


def test_a_large_tensor_is_sampled_evenly_and_always_the_same(store: Store, tmp_path: Path) -> None:
    ramp = np.arange(2**16, dtype=np.float32).reshape(256, 256)
    source = write_checkpoint(tmp_path / "s", {**small_tensors(), "ramp": ramp})
    blobstore.import_model(source, "m", store=store)
    with open_model("m", store=store) as model:
        found = distribution_of(model["ramp"], most=2**13)
        again = distribution_of(model["ramp"], most=2**13)
        with pytest.raises(UsageError, match="too few"):
            distribution_of(model["ramp"], most=4095)
    assert found == again
    assert (found.size, found.read, found.is_sample) == (2**16, 2**13, True)
    assert found.values.total == found.read
    assert (found.values.low, found.values.high) == (0, 2**15 + 2**12 - 1)


@pytest.mark.parametrize(
    ("values", "finite", "infinite", "nan"),
    [
        ([1.0, 1 + 2**-52], 2, 0, 0),
        ([-1.7e308, 1.7e308, np.inf, -np.inf, np.nan], 2, 2, 1),
        ([5e-324, 0.0], 2, 0, 0),
        ([], 0, 0, 0),
        ([np.nan], 0, 0, 1),
    ],
)
def test_odd_values_are_counted_apart(
    values: list[float], finite: int, infinite: int, nan: int
) -> None:
    found = histogram(np.array(values))
    assert (sum(found.counts), found.infinite, found.nan) == (finite, infinite, nan)
    assert found.total == len(values)
    assert np.isfinite([found.rms, *found.edges]).all()


DTYPES: tuple[Any, ...] = (
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.int8),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
)


def test_every_dtype_is_counted(store: Store, tmp_path: Path) -> None:
    values = {f"odd.{n}": np.arange(1, 9).astype(dtype) for n, dtype in enumerate(DTYPES)}
    source = write_checkpoint(tmp_path / "s", {**small_tensors(), **values})
    blobstore.import_model(source, "m", store=store)
    with open_model("m", store=store) as model:
        for name, array in values.items():
            found, exact = distribution_of(model[name]), array.astype(np.float64)
            assert found.codes is None
            assert (found.values.low, found.values.high) == (exact.min(), exact.max())
            assert sum(found.values.counts) == 8


def test_what_has_no_histogram_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    header = {
        "complex": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]},
        "small": {"dtype": "F4", "shape": [2], "data_offsets": [16, 17]},
    }
    (tmp_path / "m.safetensors").write_bytes(raw_safetensors(header, bytes(17)))
    blobstore.import_model(tmp_path / "m.safetensors", "m", store=store)
    with open_model("m", store=store) as model:
        for tensor in model.values():
            with pytest.raises(UnsupportedSourceError):
                distribution_of(tensor)
