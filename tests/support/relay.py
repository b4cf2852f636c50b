"""A relay on loopback that counts the bytes between a client and a server.

It may cut connections.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_MOST = 2**20


class Relay:
    """Forwards connections to a port. ``up`` and ``down`` count bytes to and from the server.

    ``most``: bytes that pass at once. The Host field that clients send is the relay's, so
    docker-registry's own addresses lead through the relay too.
    """

    def __init__(self, port: int, *, most: int = _MOST) -> None:
        self._server = port
        self._most = most
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self.host = f"127.0.0.1:{self.port}"
        self.up = self.down = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._alarm: tuple[int, Callable[[], object]] | None = None
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.up = self.down = 0

    def after(self, nbytes: int, call: Callable[[], object]) -> None:
        """Call once when ``nbytes`` have passed, of both directions together, from now on."""
        with self._lock:
            self._alarm = (self.up + self.down + nbytes, call)

    def cut(self) -> None:
        """Break all connections that there are now, in the middle of what they carry."""
        with self._lock:
            connections = list(self._open)
        for one in connections:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, as `support.servers.Server` does."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(300)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # A connection that waited to be accepted may come when its server has ended.
        with (
            client,
            suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self._server)) as server,
        ):
            with self._lock:
                self._open |= {client, server}
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._most < _MOST:  # few bytes wait in the kernel, so that the counts are right
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._most)
            there = threading.Thread(target=self._pump, args=(client, server, True), daemon=True)
            there.start()
            self._pump(server, client, is_up=False)
            there.join()
            with self._lock:
                self._open -= {client, server}

    def _pump(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(self._most):
                self._pass(data, target, is_up)
                self._ring()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _pass(self, data: bytes, target: socket.socket, is_up: bool) -> None:
        """Send bytes. They are counted before, so that what has come to an end is in the counts."""
        self._count(len(data), is_up)
        sent = 0
        try:
            while sent < len(data):
                sent += target.send(memoryview(data)[sent:])
        finally:
            self._count(sent - len(data), is_up)

    def _count(self, nbytes: int, is_up: bool) -> None:
        with self._lock:
            if is_up:
                self.up += nbytes
            else:
                self.down += nbytes

    def _ring(self) -> None:
        with self._lock:
            alarm = self._alarm
            if alarm is None or self.up + self.down < alarm[0]:
                return
            self._alarm = None
        alarm[1]()


@contextmanager
def relay(port: int, *, most: int = _MOST) -> Iterator[Relay]:
    """Run a relay for as long as the block lasts; ``most``: bytes at once."""
    running = Relay(port, most=most)
    try:
        yield running
    finally:
        running.close()
