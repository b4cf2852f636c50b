"""Opening a model of very many blobs, against `safe_open` of the exported folder, in one run.

`python tests/bench/opening.py [--blobs N] [--rounds N] [--folder F]` makes a file of N BF16 tensors
of 4 KB, imports it unquantized and as int4, so that each tensor is a blob, exports both as folders,
and prints a Markdown table. Every measurement is a process of its own, the best of the rounds:
wall-clock and processor time, and the growth of its anonymous memory. The page cache is warm.
``names, types, shapes``: `open_model` and a pass over its tensors, against `safe_open` and
`get_slice` of each. ``arrays``: the same with each array as NumPy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.checkpoints import normal, safetensors_bytes

import blobstore

CHILD = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
import numpy

def anonymous():
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def ours(place, arrays):
    model = open_model("m", store=store)
    return [one.numpy() if arrays else (one.dtype, one.shape) for one in model.values()], model

def theirs(place, arrays):
    paths = sorted(Path(place).glob("*.safetensors"))
    files = [stack.enter_context(safe_open(path, "np")) for path in paths]
    if arrays:
        return [file.get_tensor(name) for file in files for name in file.keys()]
    slices = [file.get_slice(name) for file in files for name in file.keys()]
    return [(one.get_dtype(), one.get_shape()) for one in slices]

if sys.argv[1] == "ours":
    from blobstore import open_model, open_store
    store, read = open_store(sys.argv[2]), ours
else:
    import ml_dtypes
    from safetensors import safe_open
    read = theirs
with ExitStack() as stack:
    before, start, used = anonymous(), time.perf_counter(), time.process_time()
    found = read(sys.argv[2], sys.argv[3] == "arrays")
    print(time.perf_counter() - start, time.process_time() - used, anonymous() - before)
"""
MIB = 2**20
ROWS, COLS = 32, 64


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the store is made")
    arguments = parser.parse_args()
    table(
        *("blobs", "read", "by", "seconds", "ms a blob", "processor seconds", "ms a blob"),
        *("ratio", "anonymous memory, MiB", "ratio"),
    )
    with tempfile.TemporaryDirectory(prefix="blobstore-opening-", dir=arguments.folder) as folder:
        source = Path(folder) / "m.safetensors"
        source.write_bytes(many_tensors(arguments.blobs))
        for quant in (None, "int4"):
            measure(source, Path(folder) / str(quant), quant, arguments)


def many_tensors(count: int) -> bytes:
    """Return a file of so many matrices, most of them different."""
    pool = normal("pool", 1024 * ROWS, COLS)
    places = [number * 7 % (len(pool) - ROWS) for number in range(count)]
    return safetensors_bytes(
        {
            f"model.layers.{number // 10}.mlp.part{number % 10}.weight": pool[place : place + ROWS]
            for number, place in enumerate(places)
        }
    )


def measure(source: Path, work: Path, quant: str | None, arguments: argparse.Namespace) -> None:
    """Print the rows of one type."""
    store = blobstore.open_store(work / "store")
    blobstore.import_model(source, "m", store=store, quant=quant)
    blobstore.export_model("m", work / "exported", store=store)
    places = {"ours": work / "store", "theirs": work / "exported"}
    for what in ("names, types, shapes", "arrays"):
        found: dict[str, list[list[float]]] = {"ours": [], "theirs": []}
        for _ in range(arguments.rounds):
            for program, runs in found.items():
                runs.append(measured(program, places[program], what))
        best = {key: [min(each) for each in zip(*runs, strict=True)] for key, runs in found.items()}
        for program, name in (("theirs", "`safe_open`"), ("ours", "`open_model`")):
            seconds, used, memory = best[program]
            each = [f"{1000 * one / arguments.blobs:.4f}" for one in (seconds, used)]
            ratios = [mine / its for mine, its in zip(best[program], best["theirs"], strict=True)]
            show(
                (
                    *(f"{arguments.blobs:,}, {quant or 'unquantized'}", what, name),
                    *(f"{seconds:.2f}", each[0], f"{used:.2f}", each[1], f"{ratios[1]:.1f}"),
                    *(f"{memory / MIB:.0f}", f"{ratios[2]:.2f}"),
                )
            )


def measured(program: str, place: Path, what: str) -> list[float]:
    """Return seconds, processor seconds and bytes of memory of one process."""
    line = [sys.executable, "-c", CHILD, program, str(place), what]
    printed = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    return list(map(float, printed.split()))


if __name__ == "__main__":
    main()
