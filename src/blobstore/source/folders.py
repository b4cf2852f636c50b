"""Folders: the files of a checkpoint, listed and opened by name, on a disk or in a bucket.

A checkpoint is only read through a `Folder`, so its reader need not know where the files lie
(web.py has those of web servers). A name is a relative path; the names in an index or a listing are
checked before they are used. A folder has the budget of its checkpoint: every header and document
is counted before it is read.

A file has an identity, which changes when its bytes do: device, inode, size and times on a disk,
the ETag (or Last-Modified) and size on a server, the content's hash in a repository of the Hub. An
object of a bucket is read by its ETag. Requests to buckets go through obstore
(`blobstore.io.objects`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from blobstore.errors import (
    BlobStoreError,
    DigestMismatchError,
    LimitExceededError,
    MissingFileError,
    NotFoundError,
    UnsupportedSourceError,
    from_os_error,
)
from blobstore.formats.dtypes import DType
from blobstore.io.budget import Budget, Cancellation
from blobstore.io.durable import os_errors
from blobstore.io.objects import Bucket, ObjectReader, ObjectState, ObjectVersion
from blobstore.io.ranges import (
    Closing,
    FileIdentity,
    FileReader,
    Identity,
    SourceReader,
    real_path,
)
from blobstore.io.workers import run_in_pool
from blobstore.names import Digest, relative_path

_T = TypeVar("_T")
SUFFIX = ".safetensors"
GGUF = ".gguf"
HUB = "https://huggingface.co"
HUB_SCHEME = "hf://"
FIRST_READ = 64 * 2**10
"""Bytes of a file that are read first: most headers end in them."""
MAIN = "main"
REPOSITORY = "models--"
SNAPSHOTS = "snapshots"
"""Names of folders in the Hugging Face cache."""
_AT_ONCE = 16
# Names in a folder of a bucket.
_MOST_NAMES = 100_000


def stem_of(name: str) -> str:
    """Return a file's name without the ending of files with weights."""
    return name.removesuffix(SUFFIX).removesuffix(GGUF)


@dataclass(frozen=True, slots=True)
class WebIdentity:
    """The state of a file on a server: its validator and size as text."""

    key: str


@dataclass(frozen=True, slots=True)
class Found:
    """The state of a file: its bytes, its identity, and its hashes, if its server declares them.

    ``declared`` is the digest of its bytes, ``git`` the name of its blob in a git repository.
    """

    size: int
    identity: Identity
    declared: Digest | None = None
    git: str | None = None

    def check(self, place: str, digest: Digest, git: str | None = None) -> None:
        """Raise DigestMismatchError unless what was read at ``place`` has the declared hashes."""
        for declared, own in ((self.declared, digest), (self.git, git)):
            if None not in (declared, own) and declared != own:
                message = f"{place}: its bytes are not those of {declared}, which its server"
                raise DigestMismatchError(f"{message} declares", path=place)

    def check_bytes(self, data: bytes, place: str) -> None:
        """As `check`, of a small file: repositories keep those in git."""
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data)  # noqa: S324  # git's name of a blob
        self.check(place, Digest.of(data), blob.hexdigest())


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder in a folder, as the folder lists it.

    ``name`` is the last part of its path, ``place`` its real path or its address. ``is_folder``:
    False for a link to a folder. ``fault``: the reason not to follow a link; None if it is
    followed. ``found``: the file's state; None when it is not a regular file. ``error``: why that
    is unknown, as for a link to a missing file.
    """

    name: str
    place: str
    is_folder: bool = False
    fault: str | None = None
    found: Found | None = None
    error: BlobStoreError | None = None


class Folder(Closing, ABC):
    """Files by name. A context manager, which closes its connections on exit.

    A folder on a disk reads one file after the other; a folder on a server several at once.
    """

    name: str
    """Path or address of the folder, for messages."""
    file: str | None
    """The requested file in the folder; None for the folder itself."""
    revision: str | None = None
    """The commit of the repository that it is read at, once it was asked for."""
    budget: Budget
    """The total budget for reading its headers and documents."""
    is_remote = True
    """True if its files are fetched: an import streams them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    @abstractmethod
    def stem(self) -> str:
        """The default name of a model imported from it: the last part of its name."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A text that is the same whenever the same source is opened: a real path or an address."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The text that opens this source again: an absolute path, or this version's address."""

    def as_file(self) -> Folder | None:  # None
        """Return the parent folder, with this as its requested file, without a suffix; or None."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Return the path or address of a file, which need not exist."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None if a server does not list them.

        Raises: StorageError, RemoteError.
        """
        return [entry.name for entry in self.scan() if not entry.is_folder]

    @abstractmethod
    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return its entries, or those of its folder ``prefix`` (with ``/`` at its end), by name.

        It returns at most ``most`` entries, chosen in any order. If a server lists nothing, only
        the usual names of files are requested. Raises: StorageError, RemoteError.
        """

    @abstractmethod
    def open(self, name: str, identity: Identity | None = None) -> SourceReader:
        """Return a reader of one file; with an ``identity``, the file must have it.

        Raises: NotFoundError; CorruptDataError for another identity; StorageError, RemoteError;
        UnsupportedSourceError when the server does not send parts of the file, or a change could
        not be detected.
        """

    @abstractmethod
    def read_each(
        self, names: Sequence[str], read: Callable[[SourceReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give the results of ``read`` for a reader of each file, in the order of ``names``.

        The first error ends the reading, and so does leaving the block: then no other file is
        opened. For the identity of its file, which later reads need, a reader may ask the server.

        Raises: NotFoundError when a file is missing; StorageError; RemoteError; LimitExceededError;
        as ``read``. The identity raises as `open`.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes. Raises: as `read_all`."""
        return self.read_all([name], limit)[name]

    @abstractmethod
    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return small files' bytes by name; a folder on a server reads several at once.

        Raises: NotFoundError, StorageError, RemoteError; LimitExceededError when they are more than
        ``limit``, or than is left of the budget.
        """

    def allow(self, requests: int) -> None:  # a disk has no connections
        """Set the number of simultaneous requests."""

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        cancellation: Cancellation,  # noqa: ARG002  # a read from a disk ends by itself
    ) -> None:
        """Fill ``buffer`` with a large range of a file, for imports that stream it.

        One request, unless it breaks. Raises: as `open`.
        """
        with self.open(name, identity) as reader:
            reader.readinto(begin, buffer)

    def _take_text(self, nbytes: int, name: str) -> None:
        try:
            self.budget.take_text(nbytes, "the file")
        except LimitExceededError as error:
            raise error.at(self.place(name), path=self.place(name)) from None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One .safetensors file of a folder, as it was when its header was read.

    ``path`` is its path or address. ``declared``: the digest of its bytes, if its server declares
    one.
    """

    folder: Folder = field(repr=False, compare=False)
    name: str
    path: str
    identity: Identity
    size: int
    tensor_names: tuple[str, ...]
    metadata: Mapping[str, str]
    declared: Digest | None = None

    def open(self) -> SourceReader:
        return self.folder.open(self.name, self.identity)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint. ``offset`` counts bytes from the start of its file."""

    name: str
    file: SourceFile
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class LocalFolder(Folder):
    """A folder on a disk. Its links are followed: the Hugging Face cache is made of links."""

    is_remote = False

    def __init__(self, path: Path, file: str | None = None) -> None:
        self.path = path
        self.name = str(path)
        self.file = file
        self.budget = Budget(self.name)

    @property
    def stem(self) -> str:
        path = Path(self.address)
        repository = path.parent.parent.name
        if not self.file and path.parent.name == SNAPSHOTS and repository.startswith(REPOSITORY):
            return repository.rpartition("--")[2]
        return path.stem if self.file else path.name

    @property
    def key(self) -> str:
        return real_path(self.path / (self.file or ""))

    @property
    def address(self) -> str:
        with os_errors("access", self.path):  # the current folder may be gone
            # Not resolve(), which would follow a link to another name.
            return os.path.abspath(self.path / (self.file or ""))  # noqa: PTH100

    def place(self, name: str) -> str:
        return str(self.path / name)

    def names(self) -> list[str]:
        """Return the names of everything except folders, sorted.

        A broken link or a FIFO is listed, and refused when it is opened.
        """
        with os_errors("list", self.path), os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if not os.path.isdir(entry))  # noqa: PTH112

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        with os_errors("list", self.path / prefix), os.scandir(self.path / prefix) as found:
            entries = [_local_entry(self._homes, entry) for entry in islice(found, most)]
        return sorted(entries, key=lambda entry: entry.name)

    @cached_property
    def _homes(self) -> tuple[str, ...]:
        """The folders that links may lead into: this one, and for a snapshot its repository's.

        A snapshot is ``models--ORG--NAME/snapshots/REVISION``; its files are links into
        ``models--ORG--NAME/blobs``.
        """
        real = Path(real_path(self.path))
        return (str(real), *([str(real.parent.parent)] if real.parent.name == SNAPSHOTS else []))

    def open(self, name: str, identity: Identity | None = None) -> FileReader:
        try:
            reader = FileReader(self.path / name)
        except NotFoundError as error:
            raise _missing(self.path / name, error) from None
        if identity is not None:
            try:
                reader.settle()
                reader.check_is(identity)
            except BaseException:
                reader.close()
                raise
            reader.read_ahead()
        return reader

    @contextmanager
    def read_each(
        self, names: Sequence[str], read: Callable[[FileReader], _T]
    ) -> Iterator[Iterator[_T]]:
        yield map(partial(self._read_one, read), names)

    def _read_one(self, read: Callable[[FileReader], _T], name: str) -> _T:
        with self.open(name) as reader:
            return read(reader)

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        return {name: self._read(name, limit) for name in names}

    def _read(self, name: str, limit: int) -> bytes:
        with self.open(name) as reader:
            if reader.size > limit:
                raise LimitExceededError(
                    f"limit exceeded: {reader.name} has {reader.size:,} bytes, at most {limit:,}",
                    path=reader.name,
                )
            self._take_text(reader.size, name)
            return reader.read(0, reader.size)


def _local_entry(homes: tuple[str, ...], entry: os.DirEntry[str]) -> Entry:
    """Return an entry of a folder on a disk; links may lead into ``homes``."""
    place, fault, found, failure = real_path(entry.path), None, None, None
    if entry.is_symlink():
        if os.path.isdir(entry):  # noqa: PTH112
            fault = "a link to a folder"
        elif not any(place.startswith(f"{home}{os.sep}") for home in homes):
            fault = "a link to a place outside of the checkpoint's folder"
    try:
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            found = Found(status.st_size, FileIdentity(status))
    except OSError as error:  # in the Hugging Face cache: a download that was cut off
        failure = _missing(Path(entry.path), error)
    return Entry(entry.name, place, entry.is_dir(follow_symlinks=False), fault, found, failure)


def _missing(path: Path, error: OSError | BlobStoreError) -> BlobStoreError:
    """Return our error for ``error``; its text says if ``path`` is a link to a missing file."""
    ours = from_os_error(error, "stat", path)
    if not isinstance(ours, NotFoundError):
        return ours
    try:
        target = path.readlink()
    except OSError:
        return ours
    return MissingFileError(
        f"{path} is a link to {target}, which is missing",
        path=str(path),
        hint="If it is in the Hugging Face cache: download the model again.",
    )


class BucketFolder(Folder):
    """A prefix of a bucket; ``file`` is the requested object in it."""

    def __init__(self, bucket: Bucket, *, file: str | None = None) -> None:
        self.bucket = bucket
        self.name = bucket.address
        self.file = file
        self.budget = Budget(self.name)
        self._listings: dict[str, list[Entry]] = {}
        self._listed: dict[str, Found] = {}

    @property
    def stem(self) -> str:
        return stem_of(self.file or self.name.rpartition("/")[2])

    @property
    def key(self) -> str:
        return self.place(self.file or "")

    address = key

    def place(self, name: str) -> str:
        return self.bucket.place(name)

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        if prefix not in self._listings:
            folders, objects = self.bucket.folder(prefix)
            if (count := len(folders) + len(objects)) > _MOST_NAMES:
                raise LimitExceededError(
                    f"limit exceeded: {self.place(prefix)} has {count:,} names, at most"
                    f" {_MOST_NAMES:,}",
                    path=self.place(prefix),
                )
            entries = [Entry(name, self.place(prefix + name), is_folder=True) for name in folders]
            for state in objects:
                place = self.place(state.key)
                found = self._listed[state.key] = Found(state.size, _object_identity(state, place))
                entries.append(Entry(state.key.removeprefix(prefix), place, found=found))
            self._listings[prefix] = sorted(entries, key=lambda entry: entry.name)
        return self._listings[prefix][:most]

    def open(self, name: str, identity: Identity | None = None) -> ObjectReader:
        key = relative_path(name)
        if identity is None:
            identity = _object_identity(self.bucket.head(key), self.place(name))
        etag, _, size = identity.key.rpartition(" ")
        return ObjectReader(self.bucket, key, int(size), ObjectVersion(etag), identity)

    def read_each(
        self, names: Sequence[str], read: Callable[[ObjectReader], _T]
    ) -> AbstractContextManager[Iterator[_T]]:
        return run_in_pool(names, lambda name, _: read(self.open(name)), _AT_ONCE)

    def read_all(self, names: Sequence[str], limit: int) -> dict[str, bytes]:
        with run_in_pool(names, lambda name, _: self._read(name, limit), _AT_ONCE) as read:
            return dict(zip(names, read, strict=True))

    def _read(self, name: str, limit: int) -> bytes:
        key = relative_path(name)
        listing = self._listed.get(key)
        version = _version_of(listing.identity) if listing is not None else None
        data, _ = self.bucket.get(key, version, limit=limit)
        self.budget.receive(len(data))
        self._take_text(len(data), name)
        return data

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
        check = partial(cancellation.check, self.place(name))
        self.bucket.get_into(relative_path(name), begin, buffer, _version_of(identity), check=check)


def _object_identity(state: ObjectState, place: str) -> WebIdentity:
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


def _version_of(identity: Identity) -> ObjectVersion:
    return ObjectVersion(identity.key.rpartition(" ")[0])
