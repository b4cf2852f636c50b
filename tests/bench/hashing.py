"""Speed of SHA-256, one core, streams from memory, against hashlib in the same run.

``python tests/bench/hashing.py`` prints a table: each method that the processor has, for one stream
and for sixteen. hashlib is OpenSSL; without the SHA instructions it runs in a process of its own,
for which they are masked (``OPENSSL_ia32cap``, OPENSSL_ia32cap(3)). The best of many short runs
counts, of all in turn, because other programs interrupt some.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

from blobstore import hashing
from blobstore.errors import UsageError

PIECE = 2**20
STREAMS = 16
RUNS = 40
DATA = [os.urandom(PIECE) for _ in range(STREAMS)]
WITHOUT_SHA = {"OPENSSL_ia32cap": ":~0x20000000"}


def main() -> None:
    """Print the table; with an argument only the rate of hashlib, for a parent process."""
    if len(sys.argv) > 1:
        print(min(seconds_of_hashlib() for _ in range(RUNS)))
        return
    best = measure()
    plain, masked = best.pop(("hashlib", 1)), masked_hashlib()
    print("| method | streams | GB/s | of hashlib | of hashlib without SHA instructions |")
    print("|---|---|---|---|---|")
    print(f"| hashlib | 1 | {PIECE / plain / 1e9:.2f} | 1.00 | {masked / plain:.2f} |")
    print(f"| hashlib, masked | 1 | {PIECE / masked / 1e9:.2f} | {plain / masked:.2f} | 1.00 |")
    for (name, count), seconds in best.items():
        rate = count * PIECE / seconds
        shown = f"| {name} | {count} | {rate / 1e9:.2f} | {rate * plain / PIECE:.2f} "
        print(f"{shown}| {rate * masked / PIECE:.2f} |")


def measure() -> dict[tuple[str, int], float]:
    """Return the least seconds of each method and number of streams, and of hashlib."""
    names = [name for name in hashing.METHODS if name != "openssl" and is_here(name)]
    best: dict[tuple[str, int], float] = {}

    def note(key: tuple[str, int], do: Callable[[], object]) -> None:
        begin = time.perf_counter()
        do()
        best[key] = min(best.get(key, 1e9), time.perf_counter() - begin)

    for _ in range(RUNS):
        note(("hashlib", 1), lambda: hashlib.sha256(DATA[0]).digest())
        for name in names:
            hashing.use_method(name)
            for count in (1, STREAMS):
                note((name, count), lambda count=count: hashing.digests(DATA[:count]))  # type: ignore[misc]
    return best


def is_here(name: str) -> bool:
    """Return True if the processor has the method."""
    try:
        hashing.use_method(name)
    except UsageError:
        return False
    return True


def seconds_of_hashlib() -> float:
    """Return the time of one piece."""
    begin = time.perf_counter()
    hashlib.sha256(DATA[0]).digest()
    return time.perf_counter() - begin


def masked_hashlib() -> float:
    """Return the least seconds of hashlib for one piece, without SHA instructions."""
    done = subprocess.run(
        [sys.executable, __file__, "hashlib"],
        env={**os.environ, **WITHOUT_SHA},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


if __name__ == "__main__":
    main()
