"""Distributions: every value and code is counted, of every type; samples are stated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import raw_safetensors, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.formats.dtypes import QuantType
from blobstore.inspection.quality import distribution_of, source_values, sources_of
from blobstore.kernels.arrays import QuantizedArray
from blobstore.model.loader import Model, open_model
from blobstore.source.weights import SourceReaders
from blobstore.store.local.store import Store

UP = "model.layers.0.mlp.up_proj.weight"
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # OCP Microscaling Formats 1.0, table 5
CODES = {"int4": range(16), "nvfp4": (*FP4, *(-value for value in FP4))}


def stored(store: Store, folder: Path, arrays: dict[str, Any]) -> Model:
    (folder / "m.safetensors").write_bytes(safetensors_bytes(arrays))
    blobstore.import_model(folder / "m.safetensors", "m", store=store)
    return open_model("m", store=store)


@pytest.mark.parametrize("kind", [QuantType.INT4, QuantType.NVFP4, QuantType.MXFP8])
def test_values_and_codes_when_quantized(store: Store, tmp_path: Path, kind: QuantType) -> None:
    source = write_checkpoint(tmp_path / "s")
    blobstore.import_model(source, "m", store=store, quant=str(kind), rules=[f"{UP}={kind}"])
    with open_model("m", store=store) as model:
        tensor = model[UP]
        found, parts, values = distribution_of(tensor), tensor.numpy(), tensor.dequantize()
    assert isinstance(parts, QuantizedArray)
    assert (found.size, found.read, found.is_sample) == (values.size, values.size, False)
    assert (found.values.low, found.values.high) == (values.min(), values.max())
    wanted, _ = np.histogram(values.astype(np.float64), found.values.edges)
    assert abs(np.array(found.values.counts) - wanted).max() <= 2  # values on an edge
    assert sum(found.values.counts) == values.size
    shifts = np.arange(0, 32, kind.bits, dtype=np.uint32)
    codes = (parts.weight[..., None] >> shifts) & np.uint32(2**kind.bits - 1)
    assert found.codes == tuple(np.bincount(codes.reshape(-1), minlength=2**kind.bits).tolist())
    assert found.code_values is not None
    if str(kind) in CODES:
        assert found.code_values == tuple(CODES[str(kind)])
    else:
        assert (max(np.nan_to_num(found.code_values)), len(found.code_values)) == (448, 256)


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
    assert found.source.edges == found.values.edges
    assert sum(found.source.counts) == weights.size
    assert found.source.rms == pytest.approx(np.sqrt(np.mean(weights**2)))
    assert found.source.counts != found.values.counts


def test_a_large_tensor_is_sampled_evenly_and_always_the_same(store: Store, tmp_path: Path) -> None:
    ramp = np.arange(2**16, dtype=np.float32).reshape(256, 256)
    with stored(store, tmp_path, {"ramp": ramp}) as model:
        found = distribution_of(model["ramp"], most=2**13)
        assert found == distribution_of(model["ramp"], most=2**13)
        with pytest.raises(UsageError, match="too few"):
            distribution_of(model["ramp"], most=4095)
    assert (found.size, found.read, found.is_sample) == (2**16, 2**13, True)
    assert sum(found.values.counts) == found.read
    assert (found.values.low, found.values.high) == (0, 2**15 + 2**12 - 1)


ODD: list[tuple[list[float], int, int, int]] = [
    ([1.0, 1 + 2**-52], 2, 0, 0),
    ([-1.7e308, 1.7e308, np.inf, -np.inf, np.nan], 2, 2, 1),
    ([5e-324, 0.0], 2, 0, 0),
    ([], 0, 0, 0),
    ([np.nan], 0, 0, 1),
]


def test_odd_values_are_counted_apart(store: Store, tmp_path: Path) -> None:
    with stored(store, tmp_path, {f"odd{n}": np.array(r[0]) for n, r in enumerate(ODD)}) as model:
        for number, (values, finite, infinite, nan) in enumerate(ODD):
            found = distribution_of(model[f"odd{number}"]).values
            assert (sum(found.counts), found.infinite, found.nan) == (finite, infinite, nan)
            assert sum(found.counts) + found.infinite + found.nan == len(values)
            assert np.isfinite([found.rms, *found.edges]).all()


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
