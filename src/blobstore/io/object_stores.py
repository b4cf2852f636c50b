"""Stores of objects: which one an address names, opened by obstore, and its errors as ours.

obstore's messages quote the server's answer and the address with its query, which may be a
signature (Azure's SAS). So a message of ours contains only the operation, the key, the HTTP status
and the service's error code. Source: obstore 0.12 `obstore.exceptions`; S3's, Google's and Azure's
error documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    ConflictError,
    InvalidNameError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    StorageError,
    UsageError,
    quoted,
)
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

_STATUS = re.compile(r"status code: ([0-9]{3})", re.ASCII)
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>", re.ASCII)
_REASON = re.compile(r" - HTTP error: ([A-Za-z ,']{3,80})", re.ASCII)
_PATH = re.compile(r'object with invalid path: (?:Error parsing )?Path "([^"]{1,300})"')
_SETTING = re.compile(r"error: ([A-Za-z ,']{3,80})", re.ASCII)
OPEN = "open"
"""The operation before any request: only settings can fail then."""
_UNREACHABLE = "kind: Connect"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_CREDENTIALS = (
    "169.254.169.254",  # a machine's own identity, which object stores ask for last
    "metadata.google.internal",
    "latest/api/token",
    "oauth2/token",
    "MissingAccessKeyId",
    "MissingSecretAccessKey",
)
_DENIED = frozenset({401, 403})
_TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
_BEYOND, _MISSING, _REDIRECT = 416, 404, range(300, 400)
_LONGEST = 200
_HINTS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public"
    " bucket), and AWS_REGION.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login"
    " (GOOGLE_SKIP_SIGNATURE=true for a public bucket).",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_KEY"
    " (AZURE_SKIP_SIGNATURE=true for a public container).",
}


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


@contextmanager
def object_errors(operation: str, place: str) -> Iterator[None]:
    """Turn obstore's exceptions in the block into errors of ours.

    ``place``: the address of an object, or of a prefix.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, BlobStoreError):
            raise
        # Without its cause: a traceback would print obstore's message, with its address.
        raise object_error(error, operation, place) from None


def object_error(error: Exception, operation: str, place: str) -> BlobStoreError:
    """Return our error for one of obstore's: ``operation`` failed at ``place``."""
    text = str(error)
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    return (
        _of_access(error, operation, place, status)
        or _of_object(error, place, status)
        or _of_request(error, operation, place)
        or _of_server(text, operation, place, status)
    )


def _of_access(
    error: Exception, operation: str, place: str, status: int | None
) -> BlobStoreError | None:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    if any(word in text for word in _CREDENTIALS):
        return _denied(AccessError, "missing credentials for", place)
    kinds = PermissionDeniedError | UnauthenticatedError | PermissionError
    if isinstance(error, kinds) or status in _DENIED:
        said = _code(text) or ": access is denied"
        return _denied(AccessError, f"can't {operation}", place, said)
    return None


def _of_object(error: Exception, place: str, status: int | None) -> BlobStoreError | None:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return NotFoundError(f"{place}: its bucket does not exist", path=place)
    if isinstance(error, FileNotFoundError) or status == _MISSING:
        return NotFoundError(f"{place} does not exist", path=place)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return ConflictError(f"{place} is not as expected: another writer changed it", path=place)
    if status == _BEYOND or "StartTooLarge" in text:
        return ShortReadError(f"{place} ends before the bytes that were asked for", path=place)
    return None


def _of_request(error: Exception, operation: str, place: str) -> BlobStoreError | None:
    """Return the error of a request that could not be sent, because of what was asked."""
    from obstore import exceptions

    text, why, hint = str(error), None, None
    if "BadScheme" in text:
        why = "its endpoint is http and not on this machine"
        hint = 'Use https, or allow it: AWS_ALLOW_HTTP=true, or the option "allow_http".'
    elif isinstance(error, exceptions.InvalidPathError) or type(error) is ValueError:
        why = "an invalid key or address"
        if (found := _PATH.search(text)) is not None:
            why, hint = (
                f"an object has the invalid key {found[1]!r}",
                "Rename or remove the object.",
            )
    elif isinstance(error, exceptions.UnknownConfigurationKeyError):
        why = text.partition("\n")[0][:_LONGEST]
    elif operation == OPEN:
        why = match[1] if (match := _SETTING.search(text)) else "its settings are invalid"
        hint = _hint(place)
    elif isinstance(error, exceptions.NotSupportedError | NotImplementedError):
        return StorageError(f"can't {operation} {place}: its kind of store does not", path=place)
    elif isinstance(error, OSError) and error.errno is not None:
        return StorageError(f"can't {operation} {place}: {error.strerror}", path=place)
    return UsageError(f"{place}: {why}", path=place, hint=hint) if why is not None else None


def _of_server(text: str, operation: str, place: str, status: int | None) -> RemoteError:
    elsewhere = "redirect without LOCATION" in text or status in _REDIRECT
    unreachable = _UNREACHABLE in text
    why = ": can't connect to its server" if unreachable else _code(text, status)
    hint = "Check the network, and the endpoint if you set one." if unreachable else None
    return RemoteError(
        f"can't {operation} {place}{why}",
        path=place,
        status=status,
        temporary=not elsewhere and (status is None or status in _TEMPORARY),
        hint="The bucket may be in another region: set AWS_REGION." if elsewhere else hint,
    )


def _code(text: str, status: int | None = None) -> str:
    """Return the service's code or reason, for the end of a message."""
    code, reason = _CODE.search(text), _REASON.search(text)
    said = code[1] if code is not None else reason[1].strip() if reason is not None else None
    parts = [f"the server answers {status}"] if status is not None else []
    return "".join(f": {part}" for part in [*parts, *([said] if said is not None else [])])


def _denied(kind: type[BlobStoreError], what: str, place: str, said: str = "") -> BlobStoreError:
    return kind(f"{what} {place}{said}", path=place, hint=_hint(place))


def _hint(place: str) -> str | None:
    return _HINTS.get(place.partition(":")[0])
