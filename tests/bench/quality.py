"""Speed of `blobstore quality`: `python tests/bench/quality.py [--size GB] [--rounds N]`.

All rates are GB of BF16 source for each second of processor time, of one thread, the best of
several rounds; the peer computes the same sums in the same run.

The first table is of the kernels: 2^19 weights at a time, as `quality` compares them, in cache. The
peer dequantizes to float32 with MLX and takes differences, products and sums in float64 with NumPy,
without counting what is saturated. The second table is of `measure_quality`, start of Python
excluded, on a Qwen3-like folder in the page cache; its peer loads the same tensors with MLX.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from import_sources import Sources, warm
from kernels import CASES, machine
from search import BF16, from_mlx
from tables import show, table

import blobstore
from blobstore import kernels
from blobstore.kernels.arrays import QuantizedArray, mapped
from blobstore.model.tensors import mlx_of
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]

ROWS, COLS = 256, 2048


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Return the least processor time of several runs, of all threads."""
    found = []
    for _ in range(rounds):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return min(found)


def sums(weights: Array, read: Array) -> tuple[float, ...]:
    """Return the sums of a comparison, with NumPy in float64."""
    exact, back = weights.astype(np.float64), read.astype(np.float64)
    error = back - exact
    pairs = ((error, error), (exact, exact), (back, back), (exact, back))
    return (*(float(np.sum(a * b)) for a, b in pairs), float(np.abs(error).max(initial=0)))


def read_back(parts: QuantizedArray[Any]) -> Array:
    """Return the values of MLX's arrays as float32, dequantized with MLX."""
    kind = parts.quant_type
    mode: dict[str, Any] = {"group_size": parts.group_size, "bits": kind.bits, "mode": kind.mode}
    return np.array(
        mx.dequantize(parts.weight, parts.scale, parts.bias, dtype=mx.float32, **mode)
    ).reshape(-1)


def of_mlx(parts: QuantizedArray[Array]) -> QuantizedArray[Any]:
    """Return the arrays as MLX's."""
    return mapped(parts, mlx_of)


def of_kernels(rounds: int) -> None:
    """Print the table of the kernels."""
    weights = np.random.default_rng(0).standard_normal((ROWS, COLS), dtype=np.float32)
    table("kernels", "type", "GB/s a core", "NumPy and MLX", "ratio")
    for name in kernels.KERNELS:
        if name not in ("native", "reference"):
            for quant_type, group_size in CASES:
                of_kernel(name, f"{quant_type}/{group_size}", weights.astype(BF16), rounds)


def of_kernel(name: str, kind: str, weights: Array, rounds: int) -> None:
    """Print one row."""
    quant_type, group_size = kind.split("/")
    parts = kernels.quantize(weights, quant_type, group_size=int(group_size))
    kernel, flat, theirs = kernels.KERNELS[name], weights.reshape(-1), of_mlx(parts)
    ours = seconds(lambda: kernels.compare(flat, parts, kernel=kernel), 10 * rounds)
    peer = seconds(lambda: sums(flat, read_back(theirs)), rounds)
    show_rates((name, kind), flat.nbytes / 1e9, ours, peer)


def show_rates(cells: Iterable[str], gigabytes: float, ours: float, peer: float) -> None:
    """Print a row that ends with both rates and our advantage."""
    show((*cells, f"{gigabytes / ours:.2f}", f"{gigabytes / peer:.2f}", f"{peer / ours:.1f}x"))


def of_models(work: Path, size: float, rounds: int) -> None:
    """Print the table of whole models."""
    source, store = Sources(work / "sources", size).shards(), blobstore.open_store(work / "store")
    warm(source)
    table("type", "weights, GB", "seconds", "GB/s a core", "NumPy and MLX", "ratio")
    for quant_type in dict.fromkeys(case[0] for case in CASES):
        blobstore.import_model(source, quant_type, store=store, quant=quant_type)
        of_model(quant_type, source, store, rounds)


def of_model(name: str, source: Path, store: Store, rounds: int) -> None:
    """Print one row."""
    report = blobstore.measure_quality(name, source, store=store)
    gigabytes = 2 * report.errors.count / 1e9
    ours = seconds(lambda: blobstore.measure_quality(name, source, store=store, jobs=1), rounds)
    peer = seconds(lambda: with_numpy(name, source, store), 1)
    show_rates((name, f"{gigabytes:.2f}", f"{ours:.2f}"), gigabytes, ours, peer)


def with_numpy(name: str, source: Path, store: Store) -> None:
    """Compare all quantized tensors of a model with its source, tensor by tensor."""
    weights: dict[str, Any] = {}
    for path in sorted(source.glob("*.safetensors")):
        loaded: Any = mx.load(str(path))
        weights |= loaded
    with blobstore.open_model(name, store=store) as model:
        for tensor in model.values():
            if tensor.quant_type is not None:
                read = read_back(tensor.mlx())
                sums(from_mlx(weights.pop(tensor.name)).reshape(-1), read)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=0.91, help="gigabytes of the folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    print(machine())
    of_kernels(arguments.rounds)
    print()
    with tempfile.TemporaryDirectory(prefix="blobstore-quality-", dir=arguments.work) as work:
        of_models(Path(work), arguments.size, arguments.rounds)


if __name__ == "__main__":
    main()
