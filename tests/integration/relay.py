"""A relay on loopback between a client and a server, which calls a function after so many bytes."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_AT_ONCE = 32 * 2**10
"""Bytes that pass at once. Few wait in the kernel, so that a call comes at its byte."""


class Relay:
    """Forwards connections to a port; the registry's own addresses lead through it too."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self._port = port
        self.host = f"127.0.0.1:{listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._left = -1
        self._call: Callable[[], object] = lambda: None

    def after(self, nbytes: int, call: Callable[[], object]) -> None:
        """Call once when ``nbytes`` have passed, of both directions together, from now on."""
        with self._lock:
            self._left, self._call = nbytes, call

    def accept(self, listener: socket.socket) -> None:
        """Serve clients until the listener is closed."""
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # A connection that waited to be accepted may come when its server has ended.
        with (
            client,
            suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self._port)) as server,
        ):
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _AT_ONCE)
            there = threading.Thread(target=self._pump, args=(client, server), daemon=True)
            there.start()
            self._pump(server, client)
            there.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_AT_ONCE):
                target.sendall(data)
                with self._lock:
                    is_due = 0 <= self._left < len(data)
                    self._left -= len(data)
                if is_due:
                    self._call()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(port: int) -> Iterator[Relay]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        running = Relay(listener, port)
        accepting = threading.Thread(target=running.accept, args=(listener,), daemon=True)
        accepting.start()
        yield running
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
