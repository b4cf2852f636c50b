"""The ring: parts do not overlap, lie as their bytes do, and wait for memory in turn."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from blobstore.importer.streaming.ring import Ring, RingPart
from blobstore.io.durable import PAGE

NBYTES = 10 * PAGE


def taken(ring: Ring, nbytes: int, offset: int) -> RingPart:
    part = ring.take(nbytes, offset)
    assert part is not None
    return part


@pytest.mark.parametrize("seed", range(10))
def test_parts_never_overlap(seed: int) -> None:
    random, ring = Random(seed), Ring(NBYTES)
    parts: list[tuple[RingPart, int]] = []
    for number in range(1, 200):
        nbytes, offset = random.randint(1, 2 * PAGE), random.randrange(10**6)
        while sum(len(part.data) + PAGE for part, _ in parts) + nbytes + PAGE > NBYTES // 2:
            part, value = parts.pop(0 if random.random() < 0.8 else random.randrange(len(parts)))
            assert set(part.data) == {value}
            ring.give_back(part)
        part = taken(ring, nbytes, offset)
        assert np.frombuffer(part.data, np.uint8).ctypes.data % PAGE == offset % PAGE
        part.data[:] = bytes([number % 256]) * nbytes
        parts.append((part, number % 256))
    assert all(set(part.data) == {value} for part, value in parts)


def test_a_part_waits_until_there_is_room() -> None:
    ring = Ring(NBYTES)
    first, second = taken(ring, 6 * PAGE, 0), taken(ring, 4 * PAGE, 0)
    got: list[RingPart | None] = []
    thread = threading.Thread(target=lambda: got.append(ring.take(5 * PAGE, 0)))
    thread.start()
    ring.give_back(second)  # what is before it is not free
    assert thread.is_alive()
    ring.give_back(first)
    thread.join(60)
    assert len(got) == 1


def test_waiting_ends_when_it_is_closed() -> None:
    ring = Ring(NBYTES)
    taken(ring, NBYTES, 0)
    got: list[RingPart | None] = []
    thread = threading.Thread(target=lambda: got.append(ring.take(NBYTES, 0)))
    thread.start()
    ring.close()
    thread.join(60)
    assert got == [None]
