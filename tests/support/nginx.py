"""A real web server on loopback: Debian's nginx."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    access_log off;
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


@contextmanager
def nginx(folder: Path, root: Path, *, gzip: bool = True, tls: bool = False) -> Iterator[str]:
    """Run nginx for as long as the block lasts, with its files in ``folder``; yield its address.

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
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
