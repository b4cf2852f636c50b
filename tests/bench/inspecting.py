"""Time of inspecting a folder of many tensors, beside huggingface_hub and safetensors.

``python tests/bench/inspecting.py [--tensors N] [--shards N] [--times N]``: a mixture of experts in
sparse shards with an index. Whole processes, start included, and the functions alone: seconds, the
best of some runs and the median, and the best of processor seconds, which are what counts where
other programs run too. All count parameters by dtype, and the same.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.sparse import Tensor, write_sparse_folder

EXPERTS = 128
PROJECTIONS = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}

HUB = """
import json, sys
from huggingface_hub.hf_api import get_local_safetensors_metadata
print(json.dumps(get_local_safetensors_metadata(sys.argv[1]).parameter_count))
"""
SAFETENSORS = """
import json, math, pathlib, sys
from collections import Counter
from safetensors import safe_open
counts = Counter()
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    with safe_open(path, "numpy") as file:
        for name in file.keys():
            part = file.get_slice(name)
            counts[part.get_dtype()] += math.prod(part.get_shape())
print(json.dumps(counts))
"""


def mixture(count: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a mixture of experts, ``count`` of them."""
    for number in range(count):
        expert, projection = divmod(number, len(PROJECTIONS))
        layer, expert = divmod(expert, EXPERTS)
        name = list(PROJECTIONS)[projection]
        yield (
            f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight",
            ("BF16", PROJECTIONS[name]),
        )


def timed(call: Callable[[], object], times: int) -> str:
    """Return the cells of a table for some calls, after one that warms up.

    A child's processor seconds count too.
    """
    call()
    seconds, busy = [], []
    for _ in range(times):
        started, worked = time.perf_counter(), processor_seconds()
        call()
        seconds.append(time.perf_counter() - started)
        busy.append(processor_seconds() - worked)
    return f"{min(seconds):.2f} ({statistics.median(seconds):.2f}) | {min(busy):.2f}"


def processor_seconds() -> float:
    """Return the processor seconds of this process and its children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(*line: str | Path) -> bytes:
    """Run a process, with compiled modules as on a user's machine, and return what it prints."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
    }
    return subprocess.run(
        list(map(str, line)), capture_output=True, check=True, env=environment
    ).stdout


def process(*line: str | Path) -> dict[str, int]:
    """Run a process, and return the counts that it prints."""
    document = json.loads(run(*line))
    counts: dict[str, int] = document.get("parameter_count", document)
    return counts


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=40_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_sparse_folder(
            Path(temporary), dict(mixture(options.tensors)), {}, shards=options.shards
        )
        python = [sys.executable, "-c"]
        processes: dict[str, list[str | Path]] = {
            "`blobstore inspect FOLDER --json`": [
                sys.executable,
                "-m",
                "blobstore",
                "inspect",
                folder,
                "--json",
            ],
            "huggingface_hub `get_local_safetensors_metadata`": [*python, HUB, folder],
            "safetensors `safe_open`, `get_slice` of each": [*python, SAFETENSORS, folder],
        }
        counts = [process(*line) for line in processes.values()]
        assert counts[0] == counts[1] == counts[2], counts
        text: list[str | Path] = [sys.executable, "-m", "blobstore", "inspect", folder]
        rows: dict[str, Callable[[], object]] = {"`blobstore inspect FOLDER`": lambda: run(*text)}
        rows |= {name: functools.partial(run, *line) for name, line in processes.items()}
        print(f"{options.tensors:,} tensors in {options.shards} shards\n")
        print("| whole process | seconds, best (median) | processor seconds |\n|---|---|---|")
        for name, call in rows.items():
            print(f"| {name} | {timed(call, options.times)} |", flush=True)
        print("\n| function | seconds, best (median) | processor seconds |\n|---|---|---|")
        for name, function in functions(folder).items():
            print(f"| {name} | {timed(function, options.times)} |", flush=True)


def functions(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the functions that do it in one process."""
    from huggingface_hub.hf_api import get_local_safetensors_metadata

    import blobstore

    return {
        "`blobstore.inspect`, `.parameter_count`": lambda: (
            blobstore.inspect(folder).parameter_count
        ),
        "`get_local_safetensors_metadata`, `.parameter_count`": lambda: (
            get_local_safetensors_metadata(folder).parameter_count
        ),
    }


if __name__ == "__main__":
    main()
