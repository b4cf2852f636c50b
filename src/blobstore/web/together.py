"""Work in threads, done once for equal requests that wait for it together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

_T = TypeVar("_T")


class Together(Generic[_T]):
    """Runs functions in at most ``threads`` threads at once.

    Requests with one key that wait for a thread share the next run. A request never gets the result
    of a run that had begun before it came, so no answer is older than its request. Waiting requests
    occupy no thread.
    """

    def __init__(self, threads: int) -> None:
        self._turns = CapacityLimiter(threads)
        self._threads = CapacityLimiter(threads)
        self._next: dict[Hashable, asyncio.Task[_T]] = {}
        self._running: dict[Hashable, asyncio.Task[_T]] = {}

    async def run(self, key: Hashable, function: Callable[[], _T]) -> _T:
        """Return the result of the function, or of an equal request. Raises: as ``function``."""
        task = self._next.get(key)
        if task is None:
            before = self._running.get(key)
            task = asyncio.create_task(self._run(key, function, before))
            self._next[key] = task
        return await asyncio.shield(task)

    async def _run(
        self, key: Hashable, function: Callable[[], _T], before: asyncio.Task[_T] | None
    ) -> _T:
        if before is not None:  # an equal run at the same time would take another thread
            await asyncio.wait([before])
        async with self._turns:
            own = self._running[key] = self._next.pop(key)
            try:
                return await anyio.to_thread.run_sync(function, limiter=self._threads)
            finally:
                if self._running.get(key) is own:
                    del self._running[key]
