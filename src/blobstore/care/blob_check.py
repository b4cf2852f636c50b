"""BlobCheck: whether one file of ``blobs/`` is what its name and the manifests say. Each file is read once."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from blobstore.checkpoint import CONFIG_NAME, parse_config
from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE, ModelConfig
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.importer import Progress
from blobstore.names import ModelName
from blobstore.ranges import BytesReader, FileIdentity, FileReader
from blobstore.safetensors import read_header
from blobstore.store import Store
from blobstore.stored import Settings, stored_tensors
from blobstore.strictjson import MAX_CONFIG

CHUNK = 2**20
"""Bytes hashed at a time: as much as a core's own cache holds (docs/performance.md, "Verify")."""
MISSING = "it is missing"
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """The models that have one manifest, all of the same bytes, whose sha256 is ``key``.

    ``settings`` are those of its config.json. ``names`` grows while manifests are read.
    """

    key: bytes
    settings: Settings
    names: list[ModelName] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Use:
    """How models use a blob: the media type, size and name that their manifest says, and whether it is their config."""

    users: Users
    media_type: str
    size: int
    name: str | None
    is_config: bool

    @property
    def settings(self) -> Settings:
        """Those of the models' config.json."""
        return self.users.settings


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """What was found: ``reason`` None when the blob is sound, the bytes that were hashed, its tensors' names.

    ``size`` is the file's, None when it could not be opened; ``identity`` tells whether it was written to since.
    """

    reason: str | None
    size: int | None = None
    hashed: int = 0
    tensors: tuple[str, ...] = ()
    identity: FileIdentity | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    """What is in a file: its digest if it was hashed, what is wrong with its header or document, its tensors' names."""

    digest: Digest | None
    wrong: str | None
    tensors: tuple[str, ...]


class BlobChecker:
    """Checks blobs; one for each thread. ``quick``: tensor blobs are not hashed, only their headers are read.

    A file with several names (hard links) is read once.
    When ``stop`` is set, a check ends early, and what it finds means nothing.
    """

    def __init__(self, store: Store, *, quick: bool, progress: Progress, stop: threading.Event | None = None) -> None:
        self._store = store
        self._stop = stop or threading.Event()
        self._quick = quick
        self._progress = progress
        self._buffer = memoryview(bytearray(CHUNK))
        self._linked: dict[tuple[object, ...], _Content] = {}

    def check(self, digest: Digest, uses: Sequence[Use]) -> BlobCheck:
        """Return what is wrong with the blob of that digest, which ``uses`` need. Nothing is raised for what is wrong.

        Raises: StorageError when we can't open any more files.
        """
        try:
            reader = self._store.blobs.reader(digest)
        except NotFoundError:
            return BlobCheck(MISSING)
        except BlobStoreError as error:
            if error.errno in _OURS:
                raise
            return BlobCheck(error.message)
        with reader:
            return self._check_file(reader, digest, uses)

    def _check_file(self, reader: FileReader, digest: Digest, uses: Sequence[Use]) -> BlobCheck:
        try:
            status = reader.status()
            content = self._content(reader, uses) if status.st_nlink == 1 else self._content_of_links(reader, uses)
        except BlobStoreError as error:
            return BlobCheck(f"it can't be read: {error.message}", reader.size, identity=reader.identity)
        hashed = reader.size if content.digest is not None else 0
        reason = _wrong_mode(status) if content.digest in (None, digest) else "its bytes do not match its digest"
        reason = reason or _wrong_size(reader.size, uses) or content.wrong
        return BlobCheck(reason, reader.size, hashed, content.tensors, reader.identity)

    def _content_of_links(self, reader: FileReader, uses: Sequence[Use]) -> _Content:
        kinds = sorted({(use.media_type, use.is_config, use.name == CONFIG_NAME) for use in uses})
        key = (reader.identity, uses[0].settings if uses else None, *kinds)
        if key in self._linked:
            if (content := self._linked[key]).digest is not None:
                self._progress(reader.size, _name_of(uses))
            return content
        return self._linked.setdefault(key, self._content(reader, uses))

    def _content(self, reader: FileReader, uses: Sequence[Use]) -> _Content:
        is_tensor = any(use.media_type == TENSOR_MEDIA_TYPE for use in uses)
        reads_all = not self._quick or (not is_tensor and reader.size <= MAX_CONFIG)
        data = self._whole(reader) if reads_all and reader.size <= CHUNK else None
        digest = self._digest(reader, data, uses) if reads_all else None
        if is_tensor:
            return _Content(digest, *_tensors(reader, data, uses[0].settings))
        return _Content(digest, _wrong_document(reader, data, uses), ())

    def _whole(self, reader: FileReader) -> memoryview:
        data = self._buffer[: reader.size]
        reader.readinto(0, data)
        return data

    def _digest(self, reader: FileReader, data: memoryview | None, uses: Sequence[Use]) -> Digest:
        name = _name_of(uses)
        if data is not None:
            self._progress(len(data), name)
            return Digest.of(data)
        reader.read_ahead()
        total = hashlib.sha256()
        for piece in reader.pieces(self._buffer):
            if self._stop.is_set():
                break  # another thread failed, or the user pressed Ctrl-C
            total.update(piece)
            self._progress(len(piece), name)
        return Digest(total.hexdigest())


def _tensors(reader: FileReader, data: memoryview | None, settings: Settings) -> tuple[str | None, tuple[str, ...]]:
    """Return what is wrong with a blob's header, and the names of its tensors. Raises: StorageError."""
    try:
        header = read_header(BytesReader(bytes(data), reader.name) if data is not None else reader)
        header.check_limits(reader.name)
        return None, tuple(tensor.name for tensor in stored_tensors(header, settings))
    except BlobStoreError as error:
        if error.errno is not None:
            raise
        return error.message.removeprefix(f"{reader.name}: "), ()


def _wrong_document(reader: FileReader, data: memoryview | None, uses: Sequence[Use]) -> str | None:
    """Return what is wrong with a document that is read here; what others read is their business. Raises: StorageError."""
    kinds = {use.is_config for use in uses if use.is_config or use.name == CONFIG_NAME}
    raw = b"" if not kinds else bytes(data) if data is not None else reader.read(0, min(reader.size, MAX_CONFIG + 1))
    for is_config in sorted(kinds):
        try:
            if is_config:
                ModelConfig.parse(raw, "the config")
            else:
                parse_config(raw)
        except BlobStoreError as error:
            return error.message
    return None


def _name_of(uses: Sequence[Use]) -> str:
    return next((use.name for use in uses if use.name), "")


def _wrong_mode(status: os.stat_result) -> str | None:
    mode = stat.S_IMODE(status.st_mode)
    return None if mode & stat.S_IRUSR else f"its mode is {mode:03o}: its owner may not read it"


def _wrong_size(size: int, uses: Sequence[Use]) -> str | None:
    wrong = sorted({use.size for use in uses if use.size != size})
    return f"it has {size:,} bytes, not {wrong[0]:,}" if wrong else None
