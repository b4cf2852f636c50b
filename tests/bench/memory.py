"""Memory of imports, and how it grows: ``python tests/bench/memory.py``.

Prints the largest anonymous memory (RssAnon and RssShmem, MB, samples 5 ms apart) of imports with
two threads: of a folder in shards, of one tensor of 2 GB, of experts of 3 GB, and of 25,000, 50,000
and 100,000 tensors of 4 KB, with seconds. ``bound`` is the largest VmHWM - RssFile, which can only
be too high. ``--size``: GB of the folder; all else keeps its proportion to it.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from processes import MemoryPeak, retire, run
from sources import FULL_SIZE_GB, Sources, warm
from tables import machine, show, table

MB = 1e6
TYPES = {"int4": ("--quant", "int4"), "none": ()}
COUNTS = (25_000, 50_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=FULL_SIZE_GB)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        print(f"{machine(Path(folder))}\n")
        table("type", "checkpoint", "seconds", "peak, MB", "bound, MB")
        measure(Sources(Path(folder), options.size))


def measure(sources: Sources) -> None:
    mixture = sources.mixture()
    checkpoints = {
        "folder in shards": (sources.shards(), ()),
        "one tensor of 2 GB": (sources.one_tensor(), ()),
        "experts of 3 GB, packed": (mixture, ("--experts", "packed")),
        "experts of 3 GB, stacked": (mixture, ("--experts", "stacked")),
    }
    for count in (int(sources.scale * count) for count in COUNTS):
        checkpoints[f"{count:,} tensors of 4 KB"] = (sources.many(count), ())
    store = sources.root / "store"
    for name, options in TYPES.items():
        for what, (source, more) in checkpoints.items():
            retire(store)
            os.sync()
            warm(source)
            peak = MemoryPeak()
            line = [sys.executable, "-m", "blobstore", "import", str(source), "m"]
            line += ["--store", str(store), "--jobs", "2", *options, *more]
            done = run(line, peak=peak)
            figures = (done.seconds, peak.anonymous / MB, peak.bound / MB)
            show((name, what, *(f"{figure:.1f}" for figure in figures)))


if __name__ == "__main__":
    main()
