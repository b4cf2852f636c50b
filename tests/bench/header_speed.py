"""Headers against the safetensors package, in one run: `python tests/bench/header_speed.py`.

Reading is `blobstore.read_header(path)`, validation included, against `safe_open(path,
"np").keys()`, and then every entry's dtype and shape; every measurement is a process of its own.

Writing is `encode_header` against `safetensors.serialize` of the same names (empty shapes, so that
no data are copied) and against `json.dumps` of the document.
"""

from __future__ import annotations

import argparse
import functools
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tables import show, table

from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import TensorEntry, encode_header, lay_out

MIB = 2**20
PROJECTIONS = (("up_proj", (1408, 2048)), ("down_proj", (2048, 1408)), ("gate_proj", (1408, 2048)))
EXPERTS = 256

READER = """
import json, sys, time

def peak():
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def ours(path, entries):
    tensors = read_header(path).tensors
    return [(entry.dtype, entry.shape) for entry in tensors.values()] if entries else tensors

def theirs(path, entries):
    with safe_open(path, "np") as file:
        names = file.keys()
        slices = map(file.get_slice, names)
        return [(found.get_dtype(), found.get_shape()) for found in slices] if entries else names

if sys.argv[1] == "ours":
    from blobstore import read_header
    read = ours
else:
    import numpy
    from safetensors import safe_open
    read = theirs
before, started = peak(), time.perf_counter()
found = read(sys.argv[2], sys.argv[3] == "entries")
seconds = time.perf_counter() - started
growth = peak() - before
print(json.dumps({"seconds": seconds, "growth": growth, "peak": peak(), "tensors": len(found)}))
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The best of several processes: seconds of the call, growth and peak of the memory."""

    seconds: float
    growth: int
    peak: int

    def cells(self, other: Reading) -> Iterator[str]:
        """Yield each measure, and what it is of another's."""
        yield from (f"{self.seconds:.3f}", f"{self.seconds / other.seconds:.2f}")
        yield from (f"{self.growth / MIB:.0f}", f"{self.growth / other.growth:.2f}")
        yield from (f"{self.peak / MIB:.0f}", f"{self.peak / other.peak:.2f}")


def experts(count: int) -> dict[str, TensorEntry]:
    """Return entries of BF16 experts with the names and shapes of a mixture of experts."""
    layers = range(-(-count // (EXPERTS * len(PROJECTIONS))))
    names = (
        (f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight", DType.BF16, shape)
        for layer in layers
        for expert in range(EXPERTS)
        for projection, shape in PROJECTIONS
    )
    return lay_out(array for array, _ in zip(names, range(count), strict=False))


def short(count: int) -> dict[str, TensorEntry]:
    """Return entries of empty tensors with short names: a million of them fit into a header."""
    return lay_out((f"t{number:06d}", DType.F32, (0,)) for number in range(count))


def write(path: Path, tensors: dict[str, TensorEntry]) -> int:
    """Write a sparse file with those tensors, by `json.dumps`; return the bytes of its header."""
    text = json.dumps(document(tensors), separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + max(entry.end for entry in tensors.values()))
    return len(text)


def document(tensors: dict[str, TensorEntry]) -> dict[str, object]:
    """Return a header as a JSON document."""
    return {
        name: {
            "dtype": entry.dtype.value,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in tensors.items()
    }


def reading(who: str, path: Path, what: str, times: int) -> Reading:
    """Read a header's names or entries in so many processes."""
    line = [sys.executable, "-c", READER, who, str(path), what]
    runs = [json.loads(subprocess.check_output(line)) for _ in range(times)]
    least = {key: min(run[key] for run in runs) for key in runs[0]}
    return Reading(least["seconds"], least["growth"], least["peak"])


def read(cases: dict[str, dict[str, TensorEntry]], times: int) -> None:
    """Print the table of reading."""
    print(f"\nReading: the best of {times} processes; memory in MiB\n")
    table(
        "header",
        "MB",
        "read",
        "",
        "seconds",
        "ratio",
        "memory of the call",
        "ratio",
        "peak of the process",
        "ratio",
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, tensors in cases.items():
            path = Path(folder) / "model.safetensors"
            size = write(path, tensors)
            for what in ("names", "entries"):
                theirs, ours = (reading(who, path, what, times) for who in ("theirs", "ours"))
                for who, found in (("safetensors", theirs), ("blobstore", ours)):
                    show((name, f"{size / 1e6:.1f}", what, who, *found.cells(theirs)))


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Return the best time of ``call``."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def json_header(plain: object) -> bytes:
    """Return a header as the json module writes it."""
    return json.dumps(plain, separators=(",", ":")).encode()


def encode(cases: dict[str, dict[str, TensorEntry]], times: int) -> None:
    """Print the table of writing."""
    import safetensors

    print(f"\nWriting: the best of {times} calls\n")
    table(
        "header", "encode_header, s", "json.dumps, s", "ratio", "safetensors.serialize, s", "ratio"
    )
    for name, tensors in cases.items():
        plain = document(tensors)
        empty = {
            key: safetensors.TensorSpec(
                dtype="bfloat16", shape=[0, *entry.shape], data_ptr=0, data_len=0
            )
            for key, entry in tensors.items()
        }
        ours = seconds_of(functools.partial(encode_header, tensors, {}, 8), times)
        by_json = seconds_of(functools.partial(json_header, plain), times)
        theirs = seconds_of(functools.partial(safetensors.serialize, empty), times)
        show(
            (
                name,
                f"{ours:.3f}",
                f"{by_json:.3f}",
                f"{ours / by_json:.2f}",
                f"{theirs:.3f}",
                f"{ours / theirs:.2f}",
            )
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    cases = {"100,000 experts": experts(100_000), "1,000,000 empty tensors": short(1_000_000)}
    read(cases, times)
    encode(cases, times)


if __name__ == "__main__":
    main()
