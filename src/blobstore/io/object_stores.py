"""Stores of objects: which one an address names, opened by obstore. See objects.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blobstore.errors import InvalidNameError, UsageError, quoted
from blobstore.io.object_errors import OPEN, object_errors
from blobstore.names import relative_path

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CLOUDS = ("s3", "gs", "az")
"""Schemes of services; their variables are the environment's."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]*)(?:/(?P<prefix>.*))?")
_FORM = "Such an address is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_TRUE = frozenset({"1", "true", "yes"})
ATTEMPTS = 5
"""How often a request is made."""
_CONNECT = timedelta(seconds=10)
_SILENCE = timedelta(seconds=20)
_REQUEST = timedelta(seconds=300)  # 16 MiB at 56 KB/s
_IDLE = timedelta(seconds=4)
"""How long a connection is kept for the next request: for less than servers keep it (Node.js and
Apache: 5 s). A write with a condition that meets its end is not repeated, and fails."""
_memory: dict[str, ObjectStore] = {}
_lock = Lock()


def is_bucket(address: str) -> bool:
    """Return True for an address of a bucket."""
    return address.partition("://")[0].lower() in CLOUDS and "://" in address


def open_object_store(address: str, options: Mapping[str, str]) -> tuple[ObjectStore, str, str]:
    """Return the store of an address, its prefix, and the address without a slash at its end.

    Raises: as `open_bucket`.
    """
    match = _ADDRESS.fullmatch(address)
    scheme = match["scheme"] if match is not None else ""
    if match is None or scheme not in (*CLOUDS, "memory", "file"):
        raise UsageError(f"not a bucket: {quoted(address)}", hint=_FORM)
    if scheme in CLOUDS and not match["bucket"].strip("."):
        raise UsageError(f"{quoted(address)} does not name a bucket", hint=_FORM)
    _require_obstore(address)
    prefix = (match["prefix"] or "").strip("/")
    if scheme == "file":
        return _local_store(f"/{prefix}"), "", address
    if prefix:
        _check_prefix(prefix, address)
    if scheme == "memory":
        return _memory_store(match["bucket"]), prefix, address.rstrip("/")
    return _cloud_store(scheme, match["bucket"], options), prefix, address.rstrip("/")


def _cloud_store(scheme: str, bucket: str, options: Mapping[str, str]) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    config: Any = dict(options)
    said = config.pop("allow_http", "").lower() in _TRUE
    host = urlsplit(config.get("endpoint") or config.get("base_url") or "").hostname
    emulated = config.get("use_emulator", "").lower() in _TRUE
    client: Any = {
        "allow_http": said or emulated or host in _LOOPBACK,
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENCE,
        "timeout": _REQUEST,
        "pool_idle_timeout": _IDLE,
    }
    retry: Any = {"max_retries": ATTEMPTS - 1, "retry_timeout": _REQUEST}
    makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    with object_errors(OPEN, f"{scheme}://{bucket}"):
        store: ObjectStore = makers[scheme](
            bucket, config=config, client_options=client, retry_config=retry
        )
    return store


def _memory_store(name: str) -> ObjectStore:
    from obstore.store import MemoryStore

    with _lock:
        return _memory.setdefault(name, MemoryStore())


def _local_store(folder: str) -> ObjectStore:
    from obstore.store import LocalStore

    with object_errors(OPEN, folder):
        return LocalStore(folder, mkdir=True)


def _check_prefix(prefix: str, address: str) -> None:
    try:
        relative_path(prefix)
    except InvalidNameError as error:
        raise UsageError(
            f"{quoted(address)}: {error.message}", rule=error.rule, hint=_FORM
        ) from None


def _require_obstore(address: str) -> None:
    from importlib.util import find_spec

    if find_spec("obstore") is None:
        raise UsageError(
            f"reading and writing {address.partition('://')[0]}:// needs the package obstore",
            hint="pip install 'blobstore[cloud]'",
        )
