"""Addresses that can't be served at."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from blobstore.errors import AccessError, BlobStoreError, StorageError, UsageError
from blobstore.web import server
from blobstore.web.server import serve_at


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
    assert error.message == f"port {port} of 127.0.0.1 is taken by another process"


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


def test_small_answers_do_not_wait_for_confirmations() -> None:
    with server._listening("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
