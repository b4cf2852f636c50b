"""A real web server on loopback: Debian's nginx, with its log of requests and replies.

It can also limit its requests. Source: nginx.org/en/docs/http, ngx_http_limit_req_module.
"""

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

from support import FIXTURES
from support.ports import free_port

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
    limit_req_zone $server_port zone=all:1m rate={most_requests}r/s;
    server {{
        listen 127.0.0.1:{port} {tls};
        root {root};
        location / {{ {limits} }}
        location @later {{ add_header Retry-After 1 always; return 429; }}
    }}
}}
"""
_TLS = (
    f"ssl backlog=256; ssl_certificate {FIXTURES}/tls/certificate.pem; "
    f"ssl_certificate_key {FIXTURES}/tls/key.pem"
)
_PATIENCE_S = 120
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

    def __init__(
        self, folder: Path, root: Path, address: tuple[str, int], scheme: str = "http"
    ) -> None:
        self.root = root
        self.url = f"{scheme}://{address[0]}:{address[1]}"
        self.port = address[1]
        self._address = address
        self._log = folder / "access.log"
        self._seen = 0

    def requests(self) -> list[Request]:
        """Return the requests since the last call.

        nginx writes a line when a request is over, which its client knows earlier. Its one worker
        writes it before it takes another request: so one more is sent, whose line comes after them.
        """
        with closing(HTTPConnection(*self._address, timeout=_PATIENCE_S)) as last:
            last.request("GET", _LAST)
            last.getresponse().read()
        until = time.monotonic() + _PATIENCE_S
        while not (count := self._before_last()):
            if time.monotonic() > until:
                raise TimeoutError(f"nginx does not log {_LAST}")
            time.sleep(0.005)
        lines = self._log.read_text().splitlines()[self._seen : self._seen + count]
        self._seen += count
        return [_request(line) for line in lines[:-1]]

    def _before_last(self) -> int:
        """Return the number of new lines up to that of the last request; 0 if it is not there yet.

        Lines may follow it: of replies whose clients have left, when nginx notices that.
        """
        lines = self._log.read_text().splitlines(keepends=True)[self._seen :]
        return next((i for i, line in enumerate(lines, 1) if line.endswith(f"{_LAST}\n")), 0)


@contextmanager
def nginx(
    folder: Path,
    root: Path,
    *,
    gzip: bool = True,
    requests: int | None = None,
    tls: bool = False,
) -> Iterator[Nginx]:
    """Run nginx for as long as the block lasts, with its files in ``folder``.

    Where there is none: see `_cannot_run`.

    With ``gzip`` it compresses everything for whoever does not ask for the bytes as they are, and
    has no ranges for him. For more than ``requests`` a second it answers 429.
    """
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        _cannot_run("nginx is not installed (Debian: apt-get install nginx-light)")
    folder.mkdir(parents=True, exist_ok=True)
    user = "user root;" if os.geteuid() == 0 else ""
    limits = f"limit_req zone=all burst={requests} nodelay; limit_req_status 429;"
    settings = {
        "folder": folder,
        "root": root,
        "user": user,
        "gzip": "on" if gzip else "off",
        "limits": f"{limits} error_page 429 = @later;" if requests else "",
        "most_requests": requests or 1,
        "tls": _TLS if tls else "backlog=256",
    }
    for _ in range(3):  # another program may take the port between
        port = free_port()
        (folder / "nginx.conf").write_text(_CONFIG.format(**settings, port=port))
        line = [program, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        address = ("127.0.0.1", port)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if _answers(address, process):
                yield Nginx(folder, root, address, "https" if tls else "http")
                return
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)
    _cannot_run(f"nginx does not start: {(folder / 'error.log').read_text()}")


def _request(line: str) -> Request:
    status, sent, body, connection, asked, path = line.split(" ", 5)
    return Request(int(status), int(sent), int(body), int(connection), asked, path)


def _answers(address: tuple[str, int], process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(address):
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
