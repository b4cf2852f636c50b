"""Servers on loopback, clients that do not wait long between attempts, and files to serve."""

import json
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import FIXTURES
from support.retry_policies import patient_clients, patient_policy
from support.servers import Server, reply, server as run_server

from blobstore.io.http.remote_files import Remote

KIB = 2**10
RETRY_POLICY = patient_policy(attempts=3, backoff_s=0.001, longest_wait_s=0.05)
CERTIFICATE = FIXTURES / "tls" / "certificate.pem"


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    with patient_clients():
        yield


@pytest.fixture
def other_server() -> Iterator[Server]:
    """Another origin: the same host, another port."""
    with run_server() as running:
        yield running


@pytest.fixture(scope="session")
def remote() -> Iterator[Remote]:
    with Remote(retry_policy=RETRY_POLICY) as made:
        yield made


@contextmanager
def tls_server() -> Iterator[Server]:
    """Run a server whose certificate is for ``localhost`` and 127.0.0.1, and not trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, FIXTURES / "tls" / "key.pem")
    with run_server(context=context) as running:
        running.play(reply(200, body=b"x"))
        yield running


def resolving(table: dict[str, list[str]]) -> Callable[..., Any]:
    """Return a ``getaddrinfo`` whose names resolve to the next of their own addresses."""
    system = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        found = table.get(host, [host])
        return system(found.pop(0) if len(found) > 1 else found[0], *arguments, **options)

    return getaddrinfo


def safetensors_file(header: int, data: int = 4) -> bytes:
    """Return a file of one U8 tensor whose header, without its length, has ``header`` bytes."""
    entry = {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}
    text = json.dumps({"a": entry}).encode().ljust(header)
    body = (bytes(range(251)) * (data // 251 + 1))[:data]
    return struct.pack("<Q", len(text)) + text + body
