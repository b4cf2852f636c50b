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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from blobstore.errors import (
    ConflictError,
    CorruptDataError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    ShortReadError,
)
from blobstore.io.object_stores import ATTEMPTS, object_errors, open_object_store
from blobstore.names import relative_path

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutResult
    from obstore.store import ObjectStore

_UNVERSIONED = "null"  # as S3 names the version of an object in a bucket without versions
_AZURE_LISTED = re.compile(r"0x[0-9A-Fa-f]+", re.ASCII)
"""An ETag in Azure's listings: they lack its quotation marks (learn.microsoft.com, List Blobs)."""
_CHUNK = 2**20
_PAGE = 1000
_TRIES = 5
"""How often a conditional write is sent while the object is as expected."""


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


def open_bucket(address: str, options: Mapping[str, str] | None = None) -> Bucket:
    """Return the bucket at an address; no server is asked yet.

    ``options``: obstore's, such as ``endpoint``, ``region``, ``access_key_id``; ``allow_http``.

    Raises: UsageError for another kind of address, an unknown option, or without obstore.
    """
    store, prefix, place = open_object_store(address, options or {})
    return Bucket(place, store, prefix)


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
        came: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Fill ``buffer`` with the bytes of an object from byte ``begin`` on.

        ``came`` is called with the number of bytes of each piece, and may raise to end the request.
        Raises: as `stream`.
        """
        done = 0
        with closing(self.stream(key, begin, begin + len(buffer), version)) as chunks:
            for chunk in chunks:
                buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
                came(len(chunk))

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
        written the object before its answer was lost: then the error means our own write, which
        `replace` finds out.
        """
        import obstore

        mode: Any = "create" if if_absent else "overwrite"
        if if_match is not None:
            known = {"e_tag": if_match.etag, "version": if_match.version}
            mode = {name: value for name, value in known.items() if value is not None}
        with object_errors("write", self.place(key)):
            made = obstore.put(self.store, self._at(key), data, mode=mode, use_multipart=False)
        return _version(made)

    def replace(self, key: str, data: bytes, expected: ObjectVersion | None) -> ObjectVersion:
        """Write an object if it has the version ``expected``, None: if it is missing.

        Other writers must write other bytes: after a conflict the object is read, and if it has
        these, the answer to our own request was lost. S3 also answers 409 while another request for
        the object goes on, which may fail yet (Amazon S3 User Guide, "Conditional requests"); then
        it is tried again. Returns the new version. Raises: ConflictError for another's object.
        """
        failure = ConflictError(f"{self.place(key)} was changed meanwhile")
        for _ in range(_TRIES):
            try:
                return self.put(key, data, if_match=expected, if_absent=expected is None)
            except (ConflictError, NotFoundError):
                found = self._found(key, len(data))
            if found is not None and found[0] == data:
                return found[1]
            if (found and found[1]) != expected:
                break
        raise failure

    def _found(self, key: str, limit: int) -> tuple[bytes, ObjectVersion] | None:
        """Return an object's bytes and version, None if it is missing; no bytes of a larger one."""
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
