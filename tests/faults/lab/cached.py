"""Processes that bring blobs of a bucket into a cache, forked where nothing has used a bucket yet.

obstore's threads do not come along with a fork, which would wait for them without end. So the forks
are of new processes, and not of one in which other tests have used buckets.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults.lab.command import Action, At, Done, run

from blobstore.errors import BlobStoreError
from blobstore.testing.blobs import data_of, descriptor_of

DATA = [data_of(200_000, number) for number in range(6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bringing:
    """Bring the blobs of these ``numbers`` from a bucket into a cache of ``limit`` bytes.

    ``at``: the number of a call that changes the disk, and what happens to it. ``kill_after_s``: it
    is killed then. With ``is_watched``, its calls are noted.
    """

    far: Path
    cache: Path
    limit: int
    numbers: range
    at: tuple[int, Action] | None = None
    kill_after_s: float | None = None
    is_watched: bool = False

    def run(self) -> Done:
        """Do it in a fork of this process."""
        return run(
            program=partial(_bring, self),
            within=[self.cache] if self.is_watched or self.at else [],
            decide=At(*self.at) if self.at else None,
            kill_after_s=self.kill_after_s,
        )


def _bring(wanted: Bringing) -> None:
    """Bring blobs into the cache and read them. One of our errors is exit code 3."""
    from blobstore.store.bucket.bucket_store import open_bucket_store

    try:
        store = open_bucket_store(
            f"file://{wanted.far}", cache=wanted.cache, cache_size=wanted.limit
        )
        store.prefetch([descriptor_of(DATA[number]) for number in wanted.numbers])
        for number in wanted.numbers:
            with store.blobs.open(descriptor_of(DATA[number])) as reader:
                if reader.read(0, reader.size) != DATA[number]:
                    sys.exit("wrong bytes")
    except BlobStoreError as error:
        sys.stderr.write(str(error))
        sys.exit(3)


@contextmanager
def unused_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of so many processes in which nothing has used a bucket."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=fresh) as pool:
        yield pool
