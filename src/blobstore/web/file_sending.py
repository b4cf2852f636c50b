"""Files to sockets without a copy: the kernel sends from the page cache (sendfile(2)).

asyncio's own `loop.sendfile` runs in the thread of the loop: while one client's file is read from a
slow disk, all other clients wait, and all clients together get one core. Here threads call
sendfile. A thread stays with a client that reads as fast as it sends, for a turn; a client that
does not occupies no thread: the loop waits until its socket takes more. docs/performance.md
("Serving blobs") compares the ways.

Both descriptors are duplicates of ours, closed when no thread uses them. So an aborted connection
can't make a thread send a file's bytes to a stranger that got the number of a closed socket.
"""

from __future__ import annotations

import asyncio
import os
import select
from concurrent.futures import Executor, Future

from blobstore.errors import ShortReadError

SENDS_FILES = "http.response.zerocopysend"
"""The name of the ASGI extension, and of its message (asgiref specs/extensions.rst)."""

_TURN = 16 * 2**20
"""Bytes after which a thread takes another client that waits for one."""
_MOMENT_MS = 5
"""How long a thread waits for a socket that takes no more."""


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
        turn: Future[int] | None = None
        try:
            while offset < end and not self._stopped:
                wanted = min(_TURN, end - offset)
                turn = self._threads.submit(self._turn, offset, wanted)
                sent = await asyncio.wrap_future(turn)
                offset += sent
                self.sent += sent
                if sent < wanted:
                    await self._until_writable()
        finally:
            if turn is None:
                self._close()
            else:
                turn.add_done_callback(lambda _: self._close())

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopped = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _turn(self, offset: int, count: int) -> int:
        """Return the bytes sent, until the socket took no more for a moment."""
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        sent = 0
        while sent < count and not self._stopped:
            try:
                now = os.sendfile(self._socket, self._file, offset + sent, count - sent)
            except BlockingIOError:
                if not writable.poll(_MOMENT_MS):
                    break
                continue
            if now == 0:
                raise ShortReadError(f"the file ends before byte {offset + count:,}")
            sent += now
        return sent

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
