"""Object storage on loopback: moto's S3, and azurite's Blob service.

Each gives a bucket, and the options with which `open_bucket` finds it. azurite is what .ci/azurite
installs. Sources: github.com/Azure/Azurite README "Default Storage Account"; learn.microsoft.com
"Authorize with Shared Key", for the one request that makes a container.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.registries import BUCKET, cannot_run, moto, started

if TYPE_CHECKING:
    from obstore.store import ObjectStore

AZURITE = Path(os.environ.get("AZURITE", "/opt/azurite/node_modules/.bin/azurite-blob"))
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-12-02"


@dataclass(frozen=True, slots=True)
class CloudBucket:
    """An empty bucket: its address, and the options to open it."""

    address: str
    options: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """The options of S3 as variables."""
        named = {f"AWS_{name.upper()}": value for name, value in self.options.items()}
        return named | {"AWS_ENDPOINT_URL": named["AWS_ENDPOINT"], "AWS_ALLOW_HTTP": "true"}

    def store(self) -> ObjectStore:
        """Return the bucket as its service's client has it, without our code."""
        from obstore.store import from_url

        options: dict[str, Any] = {**self.options, "client_options": {"allow_http": True}}
        store: ObjectStore = from_url(self.address, **options)
        return store

    def upload(self, folder: Path, prefix: str) -> None:
        import obstore

        store = self.store()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path)


@contextmanager
def moto_s3(folder: Path) -> Iterator[CloudBucket]:
    """Run moto's S3."""
    with moto(folder) as url:
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        yield CloudBucket(f"s3://{BUCKET}", keys | {"endpoint": url})


@contextmanager
def azurite(folder: Path) -> Iterator[CloudBucket]:
    """Run azurite's Blob service; `cannot_run` where it is missing."""
    if not AZURITE.exists():
        cannot_run(f"azurite is not installed in {AZURITE} (.ci/azurite /opt/azurite)")
    folder.mkdir(parents=True, exist_ok=True)

    def line(port: int) -> list[str]:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        return [str(AZURITE), *place, "--silent", "--disableTelemetry", "--skipApiVersionCheck"]

    with started(line, folder / "log") as port:
        _make_container(port)
        url = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        keys = {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": url}
        yield CloudBucket(f"az://{BUCKET}", keys)


def _make_container(port: int) -> None:
    """Make the bucket, by a request that is signed as Azure wants it."""
    date = formatdate(usegmt=True)
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}\nrestype:container"
    fields = f"x-ms-date:{date}\nx-ms-version:{_VERSION}"
    text = "\n".join(["PUT", *[""] * 11, fields, resource])
    signature = hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
    said = f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}"
    headers = {"x-ms-date": date, "x-ms-version": _VERSION, "Authorization": said}
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    target = f"/{_ACCOUNT}/{BUCKET}?restype=container"
    connection.request("PUT", target, headers={**headers, "Content-Length": "0"})
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()
