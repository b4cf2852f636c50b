"""Speed of the kernels beside MLX's on a CPU, one thread each: `python tests/bench/kernels.py` prints a Markdown table.

The rate is in GB/s of BF16 weights, 2048 x 4096; the best of five runs each, alternating. MLX runs eagerly on one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from blobstore import kernels

SHAPE = (2048, 4096)
ROUNDS = 5
CASES = (("int4", 32), ("int4", 64), ("int8", 64), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32))


def best(run: Callable[[], object]) -> float:
    """Return the shortest of several runs, in seconds."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print the table."""
    import mlx.core as mx

    weights = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32).astype(ml_dtypes.bfloat16)
    theirs = mx.array(weights.view(np.uint16)).view(mx.bfloat16)
    gigabytes = weights.nbytes / 1e9
    copy = best(weights.copy)
    print("| type | quantize, GB/s | vs mx.quantize | vs a copy | dequantize, GB/s | vs mx.dequantize |")
    print("|---|---|---|---|---|---|")
    for name, group_size in CASES:
        quantized = kernels.quantize(weights, name, group_size=group_size)
        mode = {"group_size": group_size, "bits": quantized.quant_type.bits, "mode": quantized.quant_type.mode}
        parts = mx.quantize(theirs, **mode)
        mx.eval(parts)
        ours = best(lambda name=name, group_size=group_size: kernels.quantize(weights, name, group_size=group_size))
        mlx = best(lambda mode=mode: mx.eval(mx.quantize(theirs, **mode)))
        back = best(lambda quantized=quantized: kernels.dequantize(quantized))
        mlx_back = best(lambda parts=parts, mode=mode: mx.eval(mx.dequantize(*parts, **mode)))
        print(
            f"| {name}/{group_size} | {gigabytes / ours:.2f} | {mlx / ours:.1f}x | {copy / ours:.2f} "
            f"| {gigabytes / back:.2f} | {mlx_back / back:.1f}x |"
        )


if __name__ == "__main__":
    os.sched_setaffinity(0, {0})
    main()
