"""Folders in buckets: a prefix of S3, Google Cloud Storage or Azure as a checkpoint's folder.

The prefix's objects are its files. A file's identity is its ETag and size, and every read asks for
that ETag. Requests go through obstore (`blobstore.io.objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    UnsupportedSourceError,
)
from blobstore.io.budget import Budget, Cancellation
from blobstore.io.objects import Bucket, ObjectReader, ObjectState, ObjectVersion, open_bucket
from blobstore.io.ranges import Identity
from blobstore.io.workers import pooled
from blobstore.names import relative_path
from blobstore.source.files import split_file
from blobstore.source.folders import SUFFIX, Entry, Folder, Found, WebIdentity

_T = TypeVar("_T")
_AT_ONCE = 16
_MOST_NAMES = 100_000


def open_bucket_folder(address: str, options: Mapping[str, str] | None) -> BucketFolder:
    """Return the prefix at an address, or that the named object is in. Raises: as `open_bucket`."""
    path, file = split_file(address.rstrip("/"))
    scheme, _, rest = path.partition("://")
    return BucketFolder(open_bucket(f"{scheme.lower()}://{rest}", options), file=file)


class BucketFolder(Folder):
    """A prefix of a bucket; ``file`` is the requested object in it."""

    def __init__(self, bucket: Bucket, *, file: str | None = None) -> None:
        self.bucket = bucket
        self.name = bucket.address
        self.file = file
        self.budget = Budget(self.name)
        self._listings: dict[str, list[Entry]] = {}

    @property
    def stem(self) -> str:
        last = self.file or self.name.rpartition("/")[2]
        return last.removesuffix(SUFFIX)

    @property
    def key(self) -> str:
        return self.bucket.place(self.file or "")

    address = key

    def place(self, name: str) -> str:
        return self.bucket.place(name)

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return the objects and folders in a folder, by name.

        Raises: LimitExceededError for more than 100,000 of them.
        """
        if prefix not in self._listings:
            folders, objects = self.bucket.folder(prefix)
            if len(folders) + len(objects) > _MOST_NAMES:
                raise LimitExceededError(
                    f"limit exceeded: {self.place(prefix)} has {len(folders) + len(objects):,}"
                    f" names, at most {_MOST_NAMES:,}",
                    path=self.place(prefix),
                )
            entries = [Entry(name, self.place(prefix + name), is_folder=True) for name in folders]
            entries += [self._entry(prefix, state) for state in objects]
            self._listings[prefix] = sorted(entries, key=lambda entry: entry.name)
        return self._listings[prefix][:most]

    def _entry(self, prefix: str, state: ObjectState) -> Entry:
        found = Found(state.size, object_identity(state, self.place(state.key)))
        return Entry(state.key.removeprefix(prefix), self.place(state.key), found=found)

    def open(self, name: str, identity: Identity | None = None) -> ObjectReader:
        """Return a reader of one object; without an identity the server is asked for it."""
        if identity is None:
            identity = object_identity(self.bucket.head(relative_path(name)), self.place(name))
        key, version = relative_path(name), version_of(identity)
        return ObjectReader(self.bucket, key, size_of(identity), version, identity)

    def reading(
        self, names: Sequence[str], read: Callable[[ObjectReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        return self._at_once(names, lambda name: read(self.open(name)))

    sources = reading

    def _at_once(
        self, names: Sequence[str], read: Callable[[str], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        cancellation = Cancellation()

        def work(name: str) -> _T:
            cancellation.check(self.place(name))
            return read(name)

        return pooled(names, work, _AT_ONCE, cancellation.cancel, name="bucket")

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return small objects' bytes by name; several are read at once.

        They are of the versions that were listed, if they were.
        """
        with self._at_once(names, lambda name: self._read(name, limit)) as found:
            return dict(zip(names, found, strict=True))

    def _read(self, name: str, limit: int) -> bytes:
        key = relative_path(name)
        found = self._known(key)
        version = version_of(found.identity) if found is not None else None
        data, _ = self.bucket.get(key, version, limit=limit)
        self.budget.receive(len(data))
        self._take_text(len(data), name)
        return data

    def _known(self, name: str) -> Found | None:
        prefix, slash, last = name.rpartition("/")
        entries = self._listings.get(prefix + slash, [])
        return next((entry.found for entry in entries if entry.name == last), None)

    def as_file(self) -> BucketFolder | None:
        above = self.bucket.above()
        if self.file is not None or above is None:
            return None
        bucket, name = above
        other = BucketFolder(bucket, file=name)
        other.budget = self.budget
        return other

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        cancellation: Cancellation,
    ) -> None:
        key, version = relative_path(name), version_of(identity)

        def check(_nbytes: int) -> None:
            cancellation.check(self.place(name))

        self.bucket.get_into(key, begin, buffer, version, came=check)


def object_identity(state: ObjectState, place: str) -> WebIdentity:
    """Return the identity of an object.

    Raises: UnsupportedSourceError without an ETag: a change could not be detected.
    """
    if state.version.etag is None:
        raise UnsupportedSourceError(
            f"{place}: its server does not send an ETag, so it can't be read as a source",
            path=place,
            hint="Download the file first.",
        )
    return WebIdentity(f"{state.version.etag} {state.size}")


def version_of(identity: Identity) -> ObjectVersion:
    """Return the version that an identity stands for."""
    return ObjectVersion(identity.key.rpartition(" ")[0])


def size_of(identity: Identity) -> int:
    """Return the size in an identity. Raises: CorruptDataError for an identity of other files."""
    size = identity.key.rpartition(" ")[2]
    if not size.isascii() or not size.isdigit():
        raise CorruptDataError("the identity is not that of an object in a bucket")
    return int(size)
