"""Packed models: how small they are, and the processor time of `pack` and `unpack`.

``TMPDIR=/dev/shm python tests/bench/packing.py`` prints a table of a blob of 2^25 normal weights,
0.02 wide, and one thread: MB of the blob in a second of processor time.
"""

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
from tables import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.checkpoints import write_checkpoint

import blobstore

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
DTYPES = {"BF16": BF16, "F16": np.float16, "F32": np.float32, "F8_E4M3": FP8}


def measure(root: Path, what: str, weights: np.ndarray, quant: str | None) -> None:
    name = "values" if quant is None else "model.layers.0.mlp.up_proj.weight"
    source = write_checkpoint(root / what, {name: weights})
    store = blobstore.open_store(root / f"{what}.store")
    blobstore.import_model(source, "m", store=store, quant=quant)
    times = [time.process_time()]
    packed = blobstore.pack(store, "m", jobs=1)
    times.append(time.process_time())
    blobstore.unpack(store, "m", jobs=1)
    times.append(time.process_time())
    speeds = (f"{packed.nbytes / 1e6 / (b - a):.0f}" for a, b in pairwise(times))
    show((what, f"{packed.stored / packed.nbytes:.3f}", *speeds))


def main() -> None:
    weights = np.random.default_rng(0).standard_normal((8192, 4096), np.float32) * np.float32(0.02)
    with tempfile.TemporaryDirectory() as folder:
        table("weights", "packed", "pack, MB/s", "unpack, MB/s")
        for name, dtype in DTYPES.items():
            measure(Path(folder), name, weights.astype(dtype), None)
        measure(Path(folder), "codes of int4", weights.astype(BF16), "int4")


if __name__ == "__main__":
    main()
