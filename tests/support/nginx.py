"""A real web server on loopback: Debian's nginx, with its log of requests and replies."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from support import FIXTURES
from support.registries import cannot_run, started

_CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    default_type application/octet-stream;
    log_format asked '$status $connection $http_range $request_uri';
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
        listen 127.0.0.1:{port} {tls};
        root {root};
    }}
}}
"""
_TLS = (
    f"ssl backlog=256; ssl_certificate {FIXTURES}/tls/certificate.pem; "
    f"ssl_certificate_key {FIXTURES}/tls/key.pem"
)
_LAST = "/the-last-request"


@dataclass(slots=True)
class Nginx:
    """A running server of the files below ``root``."""

    root: Path
    port: int
    scheme: str
    _log: Path
    _seen: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def requests(self) -> list[list[str]]:
        """Return status, number of the connection and range of the requests since the last call.

        nginx logs a request behind its reply, in the order of replies, before it takes another
        request: so one more is sent, whose line comes after them.
        """
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=600)) as last:
            last.request("GET", _LAST)
            last.getresponse().read()
        while True:
            lines = self._log.read_text().splitlines(keepends=True)[self._seen :]
            for count, line in enumerate(lines):  # some of clients that have left may follow it
                if line.endswith(f"{_LAST}\n"):
                    self._seen += count + 1
                    return [one.split(" ")[:3] for one in lines[:count]]
            time.sleep(0.005)


@contextmanager
def nginx(folder: Path, root: Path, *, gzip: bool = True, tls: bool = False) -> Iterator[Nginx]:
    """Run nginx for as long as the block lasts, with its files in ``folder``.

    With ``gzip`` it compresses everything for whoever does not ask for the bytes as they are, and
    has no ranges for him.
    """
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        cannot_run("nginx is not installed (Debian: apt-get install nginx-light)")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "folder": folder,
        "root": root,
        "gzip": "on" if gzip else "off",
        "tls": _TLS if tls else "backlog=256",
    }

    def line(port: int) -> list[str]:
        (folder / "nginx.conf").write_text(_CONFIG.format(**settings, port=port))
        return [program, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]

    with started(line, folder / "output.log", tls=tls) as port:
        running = Nginx(root, port, "https" if tls else "http", folder / "access.log")
        if not tls:
            running.requests()  # what asked whether it answers
        yield running
