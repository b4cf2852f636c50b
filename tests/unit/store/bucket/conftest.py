"""Fixtures of the tests of buckets."""

import time

import pytest


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions and clean-ups that wait for each other check 100 times as often."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 100))
