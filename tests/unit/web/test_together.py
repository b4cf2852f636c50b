"""Equal requests share a run, and none gets a result that is older than itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from blobstore.web.together import Together


class Runs:
    """Functions whose runs wait until they are released; made in an event loop.

    ``begun`` are the numbers of those that began.
    """

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.release = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._beginnings: asyncio.Queue[int] = asyncio.Queue()

    def function(self, number: int) -> Callable[[], int]:
        """Return a function that notes its number, waits, and returns it."""

        def run() -> int:
            self.begun.append(number)
            self._loop.call_soon_threadsafe(self._beginnings.put_nowait, number)
            assert self.release.wait(300)
            return number

        return run

    async def begins(self, count: int) -> None:
        """Wait until so many more runs have begun."""
        for _ in range(count):
            await self._beginnings.get()


def test_requests_that_wait_share_the_next_run() -> None:
    async def main() -> tuple[list[int], list[int]]:
        runs, together = Runs(), Together[int](4)
        first = asyncio.create_task(together.run("key", runs.function(0)))
        await runs.begins(1)
        later = [asyncio.create_task(together.run("key", runs.function(n))) for n in (1, 2, 3)]
        await asyncio.sleep(0)
        runs.release.set()
        return await asyncio.gather(first, *later), runs.begun

    results, begun = asyncio.run(main())
    assert results == [0, 1, 1, 1]  # the run that had begun is not theirs
    assert begun == [0, 1]


def test_other_requests_do_not_wait_while_there_are_threads() -> None:
    async def main() -> list[int]:
        runs, together = Runs(), Together[int](2)
        tasks = [asyncio.create_task(together.run(n, runs.function(n))) for n in range(3)]
        await runs.begins(2)
        assert sorted(runs.begun) == [0, 1]  # the third waits for a thread
        runs.release.set()
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_client_that_goes_away_does_not_end_the_run_of_others() -> None:
    async def main() -> int:
        runs, together = Runs(), Together[int](1)
        gone = asyncio.create_task(together.run("key", runs.function(0)))
        stays = asyncio.create_task(together.run("key", runs.function(1)))
        await runs.begins(1)
        gone.cancel()
        runs.release.set()
        return await stays

    assert asyncio.run(main()) == 0


def test_an_error_is_given_to_all_and_the_next_request_runs_again() -> None:
    def fails() -> int:
        raise RuntimeError

    async def main() -> int:
        together = Together[int](1)
        tasks = [asyncio.create_task(together.run("key", fails)) for _ in range(2)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [RuntimeError] * 2
        with pytest.raises(RuntimeError):
            await together.run("key", fails)
        return await together.run("key", lambda: 7)

    assert asyncio.run(main()) == 7
