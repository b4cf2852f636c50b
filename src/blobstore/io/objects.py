"""Buckets: objects under a prefix of S3, Google Cloud Storage or Azure, by obstore.

Addresses: ``s3://BUCKET[/PREFIX]``, ``gs://BUCKET[/PREFIX]``, ``az://CONTAINER[/PREFIX]``;
``file:///FOLDER`` and ``memory://NAME`` (a store in this process, the same for the same name) are
for tests and mirrors.

obstore takes credentials, region and endpoint from ``options``, else from the variables that other
tools of the service read (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_KEY, …). http is used with an endpoint on this machine only, unless the option
``allow_http`` says otherwise. Source: obstore 0.12 `obstore.store`.

An object's version is its ETag, and the service's own version where it has one. A read with a
version gets the bytes of that version, or an error; a write with one replaces that version only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blobstore.errors import (
    CorruptDataError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    UsageError,
    quoted,
)
from blobstore.io.object_errors import OPEN, object_errors
from blobstore.names import relative_path

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutResult
    from obstore.store import ObjectStore

CLOUDS = ("s3", "gs", "az")
"""Schemes of services; their variables are the environment's."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]*)(?:/(?P<prefix>.*))?")
_FORM = "Such an address is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_TRUE = frozenset({"1", "true", "yes"})
_UNVERSIONED = "null"  # as S3 names the version of an object in a bucket without versions
_AZURE_LISTED = re.compile(r"0x[0-9A-Fa-f]+", re.ASCII)
"""An ETag in Azure's listings: they lack its quotation marks (learn.microsoft.com, List Blobs)."""
_CHUNK = 2**20
_PAGE = 1000
_ATTEMPTS = 5
_CONNECT = timedelta(seconds=10)
_SILENCE = timedelta(seconds=20)
_REQUEST = timedelta(seconds=300)  # 16 MiB at 56 KB/s
_memory: dict[str, ObjectStore] = {}
_lock = Lock()


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One version of an object, by its service. ``etag`` has its quotation marks."""

    etag: str | None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object as its service lists it; ``key`` is without the bucket's prefix."""

    key: str
    size: int
    version: ObjectVersion
    modified: datetime


def is_bucket(address: str) -> bool:
    """Return True for an address of a bucket."""
    return address.partition("://")[0].lower() in CLOUDS and "://" in address


def open_bucket(address: str, options: Mapping[str, str] | None = None) -> Bucket:
    """Return the bucket at an address; no server is asked yet.

    ``options``: obstore's, such as ``endpoint``, ``region``, ``access_key_id``; ``allow_http``.

    Raises: UsageError for another kind of address, an unknown option, or without obstore.
    """
    match = _ADDRESS.fullmatch(address)
    scheme = match["scheme"] if match is not None else ""
    if match is None or scheme not in (*CLOUDS, "memory", "file"):
        raise UsageError(
            f"not a bucket: {quoted(address)}",
            hint=_FORM,
        )
    if scheme in CLOUDS and not match["bucket"].strip("."):
        raise UsageError(f"{quoted(address)} does not name a bucket", hint=_FORM)
    _require_obstore(address)
    prefix = (match["prefix"] or "").strip("/")
    if scheme == "file":
        return Bucket(address, _local_store(f"/{prefix}"), "")
    if prefix:
        _check_prefix(prefix, address)
    if scheme == "memory":
        return Bucket(address.rstrip("/"), _memory_store(match["bucket"]), prefix)
    return Bucket(address.rstrip("/"), _cloud_store(scheme, match["bucket"], options or {}), prefix)


class Bucket:
    """Objects by key, under one prefix. Safe to share between threads.

    Every method raises NotFoundError for a missing object or bucket, AccessError without
    credentials or permission, RemoteError for a service that can't be reached or fails.
    Temporary failures were retried.
    """

    def __init__(self, address: str, store: ObjectStore, prefix: str) -> None:
        self.address = address
        self.store = store
        self._prefix = f"{prefix}/" if prefix else ""

    def above(self) -> tuple[Bucket, str] | None:
        """Return the folder that this prefix is in, and its name there; None for a whole bucket."""
        above, _, name = self._prefix.rstrip("/").rpartition("/")
        if not name:
            return None
        return Bucket(self.address.removesuffix(f"/{name}"), self.store, above), name

    def place(self, key: str) -> str:
        """Return the address of an object."""
        return f"{self.address}/{key}" if key else self.address

    def get(
        self, key: str, version: ObjectVersion | None = None, *, limit: int | None = None
    ) -> tuple[bytes, ObjectVersion]:
        """Return an object's bytes and version.

        Raises: CorruptDataError when it is not of ``version``; LimitExceededError when it has more
        than ``limit`` bytes.
        """
        with object_errors("read", self.place(key)):
            result = self._ask(key, version, {})
            size = result.meta["size"]
            if limit is not None and size > limit:
                raise LimitExceededError(
                    f"limit exceeded: {self.place(key)} has {size:,} bytes, at most {limit:,}",
                    path=self.place(key),
                )
            data = bytes(result.bytes())
        if len(data) != size:
            raise self._short(key)
        return data, _version(result.meta)

    def get_into(
        self,
        key: str,
        begin: int,
        buffer: memoryview,
        version: ObjectVersion | None = None,
        *,
        came: Callable[[int], None] | None = None,
    ) -> None:
        """Fill ``buffer`` with the bytes of an object from byte ``begin`` on.

        ``came`` is called with the number of bytes of each piece, and may raise to end the request.
        A reply that breaks goes on where it broke, four times at most.

        Raises: CorruptDataError when it is not of ``version``; ShortReadError when it is shorter.
        """
        done, attempt = 0, 1
        while done < len(buffer):
            before = done
            try:
                for chunk in self._chunks(key, begin + done, begin + len(buffer), version):
                    if done + len(chunk) > len(buffer):
                        raise self._wrong(key, "sends more than was asked for")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    if came is not None:
                        came(len(chunk))
            except RemoteError as error:
                attempt = attempt + 1 if done == before else 1
                if not error.temporary or attempt > _ATTEMPTS:
                    raise
            else:
                if done < len(buffer):
                    raise self._short(key)

    def head(self, key: str) -> ObjectState:
        """Return an object's state."""
        import obstore

        with object_errors("read", self.place(key)):
            return self._state(obstore.head(self.store, self._prefix + key))

    def objects(self, prefix: str = "") -> Iterator[ObjectState]:
        """Yield all objects whose keys begin with the folder ``prefix``, in no order."""
        import obstore

        with object_errors("list", self.place(prefix)):
            for page in obstore.list(self.store, self._prefix + prefix or None, chunk_size=_PAGE):
                for meta in page:
                    yield self._state(meta)

    def folder(self, prefix: str = "") -> tuple[list[str], list[ObjectState]]:
        """Return the names of the folders in the folder ``prefix``, and the objects in it."""
        import obstore

        with object_errors("list", self.place(prefix)):
            found = obstore.list_with_delimiter(self.store, self._prefix + prefix or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        return sorted(folders), [self._state(meta) for meta in found["objects"]]

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_match: ObjectVersion | None = None,
        if_absent: bool = False,
    ) -> ObjectVersion:
        """Write an object in one request, and return its version.

        ``if_match``: only when the object has this version now. ``if_absent``: only when it is
        missing. Raises: ConflictError otherwise. A request that was retried may have
        written the object before its answer was lost: then the error means our own write.
        """
        import obstore

        mode: Any = "create" if if_absent else "overwrite"
        if if_match is not None:
            known = {"e_tag": if_match.etag, "version": if_match.version}
            mode = {name: value for name, value in known.items() if value is not None}
        with object_errors("write", self.place(key)):
            made = obstore.put(self.store, self._at(key), data, mode=mode, use_multipart=False)
        return _version(made)

    def upload(
        self, key: str, pieces: Iterable[bytes], *, part: int = 8 * 2**20, at_once: int = 4
    ) -> ObjectVersion:
        """Write a large object in parts of ``part`` bytes, ``at_once`` of them at a time.

        The object appears with its last byte. A failure aborts the upload.
        """
        import obstore

        with object_errors("write", self.place(key)):
            made = obstore.put(
                self.store,
                self._at(key),
                iter(pieces),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=at_once,
            )
        return _version(made)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is not an error."""
        for start in range(0, len(keys), _PAGE):
            page = keys[start : start + _PAGE]
            try:
                self._delete(page)
            except NotFoundError:  # Google and Azure stop at the first one that is missing
                for key in page:
                    with suppress(NotFoundError):
                        self._delete([key])

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        with object_errors("remove", self.place(keys[0])):
            obstore.delete(self.store, [self._at(key) for key in keys])

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket, by its service."""
        import obstore

        with object_errors("copy", self.place(source)):
            obstore.copy(self.store, self._at(source), self._at(target))

    def _at(self, key: str) -> str:
        relative_path(key.replace(":", "_"))  # the port in a host's name is part of a key
        return self._prefix + key

    def _ask(self, key: str, version: ObjectVersion | None, options: GetOptions) -> GetResult:
        """Return the reply for an object of this version."""
        import obstore

        if version is not None:
            if version.etag is not None:
                options["if_match"] = version.etag
            if version.version is not None:
                options["version"] = version.version
        try:
            result = obstore.get(self.store, self._at(key), options=options)
        except obstore.exceptions.PreconditionError:
            raise self._changed(key) from None
        etag = _version(result.meta).etag
        if version is not None and None not in (etag, version.etag) and etag != version.etag:
            raise self._changed(key)
        return result

    def _chunks(
        self, key: str, begin: int, end: int, version: ObjectVersion | None
    ) -> Iterator[bytes]:
        with object_errors("read", self.place(key)):
            result = self._ask(key, version, {"range": (begin, end)})
            if result.range[0] != begin or result.range[1] > end:
                raise self._wrong(key, "answers with another range")
            yield from result.stream(min_chunk_size=_CHUNK)

    def _state(self, meta: ObjectMeta) -> ObjectState:
        key = meta["path"].removeprefix(self._prefix)
        return ObjectState(key, meta["size"], _version(meta), meta["last_modified"])

    def _changed(self, key: str) -> CorruptDataError:
        place = self.place(key)
        return CorruptDataError(f"{place} changed while it was read", path=place)

    def _short(self, key: str) -> ShortReadError:
        place = self.place(key)
        return ShortReadError(f"{place} ends before the bytes that were asked for", path=place)

    def _wrong(self, key: str, what: str) -> RemoteError:
        place = self.place(key)
        return RemoteError(f"{place}: its server {what} (rule R1)", rule="R1", path=place)


def _version(meta: ObjectMeta | PutResult) -> ObjectVersion:
    etag, version = meta["e_tag"], meta["version"]
    if etag is not None and _AZURE_LISTED.fullmatch(etag):
        etag = f'"{etag}"'
    return ObjectVersion(etag, None if version == _UNVERSIONED else version)


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
    }
    retry: Any = {"max_retries": _ATTEMPTS - 1, "retry_timeout": _REQUEST}
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
