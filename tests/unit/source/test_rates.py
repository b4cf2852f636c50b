"""RateLimit: a token bucket for all transfers together."""

from __future__ import annotations

import pytest

from blobstore.errors import UsageError
from blobstore.source.weights import FetchOptions, RateLimit


def test_bytes_come_no_faster_than_the_limit() -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    limit = RateLimit(1_000_000, clock=lambda: now[0], wait=wait)
    for _ in range(100):
        limit.take(100_000)
    assert 9.7 <= now[0] <= 10.01
    now[0] += 100  # a time without transfers is not saved for later
    for _ in range(100):
        limit.take(100_000)
    assert 119.4 <= now[0] <= 120.02


def test_a_limit_with_which_no_request_would_end_is_refused() -> None:
    with pytest.raises(UsageError, match="limit_rate is at least 16,384, not 1,000"):
        FetchOptions(limit_rate=1000)
