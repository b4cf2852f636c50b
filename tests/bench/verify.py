"""Speed of `verify` on a store in the page cache, against SHA-256 of the same bytes.

``python tests/bench/verify.py [FOLDER]`` makes stores of random bytes in FOLDER (else a temporary
one) and prints, for each, the rates of one core over bytes in memory, that of `verify` on all
cores, and their ratios: of 16 streams, 1.0 would be every core hashing and nothing else. The best
of five runs counts, of each.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blobstore import hashing
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.digests import digests_of
from blobstore.io.ranges import BytesReader
from blobstore.io.workers import threads
from blobstore.names import ModelName
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

GIB = 2**30
MIXES = {
    "4 blobs of 512 MiB": [GIB // 2] * 4,
    "a model: 2 of 256 MiB, 60 of 24 MiB, 130 of 8 KiB": [GIB // 4] * 2
    + [24 * 2**20] * 60
    + [8192] * 130,
    "1 blob of 1 GiB beside 1 GiB in blobs of 16 MiB": [GIB] + [2**24] * 64,
    "20,000 blobs of 64 KiB": [2**16] * 20_000,
}
RUNS = 5
STREAMS = 16


def main() -> None:
    """Print the table."""
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    cores = threads(None)
    print(
        f"{cores} cores, SHA-256: {hashing.in_use()}\n\n| blobs | hashlib, one core, GB/s | "
        "16 streams, one core, GB/s | verify, GB/s | of hashlib | of 16 streams and all cores |\n"
        "|---|---|---|---|---|---|"
    )
    try:
        for number, (what, sizes) in enumerate(MIXES.items()):
            store = open_store(folder / str(number))
            fill(store, sizes)
            nbytes = sum(sizes)
            read_all(store)
            alone, lanes, all_cores = [], [], []
            for _ in range(RUNS):  # side by side: the machine may be shared
                alone.append(seconds(lambda: hash_alone(GIB)) / GIB)
                lanes.append(seconds(lambda: hash_together(GIB)) / GIB)
                all_cores.append(seconds(partial(check, store)) / nbytes)
            rates = [1e-9 / min(one) for one in (alone, lanes, all_cores)]
            shown = " | ".join(f"{rate:.2f}" for rate in rates)
            ratio = rates[2] / rates[1] / cores
            print(f"| {what} | {shown} | {rates[2] / rates[0]:.2f} | {ratio:.2f} |", flush=True)
            shutil.rmtree(store.root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


MEMORY = bytearray(os.urandom(2**20) * 1024)


def hash_alone(nbytes: int) -> None:
    """Hash so many bytes of memory, which no cache holds, as one stream by hashlib."""
    hashlib.sha256(memoryview(MEMORY)[:nbytes]).digest()


def hash_together(nbytes: int) -> None:
    """Hash them as sixteen streams, on one core."""
    size = nbytes // STREAMS
    views = [memoryview(MEMORY)[size * number : size * (number + 1)] for number in range(STREAMS)]
    digests_of([BytesReader(view) for view in views])


def check(store: Store) -> None:
    """Verify a store that has to be sound."""
    if not verify(store).is_sound:
        raise SystemExit("the store is damaged")


def fill(store: Store, sizes: list[int]) -> None:
    """Store blobs of so many random bytes as one model, of a kind that only has to be hashed."""
    layers = []
    with store.session() as session:
        blobs = []
        for size in sizes:
            blob = session.put(os.urandom(size))
            blobs.append(blob)
            layers.append(
                Descriptor(
                    media_type="application/vnd.ollama.image.model", digest=blob.digest, size=size
                )
            )
        session.publish(ModelName.parse("m"), Manifest(layers=tuple(layers)))


def read_all(store: Store) -> None:
    """Bring all blobs into the page cache."""
    for path in (store.root / "blobs").iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(2**22):
                pass


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
