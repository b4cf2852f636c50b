"""A real web server on loopback: Debian's nginx, with its log of requests and replies."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import NoReturn

import pytest

_CONFIG = """
{user}
worker_processes 1;
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    default_type application/octet-stream;
    log_format asked '$status $bytes_sent $body_bytes_sent $connection $http_range $request_uri';
    access_log {folder}/access.log asked;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    sendfile on;
    keepalive_requests 100000;
    gzip {gzip};
    gzip_types *;
    gzip_min_length 1;
    server {{
        listen 127.0.0.1:{port} backlog=256;
        root {root};
    }}
}}
"""
_PATIENCE_S = 60
_LAST = "/the-last-request"


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the log: ``sent`` counts the reply's head, ``body`` does not."""

    status: int
    sent: int
    body: int
    connection: int
    range: str
    path: str


class Nginx:
    """A running server of the files below ``root``."""

    def __init__(self, folder: Path, root: Path, port: int) -> None:
        self.root = root
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._log = folder / "access.log"
        self._seen = 0

    def requests(self) -> list[Request]:
        """Return the requests since the last call.

        nginx writes a line when a request is over, which its client knows earlier. Its one worker
        writes it before it takes another request: so one more is sent, and its line ends the log.
        """
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)) as last:
            last.request("GET", _LAST)
            last.getresponse().read()
        until = time.monotonic() + _PATIENCE_S
        while not (lines := self._log.read_text().splitlines()[self._seen :]) or not lines[
            -1
        ].endswith(_LAST):
            if time.monotonic() > until:
                raise TimeoutError(f"nginx does not log {_LAST}")
            time.sleep(0.005)
        self._seen += len(lines)
        return [_request(line) for line in lines[:-1]]


@contextmanager
def nginx(folder: Path, root: Path, *, gzip: bool = True) -> Iterator[Nginx]:
    """Run nginx for as long as the block lasts, with its files in ``folder``.

    Where there is none: see `_cannot_run`.

    With ``gzip`` it compresses everything for whoever does not ask for the bytes as they are, and
    has no ranges for him.
    """
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        _cannot_run("nginx is not installed (Debian: apt-get install nginx-light)")
    folder.mkdir(parents=True, exist_ok=True)
    user = "user root;" if os.geteuid() == 0 else ""
    settings = {"folder": folder, "root": root, "user": user, "gzip": "on" if gzip else "off"}
    for _ in range(3):  # another program may take the port between
        port = _free_port()
        (folder / "nginx.conf").write_text(_CONFIG.format(**settings, port=port))
        line = [program, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if _answers(port, process):
                yield Nginx(folder, root, port)
                return
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)
    _cannot_run(f"nginx does not start: {(folder / 'error.log').read_text()}")


def _request(line: str) -> Request:
    status, sent, body, connection, asked, path = line.split(" ", 5)
    return Request(int(status), int(sent), int(body), int(connection), asked, path)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        time.sleep(0.01)
    return False


def _cannot_run(why: str) -> NoReturn:
    """Fail in CI, where it has to be shown.

    Elsewhere say loudly that it was not (pytest prints why).
    """
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(f"NOT SHOWN: {why}")
