"""Recent values are kept within limits, and made once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore.web.recent import Recent


def test_the_least_recently_used_goes_first() -> None:
    recent = Recent[bytes](len, most_bytes=10, most=3)
    made = []

    def get(key: str, nbytes: int) -> bytes:
        def make() -> bytes:
            made.append(key)
            return bytes(nbytes)

        return recent.get(key, make)

    for key, nbytes in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4)):
        assert len(get(key, nbytes)) == nbytes
    assert made == ["a", "b", "c", "b"]
    assert len(get("large", 11)) == 11
    assert len(recent) == 2
    for key in "defg":
        get(key, 1)
    assert len(recent) == 3


def test_several_threads_make_a_value_once() -> None:
    recent = Recent[bytes](len, most_bytes=10, most=3)
    made, go = [], threading.Event()

    def make() -> bytes:
        go.wait(10)
        made.append(1)
        return b"x"

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(recent.get, "key", make) for _ in range(4)]
        go.set()
        assert [future.result() for future in futures] == [b"x"] * 4
    assert made == [1]


def test_a_value_that_can_not_be_made_is_tried_again() -> None:
    recent = Recent[bytes](len, most_bytes=10, most=3)

    def fail() -> bytes:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        recent.get("key", fail)
    assert recent.get("key", lambda: b"x") == b"x"
