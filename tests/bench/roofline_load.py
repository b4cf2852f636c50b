"""Load all tensors of a model: a process that roofline.py starts.

``roofline_load.py NAME STORE [verify]`` opens a stored model, ``roofline_load.py FOLDER`` reads a
folder's files with safetensors. Both get each tensor as a NumPy array, and a byte of each page.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 4096
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def load(name: str, store: str, *, verify: bool) -> None:
    """Read a model of a store on all cores."""
    # Not on top: safetensors' process does without.
    import blobstore
    from blobstore import hashing

    if method := os.environ.get("BLOBSTORE_SHA256"):
        hashing.use_method(method)
    home = blobstore.open_store(store)
    with (
        blobstore.open_model(name, store=home, verify=verify) as model,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        list(pool.map(lambda tensor: touch(model[tensor].numpy()), model))


def load_folder(folder: Path) -> None:
    """Read a folder's files with safetensors, one file in a thread."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(load_file, sorted(folder.glob("*.safetensors"))))


def load_file(path: Path) -> None:
    """Read all tensors of a file."""
    import ml_dtypes  # noqa: F401  # tells NumPy what BF16 is
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            touch(file.get_tensor(name))


def touch(array: Any) -> None:
    """Read a byte of each page of an array, or of the large arrays of a QuantizedArray."""
    parts = (array,) if isinstance(array, np.ndarray) else (array.weight, array.scale)
    for part in parts:
        part.reshape(-1).view(np.uint8)[::PAGE].sum()


def main(*line: str) -> None:
    """Load what the line says."""
    if len(line) == 1:
        load_folder(Path(line[0]))
    else:
        load(line[0], line[1], verify="verify" in line[2:])


if __name__ == "__main__":
    main(*sys.argv[1:])
