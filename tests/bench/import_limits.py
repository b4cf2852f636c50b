"""Lower bounds of an import's time: reading, kernels, hashing and durable writing alone.

Everything runs on as many threads as asked for, one for each core if nothing is said.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from import_processes import blobstore_command, import_command, run
from import_sources import FIXTURE, Weights
from retired import retire

import blobstore
from blobstore import hashing
from blobstore.io.workers import threads

THREADS = threads(None)
CHUNK = 2**22
ROWS, COLS = (
    2048,
    4096,
)  # 16 MiB: a kernel's input, with its result within a core's reach of malloc's free lists
INPUTS = 8
PIECE = 2**20
STREAMS = max(16, hashing.width())
MOST = 2**28  # bytes that a thread quantizes or hashes; the time of more is computed from that


@dataclass(frozen=True, slots=True)
class Work:
    """What an import of a folder has to do.

    ``options``: of the import. ``plan``: the line that prints the rest. ``quantized``: source bytes
    by type and group size. ``blobs``: sizes of the blobs to write.
    """

    options: tuple[str, ...]
    plan: tuple[str | Path, ...]
    quantized: dict[tuple[str, int], int]
    blobs: tuple[int, ...]

    @property
    def stored(self) -> int:
        """Bytes to write and to hash."""
        return sum(self.blobs)


def work_of(source: Path, *options: str) -> Work:
    """Return what ``blobstore plan`` says. Raises: SystemExit when it fails."""
    command = tuple(blobstore_command("plan", source, *options))
    plan = run(command).document
    quantized: Counter[tuple[str, int]] = Counter()
    for blob in plan["blobs"]:
        for tensor in blob["tensors"]:
            if tensor["quant_type"] is not None:
                quantized[tensor["quant_type"], tensor["group_size"]] += 2 * math.prod(
                    tensor["shape"]
                )
    return Work(options, command, dict(quantized), tuple(blob["size"] for blob in plan["blobs"]))


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of something: on the wall, and of the processor, all threads together."""

    wall: float
    processor: float

    def __add__(self, other: Took) -> Took:
        return Took(self.wall + other.wall, self.processor + other.processor)

    def __mul__(self, factor: float) -> Took:
        return Took(self.wall * factor, self.processor * factor)


def timed(do: Callable[[], object]) -> Took:
    """Return how long one call takes."""
    before = time.process_time()
    started = time.perf_counter()
    do()
    return Took(time.perf_counter() - started, time.process_time() - before)


def on_threads(
    function: Callable[[Any], object], items: Iterable[Any], count: int = THREADS
) -> Took:
    """Return how long ``count`` threads take for a call for each item."""
    with ThreadPoolExecutor(count) as pool:
        # The threads are started by then, and wait.
        list(pool.map(lambda _: time.sleep(0.01), range(count)))
        return timed(lambda: list(pool.map(function, items)))


def repeated(do: Callable[[int, int], object], unit: int, nbytes: int, count: int) -> Took:
    """Return how long ``count`` threads take for ``nbytes`` bytes together.

    ``do`` gets the numbers of its thread and of its call, and handles ``unit`` bytes. It is called
    as often as needed, or for MOST bytes of each thread, and the time is computed from that.
    """
    calls = max(1, math.ceil(min(nbytes / count, MOST) / unit))

    def do_all(thread: int) -> None:
        for number in range(calls):
            do(thread, number)

    return on_threads(do_all, range(count), count) * (nbytes / (calls * unit * count))


def reading(paths: Sequence[Path], count: int = THREADS) -> Took:
    """Read files in chunks."""
    buffers = [bytearray(CHUNK) for _ in range(count)]
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    chunks = [
        (fd, start)
        for fd, path in zip(descriptors, paths, strict=True)
        for start in range(0, path.stat().st_size, CHUNK)
    ]

    def read(number: int) -> None:
        for fd, start in chunks[number::count]:
            os.preadv(fd, [buffers[number]], start)

    try:
        return on_threads(read, range(count), count)
    finally:
        for fd in descriptors:
            os.close(fd)


def quantizing(work: Work, weights: Weights, method: str = "minmax", count: int = THREADS) -> Took:
    """Quantize as many weights as the import does, from memory.

    Inputs are used again and again, results dropped.
    """
    inputs = [
        [weights.array(f"{thread} {number}", ROWS, COLS) for number in range(INPUTS)]
        for thread in range(count)
    ]
    total = Took(0, 0)
    for (quant_type, group_size), nbytes in sorted(work.quantized.items()):

        def quantize(
            thread: int, number: int, kind: str = quant_type, group: int = group_size
        ) -> None:
            weight = inputs[thread][number % INPUTS]
            blobstore.quantize(weight, kind, group_size=group, method=method)

        total += repeated(quantize, inputs[0][0].nbytes, nbytes, count)
    return total


def hashing_alone(nbytes: int, count: int = THREADS) -> Took:
    """Hash that many bytes with SHA-256, from memory: STREAMS pieces at once in each thread."""
    pieces = [[os.urandom(PIECE) for _ in range(STREAMS)] for _ in range(count)]

    def sha256(thread: int, _: int) -> None:
        hashing.digests(pieces[thread])

    return repeated(sha256, PIECE * STREAMS, nbytes, count)


def writing(sizes: Sequence[int], folder: Path, *, direct: bool, count: int = THREADS) -> Took:
    """Write files of these sizes durably: through the page cache, or with O_DIRECT.

    Both preallocate nothing, and end with an fsync of each file and of the folder.
    """
    retire(folder)
    folder.mkdir(parents=True)
    chunk = mmap.mmap(-1, CHUNK)  # page-aligned, as O_DIRECT wants
    chunk.write(os.urandom(CHUNK))
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    descriptors = [os.open(folder / f"{number}", flags, 0o644) for number in range(len(sizes))]
    try:
        with memoryview(chunk) as view:

            def write(number: int) -> None:
                write_whole(descriptors[number], sizes[number], view, 4096 if direct else 1)

            took = on_threads(write, range(len(descriptors)), count)
        took += on_threads(os.fsync, descriptors, count)
        return took + timed(lambda: sync_folder(folder))
    finally:
        for fd in descriptors:
            os.close(fd)
        retire(folder)


def write_whole(fd: int, size: int, chunk: memoryview, block: int) -> None:
    """Write ``size`` bytes in whole blocks; what the last one is longer is cut off."""
    aligned = -(-size // block) * block
    written = 0
    while written < aligned:
        written += os.write(fd, chunk[: min(len(chunk), aligned - written)])
    if aligned != size:
        os.ftruncate(fd, size)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


STAGES = ("read", "kernel", "SHA-256")
DISK = ("write + fsync", "O_DIRECT + fsync")
LIMITS = ("start", "plan", *STAGES, *DISK)


def start(folder: Path, *options: str) -> float:
    """Return the seconds of a whole import of a tiny model.

    Start of Python, options, plan, session and syncs: what an import of any size has to do.
    """
    retire(folder)
    done = run(import_command(FIXTURE, folder, *options)).checked()
    retire(folder)
    return done.seconds


def measure_all(source: Path, work: Work, weights: Weights, folder: Path) -> dict[str, float]:
    """Return the seconds of each of LIMITS, measured once, on all cores.

    ``plan`` is the process that makes the plan: it is shown, and belongs to no limit.
    """
    return {
        "start": start(folder, *work.options),
        "plan": run(work.plan).seconds,
        "read": reading(sorted(source.glob("*.safetensors"))).wall,
        "kernel": quantizing(work, weights).wall,
        "SHA-256": hashing_alone(work.stored).wall,
        "write + fsync": writing(work.blobs, folder, direct=False).wall,
        "O_DIRECT + fsync": writing(work.blobs, folder, direct=True).wall,
    }


def disk(limits: Mapping[str, float]) -> float:
    """Return the seconds of the faster way to write."""
    return min(limits[name] for name in DISK)


def processor(limits: Mapping[str, float]) -> float:
    """Return the seconds of all cores, if none of them ever waits for the disk."""
    return sum(limits[name] for name in STAGES)


def at_best(limits: Mapping[str, float]) -> float:
    """Return what an import can't be faster than: the disk and the cores work at the same time."""
    return limits["start"] + max(processor(limits), disk(limits))


def best_of(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the best of several measurements, each limit for itself."""
    return {name: min(one[name] for one in measured) for name in LIMITS}
