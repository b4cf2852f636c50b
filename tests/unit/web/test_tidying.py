"""Memory goes back when the server is idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from blobstore.web import tidying
from blobstore.web.tidying import Tidy


def test_memory_goes_back_once_after_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "_IDLE_S", 0.0)
    given: list[int] = []

    async def requests() -> None:
        release, done = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, _receive: Any, _send: Any) -> None:
            if scope["waits"]:
                await release.wait()

        def give_back() -> None:
            given.append(1)
            done.set()

        tidy: Any = Tidy(app, give_back)
        slow = asyncio.create_task(tidy({"waits": True}, None, None))
        await asyncio.sleep(0)
        await tidy({"waits": False}, None, None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert given == []  # a request is still answered
        release.set()
        await slow
        await done.wait()

    asyncio.run(requests())
    assert given == [1]
