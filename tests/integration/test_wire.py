"""A line with distance takes its time. Marked `lab`: it needs root, /dev/net/tun and nginx."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.nginx import nginx
from support.wire import Line, far_network, own_network

pytestmark = pytest.mark.lab
MB = 1_000_000
SIZE = 4 * MB


@contextmanager
def file_behind(line: Line, folder: Path) -> Iterator[str]:
    """Give the address of a file behind a line."""
    root = folder / "root"
    root.mkdir()
    (root / "file").write_bytes(bytes(range(256)) * (SIZE // 256))
    with (
        own_network(),
        far_network(line) as network,
        nginx(folder / "nginx", root, host=network.host, within=network.within) as server,
    ):
        yield f"{server.url}/file"


def seconds_of(*urls: str) -> float:
    """Return how long it takes to read files at once, each over a connection of its own."""
    began = time.monotonic()
    readers = [subprocess.Popen(["curl", "-sf", url], stdout=subprocess.PIPE) for url in urls]
    sizes = [len(reader.communicate(timeout=240)[0]) for reader in readers]
    assert sizes == [SIZE] * len(urls)
    return time.monotonic() - began


def test_every_byte_takes_its_way(tmp_path: Path) -> None:
    """A connection is made in one way there and back, and answers in another."""
    with file_behind(Line(delay_s=0.2, rate=1000 * MB, each=1000 * MB), tmp_path) as url:
        assert seconds_of(url) >= 0.4


def test_a_connection_has_its_rate(tmp_path: Path) -> None:
    with file_behind(Line(delay_s=0.01, rate=1000 * MB, each=10 * MB), tmp_path) as url:
        assert seconds_of(url) >= SIZE / (10 * MB)


def test_the_line_has_its_rate(tmp_path: Path) -> None:
    with file_behind(Line(delay_s=0.01, rate=20 * MB, each=20 * MB), tmp_path) as url:
        assert seconds_of(url, url, url) >= 3 * SIZE / (20 * MB)
