"""A clock that a test sets."""


class Clock:
    """Shows ``now``, in seconds, for as long as the test leaves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.now += seconds
