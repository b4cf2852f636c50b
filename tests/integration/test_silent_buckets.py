"""Ctrl-C ends a command that waits for the server of a bucket, which says nothing."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.lab


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(600)
        yield server


def test_it_ends(silent: socket.socket) -> None:
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    with subprocess.Popen(
        [sys.executable, "-m", "blobstore", "list", "--store", "s3://b/store"],
        env=os.environ | keys | {"AWS_ENDPOINT_URL": address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            with silent.accept()[0] as connection:
                connection.recv(1)  # the command waits for the answer
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=600)  # obstore itself never ends
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "Error: interrupted\n")
