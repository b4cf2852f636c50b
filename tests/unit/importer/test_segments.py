"""Segments have all needed bytes once, none is too large, and buffers are taken and given back."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from support.inventories import plan_of, source_tensor

from blobstore.formats.dtypes import DType
from blobstore.importer import segments
from blobstore.importer.segments import BufferPool, Segments
from blobstore.io.durable import PAGE

SIZE = 4096
Span = tuple[int, int]


def segments_of(needs: list[Span], hashed: int | None = None) -> list[Span]:
    """Return the segments of a file of which tensors at these places are copied."""
    tensors = [
        replace(source_tensor(f"t{number}", end - begin, dtype=DType.U8), offset=begin)
        for number, (begin, end) in enumerate(needs)
    ]
    plan = plan_of(tensors)
    (file,) = plan.inventory.files
    found = Segments([file], plan.blobs, {} if hashed is None else {file.path: hashed})
    return [(segment.begin, segment.end) for segment in found.all]


@pytest.mark.parametrize("hashed", [None, 30])
def test_all_needed_bytes_are_in_segments_that_touch(
    hashed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT", 200)
    random = Random(1)
    for _ in range(10):
        first, longest = hashed or 0, random.choice([20, 150, 1000])
        begins = [random.randrange(first, SIZE - longest) for _ in range(random.randint(1, 60))]
        needs = [(begin, begin + random.randint(1, longest)) for begin in begins]
        cut = segments_of(needs, hashed)
        assert all(first <= begin < end <= SIZE and end - begin <= 200 for begin, end in cut)
        assert all(one[1] <= other[0] for one, other in pairwise(cut))
        there = {byte for begin, end in cut for byte in range(begin, end)}
        assert all(there.issuperset(range(*need)) for need in needs)
        assert hashed is None or there.issuperset(range(hashed, SIZE))


@pytest.mark.parametrize("offset", [0, PAGE - 1, 3 * PAGE + 17, 2**40 + 5])
def test_a_buffer_lies_in_memory_as_its_bytes_lie_in_the_file(offset: int) -> None:
    buffer = BufferPool(1, 1024).take(60)
    assert buffer is not None
    view = buffer.at(offset, 1024)
    assert (len(view), view.readonly) == (1024, False)
    assert np.frombuffer(view, np.uint8).ctypes.data % PAGE == offset % PAGE


def test_a_buffer_is_free_when_each_user_has_released_it() -> None:
    pool = BufferPool(1, 1024)
    first = pool.take(0)
    assert first is not None
    first.use()
    first.release()
    assert pool.take(0) is None
    taken = []
    thread = threading.Thread(target=lambda: taken.append(pool.take(600)))
    thread.start()
    first.release()
    thread.join()
    assert taken == [first]
