"""Buckets: objects under a prefix of S3, Google Cloud Storage or Azure, by obstore.

Addresses: ``s3://BUCKET[/PREFIX]``, ``gs://BUCKET[/PREFIX]``, ``az://CONTAINER[/PREFIX]``;
``file:///FOLDER`` and ``memory://NAME`` (a store in this process, the same for the same name) are
for tests and mirrors.

obstore takes credentials, region and endpoint from ``options``, else from the variables that other
tools of the service read (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_KEY, …); it reads those of proxies and SSL_CERT_FILE too. http is used with an
endpoint on this machine only, unless the option ``allow_http`` says otherwise. Source: obstore 0.12
`obstore.store`.

An object's version is its ETag, and the service's own version where it has one. A read with a
version gets the bytes of that version, or an error; a write with one replaces that version only.

obstore's messages quote the server's answer and the address with its query, which may be a
signature (Azure's SAS). So a message of ours contains only the operation, the key, the HTTP status
and the service's error code. Source: obstore 0.12 `obstore.exceptions`; S3's, Google's and Azure's
error documents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    StorageError,
    UsageError,
    needs,
    quoted,
)
from blobstore.io.durable import os_errors
from blobstore.io.ranges import Identity, SourceReader, in_buffer
from blobstore.names import relative_path

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutResult
    from obstore.store import ObjectStore

CLOUDS = ("s3", "gs", "az")
"""Schemes of services; their variables are the environment's."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]*)(?:/(?P<prefix>.*))?")
_FORM = (
    "Write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. A registry is HOST, a"
    " model in it HOST/NAMESPACE/MODEL."
)

_TRUE = frozenset({"1", "true", "yes"})
ATTEMPTS = 5
"""How often a request is made, or a write whose object is as expected."""
_CONNECT = timedelta(seconds=10)
_SILENCE = timedelta(seconds=20)
_REQUEST = timedelta(seconds=300)  # 16 MiB at 56 KB/s
IDLE = timedelta(seconds=4)
"""How long a connection is kept for the next request: for less than servers keep it (Node.js and
Apache: 5 s). A write with a condition that meets its end is not repeated, and fails."""
_memory: dict[str, ObjectStore] = {}

_STATUS = re.compile(r"status code: ([0-9]{3})", re.ASCII)
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>", re.ASCII)
_REASON = re.compile(r" - HTTP error: ([A-Za-z ,']{3,80})", re.ASCII)
_PATH = re.compile(r'object with invalid path: (?:Error parsing )?Path "([^"]{1,300})')
_SETTING = re.compile(r"error: ([A-Za-z ,']{3,80})", re.ASCII)
OPEN = "open"
"""The operation before any request: only settings can fail then."""
# Statuses, and 0 for a server that did not answer.
_TEMPORARY = frozenset({0, 408, 429, 500, 502, 503, 504})
_HINTS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public"
    " bucket), and AWS_REGION.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login"
    " (GOOGLE_SKIP_SIGNATURE=true for a public bucket).",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_KEY"
    " (AZURE_SKIP_SIGNATURE=true for a public container).",
}

# An ETag in Azure's listings: they lack its quotation marks (learn.microsoft.com, List Blobs).
_AZURE_LISTED = re.compile(r"0x[0-9A-Fa-f]+", re.ASCII)
_CHUNK, _PAGE = 2**20, 1000


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
    """Return the bucket at an address; no request is sent yet.

    ``options``: obstore's, such as ``endpoint``, ``region``, ``access_key_id``; ``allow_http``;
    ``ca_file``, certificates (PEM) to trust besides the system's.

    Raises: UsageError for another kind of address, an unknown option, or without obstore.
    """
    match = _ADDRESS.fullmatch(address)
    scheme = match["scheme"] if match is not None else ""
    if match is None or scheme not in (*CLOUDS, "memory", "file"):
        raise UsageError(f"not a bucket: {quoted(address)}", hint=_FORM)
    if scheme in CLOUDS and not match["bucket"].strip("."):
        raise UsageError(f"{quoted(address)} does not name a bucket", hint=_FORM)
    with needs("cloud", f"reading and writing {scheme}:// needs the package obstore"):
        from obstore.store import LocalStore, MemoryStore
    prefix = (match["prefix"] or "").strip("/")
    if scheme == "file":
        with object_errors(OPEN, f"/{prefix}"):
            return Bucket(address, LocalStore(f"/{prefix}", mkdir=True), "")
    if prefix:
        try:
            relative_path(prefix)
        except InvalidNameError as error:
            raise UsageError(
                f"{quoted(address)}: {error.message}", rule=error.rule, hint=_FORM
            ) from None
    if scheme == "memory":
        store = _memory.setdefault(match["bucket"], MemoryStore())
    else:
        store = _cloud_store(scheme, match["bucket"], options or {})
    return Bucket(address.rstrip("/"), store, prefix)


def _cloud_store(scheme: str, bucket: str, options: Mapping[str, str]) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    config: Any = dict(options)
    said = config.pop("allow_http", "").lower() in _TRUE
    host = urlsplit(config.get("endpoint") or config.get("base_url") or "").hostname
    emulated = config.get("use_emulator", "").lower() in _TRUE
    client: Any = {
        "allow_http": said or emulated or host in ("localhost", "127.0.0.1", "::1"),
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENCE,
        "timeout": _REQUEST,
        "pool_idle_timeout": IDLE,
    }
    ca_file = config.pop("ca_file", "")
    with os_errors("read certificates from", ca_file):
        files = [path for path in map(Path, ca_file.split(os.pathsep)) if not path.is_dir()]
        if files:
            client["root_certificate"] = b"\n".join(map(Path.read_bytes, files))
    retry: Any = {"max_retries": ATTEMPTS - 1, "retry_timeout": _REQUEST}
    makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    with object_errors(OPEN, f"{scheme}://{bucket}"):
        store: ObjectStore = makers[scheme](
            bucket, config=config, client_options=client, retry_config=retry
        )
    return store


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


@dataclass(frozen=True, slots=True)
class _Failure:
    """Our error for failures of obstore; ``message`` and ``hint`` are formatted.

    ``causes``: classes of its exceptions, HTTP statuses, an operation. ``words``: of its messages.
    """

    kind: Callable[..., BlobStoreError]
    message: str
    causes: tuple[object, ...] = ()
    words: tuple[str, ...] = ()
    hint: str = ""


# The first row that applies counts.
_FAILURES = (
    _Failure(
        AccessError,
        "missing credentials for {place}",
        words=(
            "169.254.169.254",  # a machine's own identity, which object stores ask for last
            "metadata.google.internal",
            "latest/api/token",
            "oauth2/token",
            "MissingAccessKeyId",
            "MissingSecretAccessKey",
        ),
        hint="{variables}",
    ),
    _Failure(
        AccessError,
        "can't {operation} {place}{denial}",
        ("PermissionDeniedError", "UnauthenticatedError", "PermissionError", 401, 403),
        hint="{variables}",
    ),
    _Failure(
        NotFoundError,
        "{place}: its bucket does not exist",
        words=("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist"),
    ),
    _Failure(NotFoundError, "{place} does not exist", ("FileNotFoundError", 404)),
    _Failure(
        ConflictError,
        "{place} is not as expected: another writer changed it",
        ("AlreadyExistsError", "PreconditionError"),
    ),
    _Failure(
        ShortReadError,
        "{place} ends before the bytes that were asked for",
        (416,),
        ("StartTooLarge",),
    ),
    _Failure(
        UsageError,
        "{place}: its endpoint is http and not on this machine",
        words=("BadScheme",),
        hint='Use https, or allow it: AWS_ALLOW_HTTP=true, or the option "allow_http".',
    ),
    _Failure(
        UsageError,
        "{place}: an object has the invalid key {key!r}",
        words=("object with invalid path: ",),
        hint="Rename or remove the object.",
    ),
    _Failure(UsageError, "{place}: an invalid key or address", ("InvalidPathError", "ValueError")),
    _Failure(UsageError, "{place}: {first_line}", ("UnknownConfigurationKeyError",)),
    _Failure(UsageError, "{place}: {setting}", (OPEN,), hint="{variables}"),
    _Failure(
        StorageError,
        "can't {operation} {place}: its kind of store does not support it",
        ("NotSupportedError", "NotImplementedError"),
    ),
    _Failure(
        RemoteError,
        "{place}: its server's certificate is not trusted",
        words=("InvalidCertificate",),
        hint="For a private authority, name its certificates: SSL_CERT_FILE for commands, ca_file"
        " in Python.",
    ),
    _Failure(
        partial(RemoteError, temporary=True),
        "can't {operation} {place}: can't connect to its server",
        words=("kind: Connect",),
        hint="Check the network, and the endpoint if you set one.",
    ),
)


def object_error(error: Exception, operation: str, place: str) -> BlobStoreError:
    """Return our error for one of obstore's: ``operation`` failed at ``place``."""
    text = str(error)
    status = int(_first(_STATUS, text) or 0)
    causes = {type(error).__name__, status, operation}
    said = {
        "operation": operation,
        "place": place,
        "denial": _code(text) or ": access is denied",
        "key": _first(_PATH, text),
        "first_line": text.partition("\n")[0][:200],
        "setting": _first(_SETTING, text) or "its settings are invalid",
        "variables": _HINTS.get(place.partition(":")[0], ""),
    }
    for row in _FAILURES:
        if not causes.isdisjoint(row.causes) or any(word in text for word in row.words):
            return row.kind(
                row.message.format(**said), path=place, hint=row.hint.format(**said) or None
            )
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(f"can't {operation} {place}: {error.strerror}", path=place)
    elsewhere = "redirect without LOCATION" in text or 300 <= status < 400  # noqa: PLR2004
    answer = f": the server answers {status}" if status else ""
    return RemoteError(
        f"can't {operation} {place}{answer}{_code(text)}",
        path=place,
        status=status or None,
        temporary=not elsewhere and status in _TEMPORARY,
        hint="The bucket may be in another region: set AWS_REGION." if elsewhere else None,
    )


def _code(text: str) -> str:
    said = _first(_CODE, text) or _first(_REASON, text)
    return "" if said is None else f": {said.strip()}"


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return None if match is None else match[1]


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
        above, _, name = self._prefix.rstrip("/").rpartition("/")
        if not name:
            return None
        return Bucket(self.address.removesuffix(f"/{name}"), self.store, above), name

    def place(self, key: str) -> str:
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
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Fill ``buffer`` with the bytes of an object from byte ``begin`` on.

        ``check`` is called after each piece, and may raise to end the request.
        Raises: as `stream`.
        """
        done = 0
        with closing(self.stream(key, begin, begin + len(buffer), version)) as chunks:
            for chunk in chunks:
                buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
                check()

    def stream(
        self, key: str, begin: int, end: int, version: ObjectVersion | None = None
    ) -> Generator[bytes, None, None]:
        """Yield the bytes ``[begin, end)`` of an object in pieces, as one request brings them.

        A reply that breaks goes on where it broke, four times at most. Raises: CorruptDataError
        when it is not of ``version``; ShortReadError when it is shorter.
        """
        at, attempt = begin, 1
        while at < end:
            before = at
            try:
                for chunk in self._chunks(key, at, end, version):
                    if at + len(chunk) > end:
                        raise self._wrong(key, "sends more than was asked for")
                    at += len(chunk)
                    yield chunk
            except RemoteError as error:
                attempt = attempt + 1 if at == before else 1
                if not error.temporary or attempt > ATTEMPTS:
                    raise
            else:
                if at < end:
                    raise self._short(key)

    def head(self, key: str) -> ObjectState:
        with object_errors("read", self.place(key)):
            return self._state(self.store.head(self._prefix + key))

    def objects(self, prefix: str = "") -> Iterator[ObjectState]:
        """Yield all objects whose keys begin with the folder ``prefix``, in no order."""
        with object_errors("list", self.place(prefix)):
            for page in self.store.list(self._prefix + prefix or None, chunk_size=_PAGE):
                for meta in page:
                    yield self._state(meta)

    def folder(self, prefix: str = "") -> tuple[list[str], list[ObjectState]]:
        """Return the names of the folders in the folder ``prefix``, and the objects in it."""
        with object_errors("list", self.place(prefix)):
            listing = self.store.list_with_delimiter(self._prefix + prefix or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in listing["common_prefixes"]]
        return sorted(folders), [self._state(meta) for meta in listing["objects"]]

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
        written the object before its answer was lost: then the error means our own write, which
        `replace` finds out.
        """
        mode: Any = "create" if if_absent else "overwrite"
        if if_match is not None:
            known = {"e_tag": if_match.etag, "version": if_match.version}
            mode = {name: value for name, value in known.items() if value is not None}
        with object_errors("write", self.place(key)):
            made = self.store.put(self._at(key), data, mode=mode, use_multipart=False)
        return _version(made)

    def replace(self, key: str, data: bytes, expected: ObjectVersion | None) -> ObjectVersion:
        """Write an object if it has the version ``expected``, None: if it is missing.

        Other writers must write other bytes: after a conflict the object is read, and if it has
        these, the answer to our own request was lost. S3 also answers 409 while another request for
        the object goes on, which may fail yet (Amazon S3 User Guide, "Conditional requests"); then
        it is tried again. Returns the new version. Raises: ConflictError for another's object.
        """
        for _ in range(ATTEMPTS):
            try:
                return self.put(key, data, if_match=expected, if_absent=expected is None)
            except (ConflictError, NotFoundError):
                state = self._found(key, len(data))
            if state is not None and state[0] == data:
                return state[1]
            if (state and state[1]) != expected:
                break
        raise ConflictError(f"{self.place(key)} was changed meanwhile")

    def _found(self, key: str, limit: int) -> tuple[bytes, ObjectVersion] | None:
        try:
            return self.get(key, limit=limit)
        except NotFoundError:
            return None
        except LimitExceededError:
            return b"", self.head(key).version

    def upload(
        self, key: str, pieces: Iterable[bytes], *, part: int = 8 * 2**20, at_once: int = 4
    ) -> ObjectVersion:
        """Write a large object in parts of ``part`` bytes, ``at_once`` of them at a time.

        The object appears with its last byte. A failure aborts the upload.
        """
        with object_errors("write", self.place(key)):
            made = self.store.put(
                self._at(key),
                iter(pieces),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=at_once,
            )
        return _version(made)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is ignored."""
        for start in range(0, len(keys), _PAGE):
            page = keys[start : start + _PAGE]
            try:
                with object_errors("remove", self.place(page[0])):
                    self.store.delete([self._at(key) for key in page])
            except NotFoundError:  # Google and Azure stop at the first one that is missing
                for key in page if len(page) > 1 else ():
                    self.delete([key])

    def _at(self, key: str) -> str:
        relative_path(key.replace(":", "_"))  # the port in a host's name is part of a key
        return self._prefix + key

    def _ask(self, key: str, version: ObjectVersion | None, options: GetOptions) -> GetResult:
        from obstore.exceptions import PreconditionError

        if version is not None:
            if version.etag is not None:
                options["if_match"] = version.etag
            if version.version is not None:
                options["version"] = version.version
        try:
            result = self.store.get(self._at(key), options=options)
        except PreconditionError:
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
                raise self._wrong(key, "answers with a different range")
            yield from result.stream(min_chunk_size=_CHUNK)

    def _state(self, meta: ObjectMeta) -> ObjectState:
        key = meta["path"].removeprefix(self._prefix)
        return ObjectState(key, meta["size"], _version(meta), meta["last_modified"])

    def _changed(self, key: str) -> CorruptDataError:
        return CorruptDataError(
            f"{self.place(key)} changed while it was read", path=self.place(key)
        )

    def _short(self, key: str) -> ShortReadError:
        return ShortReadError(
            f"{self.place(key)} ends before the bytes that were asked for", path=self.place(key)
        )

    def _wrong(self, key: str, what: str) -> RemoteError:
        return RemoteError(
            f"{self.place(key)}: its server {what} (rule R1)", rule="R1", path=self.place(key)
        )


@dataclass(eq=False)
class ObjectReader(SourceReader):
    """An object of a bucket, read in ranges. It keeps nothing open.

    Safe to share between threads. ``version``: which one is read; None for any.
    """

    piece_nbytes = 4 * 2**20
    is_remote = True
    _bucket: Bucket
    _key: str
    size: int
    _version: ObjectVersion | None = None
    identity: Identity = None  # type: ignore[assignment]  # None of a blob: it never changes

    def __post_init__(self) -> None:
        self.name = self._bucket.place(self._key)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        if buffer:
            self._bucket.get_into(self._key, offset, buffer, self._version)

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        with closing(self._bucket.stream(self._key, begin, self.size, self._version)) as chunks:
            yield from in_buffer(chunks, buffer)


def _version(meta: ObjectMeta | PutResult) -> ObjectVersion:
    etag, version = meta["e_tag"], meta["version"]
    if etag is not None and _AZURE_LISTED.fullmatch(etag):
        etag = f'"{etag}"'
    # S3 names so the version of an object in a bucket without versions.
    return ObjectVersion(etag, None if version == "null" else version)
