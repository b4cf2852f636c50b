"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Shows ``now``, in seconds, for as long as the test leaves it."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time that is set."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.now += seconds
