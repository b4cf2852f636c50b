"""Speed of the kernels beside other libraries on a CPU: `python tests/bench/kernels.py`.

Rates are GB/s of BF16 weights, 2048 x 4096, normal; the best of several alternating runs. Both
sides are called through their Python functions and own their results. "in cache": one input of 16
MiB again and again. "from memory": 24 such inputs in turn, and a copy to as many places, so that
neither side finds its input in a cache.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from tables import machine, show, table

from blobstore import kernels

SHAPE = (2048, 4096)
ROUNDS = 7
INPUTS = 24
CASES = (("int4", 32), ("int4", 64), ("int8", 64), ("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16))
HEADINGS = (
    "kernels",
    "type",
    "quantize",
    "vs mx.quantize",
    "of a copy, from memory",
    "of a copy, in cache",
    "dequantize to BF16",
    "vs mx.dequantize",
    "search",
)
BYTES = 2 * SHAPE[0] * SHAPE[1]


def rate(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    return BYTES / 1e9 / min(seconds(run) for _ in range(rounds))


def seconds(run: Callable[[], object]) -> float:
    """Return how long one run takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def rate_from_memory(run: Callable[[int], object]) -> float:
    """Return GB/s of the fastest of three rounds over all inputs; each result is dropped."""

    def run_all() -> None:
        for i in range(INPUTS):
            run(i)

    return INPUTS * BYTES / 1e9 / min(seconds(run_all) for _ in range(3))


def measure(
    kernel: str,
    case: tuple[str, int],
    inputs: list[Any],
    copies: dict[str, float],
    theirs: tuple[float, float],
) -> None:
    quant_type, group_size = case
    options: dict[str, Any] = {"group_size": group_size, "kernel": kernels.KERNELS[kernel]}
    quantized = kernels.quantize(inputs[0], quant_type, **options)
    cached = rate(lambda: kernels.quantize(inputs[0], quant_type, **options))
    memory = rate_from_memory(lambda i: kernels.quantize(inputs[i], quant_type, **options))
    back = rate(lambda: kernels.dequantize(quantized, "bfloat16", kernel=options["kernel"]))
    rows = inputs[0][: SHAPE[0] // 8]
    search = rate(lambda: kernels.quantize(rows, quant_type, method="search", **options), 2) / 8
    show(
        (
            kernel,
            f"{quant_type}/{group_size}",
            f"{cached:.2f}",
            f"{cached / theirs[0]:.1f}x",
            f"{memory / copies['from memory']:.2f}",
            f"{cached / copies['in cache']:.2f}",
            f"{back:.2f}",
            f"{back / theirs[1]:.1f}x",
            f"{search:.2f}",
        )
    )


def rate_of_mlx(case: tuple[str, int], weights: Any) -> tuple[float, float]:
    quant_type, group_size = case
    kind = kernels.quantization_of(quant_type, group_size).quant_type
    mode: dict[str, Any] = {"group_size": group_size, "bits": kind.bits, "mode": kind.mode}
    array = mx.array(weights.view(np.uint16)).view(mx.bfloat16)
    parts = mx.quantize(array, **mode)
    mx.eval(array, parts)
    forth = rate(lambda: mx.eval(mx.quantize(array, **mode)), 3)
    return forth, rate(lambda: mx.eval(mx.dequantize(*parts, **mode)), 3)


def main(*chosen: str) -> None:
    """Print the table for the kernels named, or for all native ones."""
    weights = (
        np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32).astype(ml_dtypes.bfloat16)
    )
    inputs = [weights.copy() for _ in range(INPUTS)]
    places = [np.zeros_like(weights) for _ in range(INPUTS)]
    copies = {
        "in cache": rate(lambda: np.copyto(places[0], inputs[0])),
        "from memory": rate_from_memory(lambda i: np.copyto(places[i], inputs[i])),
    }
    theirs = {case: rate_of_mlx(case, weights) for case in CASES}
    print(machine(Path(), ("mlx", "numpy")))
    print(f"One thread; GB/s of BF16, {SHAPE[0]} x {SHAPE[1]}.")
    print(
        f"A copy (memcpy): {copies['from memory']:.1f} from memory, {copies['in cache']:.1f} "
        "in cache.\n"
    )
    table(*HEADINGS)
    names = chosen or [name for name in kernels.KERNELS if name not in ("native", "reference")]
    for kernel in names:
        for case in CASES:
            measure(kernel, case, inputs, copies, theirs[case])


if __name__ == "__main__":
    os.sched_setaffinity(0, {0})
    main(*sys.argv[1:])
