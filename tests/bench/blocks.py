"""Block FP8 in stacks of small matrices: `python tests/bench/blocks.py [MB]` prints a table.

Each row is one tensor of so many megabytes of codes and F32 scales together (default 50), imported
by a process of its own: the last two columns are its processor time and its peak memory over those
of the first row, in the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZES = ((128, 128), (1, 1), (1, 2), (2, 1), (4, 128), (1, 129), (129, 1))
NAME = "model.layers.0.mlp.w.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def write_source(folder: Path, rows: int, cols: int, nbytes: float) -> int:
    """Write a checkpoint of one stack of matrices, and return how many these are."""
    blocks = (-(-rows // 128), -(-cols // 128))
    matrices = int(nbytes / (rows * cols + 4 * blocks[0] * blocks[1]))
    middle = matrices * rows * cols
    end = middle + 4 * matrices * blocks[0] * blocks[1]
    header = {
        NAME: {"dtype": "F8_E4M3", "shape": (matrices, rows, cols), "data_offsets": (0, middle)},
        f"{NAME}_scale_inv": {
            "dtype": "F32",
            "shape": (matrices, *blocks),
            "data_offsets": (middle, end),
        },
    }
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines([len(text).to_bytes(8, "little"), text])
        file.writelines(repeated(np.arange(0x70, dtype=np.uint8), middle))
        file.writelines(repeated(np.full(1, 0.01, np.float32), end - middle))
    return matrices


def repeated(values: np.ndarray[Any, Any], nbytes: int) -> Iterator[bytes]:
    """Yield so many bytes in pieces.

    The kernel counts the memory that this process once had as its children's, too.
    """
    piece = np.resize(values, 2**20 // values.nbytes * values.size).tobytes()
    for start in range(0, nbytes, len(piece)):
        yield piece[: nbytes - start]


def cost_of_import(source: Path, store: Path) -> tuple[float, float]:
    """Return seconds of processor time, and MiB of memory at most, of a process that imports."""
    command = [sys.executable, "-m", "blobstore", "import", str(source), "m", "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**10


def main(megabytes: float = 50) -> None:
    """Print the table."""
    print(f"{megabytes:g} MB of codes and scales a row.\n")
    print(
        "| matrices | processor time, s | memory, MiB | time over whole blocks | memory over "
        "whole blocks |"
    )
    print("| --- | --- | --- | --- | --- |")
    whole: tuple[float, float] | None = None
    for rows, cols in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            matrices = write_source(source, rows, cols, megabytes * 1e6)
            cost = cost_of_import(source, Path(folder) / "store")
        whole = whole or cost
        ratios = " | ".join(
            f"{mine / theirs:.2f}" for mine, theirs in zip(cost, whole, strict=True)
        )
        print(
            f"| {matrices:,} of {rows} x {cols} | {cost[0]:.2f} | {cost[1]:.0f} | {ratios} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
