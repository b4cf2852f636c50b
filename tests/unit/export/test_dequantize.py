"""``--dequantize``: values equal `Tensor.dequantize`, and config.json describes them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.arrays import bits
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.exports import mixture_tensors, raw_tensors
from support.prequantized_sources import mlx_model

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.store.local.store import Store

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors into several runs, and write every whole page of them around the page cache."""
    monkeypatch.setattr("blobstore.export.values.VALUES_AT_ONCE", 4096)
    monkeypatch.setattr("blobstore.io.durable.DIRECT_FROM", 1)


def assert_dequantized(store: Store, folder: Path, dtype: str, names: set[str]) -> None:
    """Assert that the folder has exactly the values of model ``m`` in ``dtype``, or integers."""
    found = raw_tensors(folder)
    assert found.keys() == names
    with blobstore.open_model("m", store=store) as model:
        for name, tensor in model.items():
            kept = tensor.quant_type is None and not tensor.dtype.is_float
            if kept and tensor.dtype.value != "F64":
                assert found[name] == (tensor.dtype.value, tensor.shape, bits(tensor.numpy()))
            elif name in found:
                assert found[name] == (DTYPES[dtype], tensor.shape, bits(tensor.dequantize(dtype)))
            else:  # a stack that was taken apart
                group, projection = name.split("experts.")
                numbers = range(tensor.shape[0])
                experts = [found[f"{group}experts.{number}.{projection}"] for number in numbers]
                assert b"".join(expert[2] for expert in experts) == bits(tensor.dequantize(dtype))
                assert all(expert[:2] == (DTYPES[dtype], tensor.shape[1:]) for expert in experts)


@pytest.mark.parametrize(
    ("quant", "dtype", "experts"),
    [(None, "float16", "packed"), ("nvfp4", "float32", "stacked"), ("mxfp4", "bfloat16", "packed")],
)
def test_values(store: Store, tmp_path: Path, quant: str | None, dtype: str, experts: str) -> None:
    tensors = mixture_tensors(np.float32 if dtype == "bfloat16" else ml_dtypes.bfloat16)
    tensors["wide"] = np.linspace(-3, 3, 64).reshape(8, 8)
    config = {**LLAMA_CONFIG, "dtype": "bfloat16", "torch_dtype": None}
    source = write_checkpoint(tmp_path / "in", tensors, config)
    blobstore.import_model(
        source, "m", store=store, quant=quant, experts=experts, global_scale=quant == "nvfp4"
    )
    out = tmp_path / "out"
    blobstore.export_model("m", out, store=store, dequantize=dtype, max_shard_size=100_000)
    assert_dequantized(store, out, dtype, set(tensors))
    assert json.loads((out / "config.json").read_bytes()) == {**config, "dtype": dtype}


def test_a_quantized_source_and_its_claims(store: Store, tmp_path: Path) -> None:
    tensors = {"a.weight": normal("a", 64, 64), "n.norm": normal("n", 64)}
    config = {
        **LLAMA_CONFIG,
        "quantization": {"group_size": 32, "bits": 4},
        "text_config": {"torch_dtype": "float16", "hidden_size": 64},
    }
    source = write_checkpoint(tmp_path / "in", mlx_model(tensors, (32, 4, "affine")), config)
    blobstore.import_model(source, "m", store=store)
    result = blobstore.export_model("m", tmp_path / "out", store=store, dequantize="float32")
    assert_dequantized(store, tmp_path / "out", "float32", set(tensors))
    assert "config.json" in result.notes[0]
    written = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(written) == {
        **LLAMA_CONFIG,
        "text_config": {"torch_dtype": "float32", "hidden_size": 64},
        "torch_dtype": "float32",
    }
    assert written.endswith("\n}\n")


def test_a_value_that_does_not_fit_is_named(store: Store, tmp_path: Path) -> None:
    weights = np.ones((64, 64), np.float32)
    weights[40, 0] = 70_000
    source = write_checkpoint(tmp_path / "in", {"a.weight": weights})
    for quant in (None, "int4"):
        blobstore.import_model(source, "m", store=store, quant=quant)
        with pytest.raises(UnsupportedSourceError, match=r"\[40, 0\]") as caught:
            blobstore.export_model("m", tmp_path / "out", store=store, dequantize="float16")
        assert (caught.value.tensor, caught.value.index) == ("a.weight", (40, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store"]


def test_arrays_at_odd_places_and_odd_values(store: Store, tmp_path: Path) -> None:
    """The file has the source's order, which the safetensors library would not have written."""
    tensors = {
        "odd": np.arange(3, dtype=np.int8),
        "a.weight": normal("a", 128, 96),
        "b": np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45, 3.0], np.float32),
        "c.weight": normal("c", 64, 64),
    }
    blobstore.import_model(write_checkpoint(tmp_path / "in", tensors), "m", store=store)
    blobstore.export_model("m", tmp_path / "out", store=store, dequantize="bfloat16")
    assert list(raw_tensors(tmp_path / "out")) == list(tensors)
    assert_dequantized(store, tmp_path / "out", "bfloat16", set(tensors))
