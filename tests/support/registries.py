"""Real registries on loopback: Debian's docker-registry, and an S3 server of moto behind it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from support import FIXTURES
from support.ports import free_port
from support.token_server import ISSUER, SERVICE, TokenServer

CERTIFICATE = FIXTURES / "tls" / "certificate.pem"
"""For ``localhost`` and ``127.0.0.1``; the file is also the authority to trust."""
KEY = FIXTURES / "tls" / "key.pem"
USER, PASSWORD = "alice", "swordfish"
# bcrypt of PASSWORD, of the lowest cost: docker-registry computes it for every request.
_HTPASSWD = f"{USER}:$2b$04$abcdefghijklmnopqrstuugIEnm3ZbWF6xb2GcoE3L1CoGJFMKtu.\n"
_PATIENCE_S = 600
BUCKET = "models"
_MOTO = """
from threading import Lock
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

dispatch, lock = DomainDispatcherApplication.__call__, Lock()

def one_at_a_time(app, environ, start_response):
    with lock:
        return dispatch(app, environ, start_response)

DomainDispatcherApplication.__call__ = one_at_a_time
from moto.server import main
main()
"""
"""moto's server, which answers one request after the other.

It compares the version of an object and replaces the object in two steps: of two requests at once
both may succeed, and one update is lost.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """An S3 bucket on loopback; ``redirects``: the registry sends its clients there for blobs."""

    url: str
    redirects: bool = False


@dataclass(frozen=True, slots=True)
class Registry:
    """A running docker-registry, whose files and log lie in ``folder``."""

    folder: Path
    port: int
    scheme: str

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    @property
    def log(self) -> str:
        """What it has printed, with a line for each request that is over."""
        return (self.folder / "log").read_text("utf-8", "replace")

    def linked(self, repository: str) -> set[str]:
        """Return the digests, in hex digits, that a repository gives out; not for a bucket."""
        root = self.folder / "root" / "docker/registry/v2/repositories" / repository
        return {link.parent.name for link in root.glob("_layers/sha256/*/link")}

    def tags(self) -> dict[str, bytes]:
        """Return the manifest of each tag, by ``repository:tag``; not for a bucket."""
        repositories = self.folder / "root/docker/registry/v2/repositories"
        found = {}
        for link in repositories.glob("*/*/_manifests/tags/*/current/link"):
            tag = link.parent.parent
            repository = tag.parents[2].relative_to(repositories)
            raw = self._blob(link.read_text().removeprefix("sha256:")).read_bytes()
            found[f"{repository}:{tag.name}"] = raw
        return found

    def incomplete(self) -> list[str]:
        """Return the blobs, as ``repository:tag digest``, that are missing or have another size."""
        missing = []
        for name, raw in self.tags().items():
            manifest = json.loads(raw)
            there = self.linked(name.rpartition(":")[0])
            for entry in [*manifest["layers"], manifest["config"]]:
                digits = entry["digest"].removeprefix("sha256:")
                path = self._blob(digits)
                size = path.stat().st_size if path.exists() else None
                if digits not in there or size != entry["size"]:
                    missing.append(f"{name} {digits}")
        return missing

    def _blob(self, digits: str) -> Path:
        return self.folder / f"root/docker/registry/v2/blobs/sha256/{digits[:2]}/{digits}/data"


@contextmanager
def registry(
    folder: Path,
    *,
    htpasswd: bool = False,
    tokens: TokenServer | None = None,
    bucket: Bucket | None = None,
    tls: bool = False,
    relative: bool = False,
) -> Iterator[Registry]:
    """Run docker-registry for as long as the block lasts; `cannot_run` where it is missing.

    ``htpasswd``: it asks for USER and PASSWORD. ``relative``: the addresses of uploads are paths.
    What an earlier one left in the folder is there again. Its log is kept.
    """
    if shutil.which("docker-registry") is None:
        cannot_run("docker-registry is not installed (Debian: apt-get install docker-registry)")
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "error"},  # and the access log: a line for each request
        "storage": _storage(folder, bucket),
        "http": {"secret": "not a secret", "relativeurls": relative},
    }
    if tls:
        config["http"]["tls"] = {"certificate": str(CERTIFICATE), "key": str(KEY)}
    if htpasswd:
        (folder / "htpasswd").write_text(_HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "the lab", "path": str(folder / "htpasswd")}}
    if tokens is not None and tokens.keys is not None:
        config["auth"] = {
            "token": {
                "realm": tokens.realm,
                "service": SERVICE,
                "issuer": ISSUER,
                "rootcertbundle": str(tokens.keys / "certificate.pem"),
            }
        }

    def line(port: int) -> list[str]:
        config["http"]["addr"] = f"127.0.0.1:{port}"
        (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
        return ["docker-registry", "serve", str(folder / "config.yml")]

    with started(line, folder / "log", tls=tls) as port:
        yield Registry(folder, port, "https" if tls else "http")


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """Run an S3 server with one empty bucket; give its address."""
    folder.mkdir(parents=True, exist_ok=True)

    def line(port: int) -> list[str]:
        return [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]

    with started(line, folder / "moto.log") as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield f"http://127.0.0.1:{port}"


def skopeo(*arguments: str | Path) -> str:
    """Run skopeo, by plain http, any signature trusted; return its output, or `cannot_run`."""
    if shutil.which("skopeo") is None:
        cannot_run("skopeo is not installed (Debian: apt-get install skopeo)")
    line = ["skopeo", "--insecure-policy", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


def _storage(folder: Path, bucket: Bucket | None) -> dict[str, Any]:
    general: dict[str, Any] = {
        "delete": {"enabled": True},
        "cache": {"blobdescriptor": "inmemory"},  # as Debian configures it
        "maintenance": {"uploadpurging": {"enabled": False}},
    }
    if bucket is None:
        return {"filesystem": {"rootdirectory": str(folder / "root")}, **general}
    s3 = {
        "accesskey": "key",
        "secretkey": "secret",
        "region": "us-east-1",
        "regionendpoint": bucket.url,
        "bucket": BUCKET,
        "secure": urlsplit(bucket.url).scheme == "https",
        "v4auth": True,
    }
    return {"s3": s3, "redirect": {"disable": not bucket.redirects}, **general}


@contextmanager
def started(
    line: Callable[[int], Sequence[str | Path]], log: Path, *, tls: bool = False
) -> Iterator[int]:
    """Run a server for as long as the block lasts, and give its port when it answers.

    ``line``: its command, for a port. Its output goes to ``log``. `cannot_run` if it does not
    start.
    """
    # docker-registry's S3 driver panics at an AWS_CA_BUNDLE.
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    mortal = ["setpriv", "--pdeathsig", "KILL"]  # it ends with the tests, however they end
    for _ in range(3):  # another program may take the port between
        port = free_port()
        with log.open("wb") as out:
            words = [*mortal, *line(port)]
            process = subprocess.Popen(words, stdout=out, stderr=out, env=environment)
        try:
            if _answers(port, process, tls=tls):
                yield port
                return
        finally:
            process.kill()
            process.wait()
    cannot_run(f"{line(0)[0]} does not start: {log.read_text()[-2000:]}")


def _answers(port: int, process: subprocess.Popen[bytes], *, tls: bool) -> bool:
    """Wait until the server answers a request; return False if its process ends before."""
    while process.poll() is None:
        connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        if tls:
            trusted = create_default_context(cafile=str(CERTIFICATE))
            connection = HTTPSConnection("127.0.0.1", port, timeout=_PATIENCE_S, context=trusted)
        with suppress(OSError, HTTPException), closing(connection):
            connection.request("GET", "/")
            connection.getresponse().read()
            return process.poll() is None
        time.sleep(0.01)
    return False


def cannot_run(why: str) -> NoReturn:
    """Fail in CI, where it has to be shown; elsewhere skip, and say what was not shown."""
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(f"NOT SHOWN: {why}")
