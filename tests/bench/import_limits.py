"""Lower bounds of an import's time: reading, kernels, hashing and durable writing alone.

Everything runs on two threads. Each function returns seconds.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from import_processes import blobstore_command, run
from import_sources import Weights

import blobstore

THREADS = 2
CHUNK = 2**22
ROWS, COLS = (
    2048,
    4096,
)  # 16 MiB: a kernel's input, with its result within a core's reach of malloc's free lists
INPUTS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """What an import of a folder has to do.

    ``quantized``: source bytes by type and group size. ``blobs``: sizes of the blobs to write.
    ``plan``: the line that prints them.
    """

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
    return Work(command, dict(quantized), tuple(blob["size"] for blob in plan["blobs"]))


def timed(do: Callable[[], object]) -> float:
    """Return how long one call takes, seconds."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def on_threads(function: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Return how long two threads take for a call for each item."""
    with ThreadPoolExecutor(THREADS) as pool:
        # The threads are started by then, and wait.
        list(pool.map(lambda _: time.sleep(0.01), range(THREADS)))
        return timed(lambda: list(pool.map(function, items)))


def reading(source: Path) -> float:
    """Read all files of a folder in chunks."""
    buffers = [bytearray(CHUNK) for _ in range(THREADS)]
    paths = sorted(source.glob("*.safetensors"))
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    chunks = [
        (fd, start)
        for fd, path in zip(descriptors, paths, strict=True)
        for start in range(0, path.stat().st_size, CHUNK)
    ]

    def read(number: int) -> None:
        for fd, start in chunks[number::THREADS]:
            os.preadv(fd, [buffers[number]], start)

    try:
        return on_threads(read, range(THREADS))
    finally:
        for fd in descriptors:
            os.close(fd)


def kernels_alone(work: Work, weights: Weights) -> float:
    """Quantize as many weights as the import does, from memory.

    Inputs are used again and again, results dropped.
    """
    inputs = [
        [weights.array(f"{thread} {number}", ROWS, COLS) for number in range(INPUTS)]
        for thread in range(THREADS)
    ]
    total = 0.0
    for (quant_type, group_size), nbytes in sorted(work.quantized.items()):
        # Whole inputs, as many as two threads can share evenly; the time is then cut to the bytes
        # asked for.
        rounds = math.ceil(nbytes / (inputs[0][0].nbytes * THREADS))
        done = rounds * inputs[0][0].nbytes * THREADS

        def quantize(
            thread: int, kind: str = quant_type, group: int = group_size, count: int = rounds
        ) -> None:
            for number in range(count):
                blobstore.quantize(inputs[thread][number % INPUTS], kind, group_size=group)

        total += on_threads(quantize, range(THREADS)) * nbytes / done
    return total


def hashing(work: Work) -> float:
    """Hash as many bytes as are stored with SHA-256, from memory."""
    data = [memoryview(os.urandom(CHUNK)) for _ in range(THREADS)]

    def sha256(thread: int) -> None:
        digest = hashlib.sha256()
        left = work.stored // THREADS
        while left > 0:
            digest.update(data[thread][: min(left, CHUNK)])
            left -= CHUNK

    return on_threads(sha256, range(THREADS))


def writing(work: Work, folder: Path, *, direct: bool) -> float:
    """Write files of the blobs' sizes durably: through the page cache, or with O_DIRECT.

    Both preallocate nothing, and end with an fsync of each file and of the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chunk = mmap.mmap(-1, CHUNK)  # page-aligned, as O_DIRECT wants
    chunk.write(os.urandom(CHUNK))
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    descriptors = [os.open(folder / f"{number}", flags, 0o644) for number in range(len(work.blobs))]
    try:
        with memoryview(chunk) as view:

            def write(number: int) -> None:
                write_whole(descriptors[number], work.blobs[number], view, 4096 if direct else 1)

            seconds = on_threads(write, range(len(descriptors)))
        seconds += on_threads(os.fsync, descriptors)
        return seconds + timed(lambda: sync_folder(folder))
    finally:
        for fd in descriptors:
            os.close(fd)
        shutil.rmtree(folder)


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


LIMITS = ("read", "kernel", "SHA-256", "write + fsync", "O_DIRECT + fsync")


def measure_all(source: Path, work: Work, weights: Weights, folder: Path) -> dict[str, float]:
    """Return the seconds of each of LIMITS, measured once.

    ``start`` is the process that makes the plan.
    """
    return {
        "start": run(work.plan).seconds,
        "read": reading(source),
        "kernel": kernels_alone(work, weights),
        "SHA-256": hashing(work),
        "write + fsync": writing(work, folder, direct=False),
        "O_DIRECT + fsync": writing(work, folder, direct=True),
    }


def slowest(limits: dict[str, float]) -> float:
    """Return the slowest of the four limits, with the faster way to write."""
    return max(
        limits["read"],
        limits["kernel"],
        limits["SHA-256"],
        min(limits["write + fsync"], limits["O_DIRECT + fsync"]),
    )


def processor(limits: dict[str, float]) -> float:
    """Return what both cores have to do one after the other when nothing waits for the disk."""
    return limits["read"] + limits["kernel"] + limits["SHA-256"]


def best_of(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the best of several measurements, each limit for itself."""
    return {name: min(one[name] for one in measured) for name in ("start", *LIMITS)}
