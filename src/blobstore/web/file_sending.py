"""Files to sockets without a copy: the kernel sends from the page cache (sendfile(2)).

asyncio's own `loop.sendfile` runs in the thread of the loop: while one client's file is read from a
slow disk, all other clients wait, and all clients together get one core. Here threads call
sendfile, a step at a time, and the loop waits until the socket takes more. The socket never blocks,
so a slow client occupies no thread. docs/performance.md ("Serving") compares the ways.

Both descriptors are duplicates of ours, closed when no thread uses them. So an aborted connection
can't make a thread send a file's bytes to a stranger that got the number of a closed socket.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Executor, Future
from contextlib import suppress

from blobstore.errors import ShortReadError

SENDS_FILES = "http.response.zerocopysend"
"""The name of the ASGI extension, and of its message (asgiref specs/extensions.rst)."""

_STEP = 4 * 2**20
"""Bytes of one call at most: a thread is soon free for another client."""


class BrokenOffError(Exception):
    """The rest of a body can't be sent. The server logs the message, and ends the connection."""


class FileSending:
    """Sends a part of a file to a socket. ``sent``: bytes that the socket has taken."""

    def __init__(self, threads: Executor, socket: int, file: int) -> None:
        """``socket``, ``file``: open descriptors, which stay the caller's. Raises: OSError."""
        self.sent = 0
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._stopped = False
        self._waiting: asyncio.Future[None] | None = None
        self._socket = os.dup(socket)
        try:
            self._file = os.dup(file)
        except OSError:
            os.close(self._socket)
            raise

    @property
    def is_waiting(self) -> bool:
        """True while the socket takes no more, because the client does not read."""
        return self._waiting is not None

    async def run(self, offset: int, count: int) -> None:
        """Send ``count`` bytes from ``offset``, once; return early after `stop`.

        Raises: ShortReadError if the file ends before; OSError if it can't be read or the client is
        gone.
        """
        end = offset + count
        step: Future[int | None] | None = None
        try:
            while offset < end and not self._stopped:
                wanted = min(_STEP, end - offset)
                step = self._threads.submit(self._step, offset, wanted)
                sent = await asyncio.wrap_future(step)
                if sent == 0:
                    raise ShortReadError(f"the file ends before byte {end:,}")
                offset += sent or 0
                self.sent += sent or 0
                if sent != wanted:
                    await self._until_writable()
        finally:
            if step is None:
                self._close()
            else:
                step.add_done_callback(lambda _: self._close())

    def stop(self) -> None:
        """Make `run` return at its next step."""
        self._stopped = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _step(self, offset: int, count: int) -> int | None:
        """Return the bytes sent, None if the socket takes none now."""
        with suppress(BlockingIOError):
            return os.sendfile(self._socket, self._file, offset, count)
        return None

    async def _until_writable(self) -> None:
        if self._stopped:
            return
        self._waiting = self._loop.create_future()
        self._loop.add_writer(self._socket, self._wake)
        try:
            await self._waiting
        finally:
            self._loop.remove_writer(self._socket)
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _close(self) -> None:
        os.close(self._socket)
        os.close(self._file)
