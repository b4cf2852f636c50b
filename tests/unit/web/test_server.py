"""Addresses that can't be served at, and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest

from blobstore.errors import AccessError, BlobStoreError, StorageError, UsageError
from blobstore.web import application as server
from blobstore.web.application import serve_at


async def never(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError("nothing is served")


def refused(host: str, port: int) -> BlobStoreError:
    with pytest.raises(BlobStoreError) as caught:
        serve_at(never, host, port, ready=pytest.fail)
    return caught.value


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("127.0.0.1", port)
    assert isinstance(error, StorageError)
    assert error.message == f"port {port} of 127.0.0.1 is in use by another process"


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.1", "not an address of this machine"),  # RFC 5737: of no machine
        ("no such host", "not an address or a known name"),
        ("a" * 300, "not an address or a known name"),
    ],
)
def test_an_address_that_is_not_the_machines(host: str, says: str) -> None:
    error = refused(host, 0)
    assert isinstance(error, UsageError)
    assert says in error.message


def test_a_port_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    class Denied(socket.socket):
        def bind(self, _address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Denied)
    error = refused("127.0.0.1", 80)
    assert isinstance(error, AccessError)
    assert error.message == "port 80 of 127.0.0.1 may not be used"


def interrupt_twice(addresses: SimpleQueue[str]) -> None:
    """Ask for what never comes; interrupt this process, and again when it has heard that."""
    port = int(addresses.get().rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        addresses.get()  # the request is in flight
        os.kill(os.getpid(), signal.SIGINT)
        with suppress(ConnectionError):
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
        os.kill(os.getpid(), signal.SIGINT)
        assert client.recv(12) in (b"", b"HTTP/1.1 500")  # uvicorn cancels what has not begun


def test_a_second_interrupt_ends_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_S", 3600)
    told: SimpleQueue[str] = SimpleQueue()

    async def silent(_scope: Any, _receive: Any, _send: Any) -> None:
        told.put("a request")
        await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as threads:
        client = threads.submit(interrupt_twice, told)
        serve_at(silent, "127.0.0.1", 0, ready=told.put)
        client.result()
    assert signal.getsignal(signal.SIGINT) is before
