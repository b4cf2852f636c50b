"""Checks of blobs: whether the files of ``blobs/`` match their names and the manifests.

Each file is read once. Several threads check many blobs, the largest first, so that all threads end
together; one thread checks the small ones.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest, ModelConfig
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.io.ranges import BytesReader, FileIdentity, FileReader
from blobstore.io.workers import Progress, each, silent
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import BlobListing
from blobstore.store.local.store import Store
from blobstore.store.ports import Home
from blobstore.store.stored import Settings, stored_tensors

CHUNK = 2**20
"""Bytes hashed at a time: as much as a core's own cache holds (docs/performance.md, "Verify")."""
MISSING = "it is missing"
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the process, not of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """The models whose manifests have the same bytes; ``key`` is their sha256.

    ``settings`` are those of its config.json. ``names`` grows while manifests are read.
    """

    key: bytes
    settings: Settings
    names: list[ModelName] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlobReference:
    """What a manifest says of a blob, and the models that have it."""

    users: Users
    media_type: str
    size: int
    name: str | None
    is_config: bool


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """The result of a check: ``reason`` is None if the blob is sound; ``tensors`` are names.

    ``size`` is the file's, None if it could not be opened; ``hashed`` counts the bytes that were
    hashed; ``identity`` tells whether the file was written to since.
    """

    reason: str | None
    size: int | None = None
    hashed: int = 0
    tensors: tuple[str, ...] = ()
    identity: FileIdentity | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    """A file's digest if it was hashed, the fault in its header or document, its tensors' names."""

    digest: Digest | None
    wrong: str | None
    tensors: tuple[str, ...]


class BlobChecker:
    """Checks blobs, in one thread. A file with several names (hard links) is read once.

    ``quick``: of tensor blobs only the headers are read. If ``stop`` is set, a check ends early,
    and its result is meaningless.
    """

    def __init__(
        self, store: Store, *, quick: bool, progress: Progress, stop: threading.Event | None = None
    ) -> None:
        self._store = store
        self._stop = stop or threading.Event()
        self._quick = quick
        self._progress = progress
        self._buffer = memoryview(bytearray(CHUNK))
        self._linked: dict[tuple[object, ...], _Content] = {}

    def check(self, hexadecimal: str, uses: Sequence[BlobReference]) -> BlobCheck:
        """Return the check of a blob, given in hex digits, that the manifests of ``uses`` name.

        Raises: StorageError if the process can't open more files; a fault of the blob is a result.
        """
        if self._store.blobs.is_missing(hexadecimal):  # a hundred thousand may be
            return BlobCheck(MISSING)
        digest = Digest(hexadecimal)
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

    def _check_file(
        self, reader: FileReader, digest: Digest, uses: Sequence[BlobReference]
    ) -> BlobCheck:
        try:
            status = reader.status()
            is_linked = status.st_nlink > 1
            content = (self._content_of_links if is_linked else self._content)(reader, uses)
        except BlobStoreError as error:
            reason = f"it can't be read: {error.message}"
            return BlobCheck(reason, reader.size, identity=reader.identity)
        hashed = reader.size if content.digest is not None else 0
        wrong = _wrong_mode(status) or _wrong_size(reader.size, uses) or content.wrong
        if content.digest not in (None, digest):
            wrong = "its bytes do not match its digest"
        return BlobCheck(wrong, reader.size, hashed, content.tensors, reader.identity)

    def _content_of_links(self, reader: FileReader, uses: Sequence[BlobReference]) -> _Content:
        kinds = sorted({(use.media_type, use.is_config, use.name == CONFIG_NAME) for use in uses})
        key = (reader.identity, uses[0].users.settings if uses else None, *kinds)
        if key not in self._linked:
            self._linked[key] = self._content(reader, uses)
        elif self._linked[key].digest is not None:
            self._progress(reader.size, _name_of(uses))
        return self._linked[key]

    def _content(self, reader: FileReader, uses: Sequence[BlobReference]) -> _Content:
        is_tensor = any(use.media_type == TENSOR_MEDIA_TYPE for use in uses)
        reads_all = not self._quick or (not is_tensor and reader.size <= MAX_CONFIG)
        data = self._whole(reader) if reads_all and reader.size <= CHUNK else None
        digest = self._digest(reader, data, uses) if reads_all else None
        if is_tensor:
            return _Content(digest, *_tensors(reader, data, uses[0].users.settings))
        return _Content(digest, _wrong_document(reader, data, uses), ())

    def _whole(self, reader: FileReader) -> memoryview:
        data = self._buffer[: reader.size]
        reader.readinto(0, data)
        return data

    def _digest(
        self, reader: FileReader, data: memoryview | None, uses: Sequence[BlobReference]
    ) -> Digest:
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


def _tensors(
    reader: FileReader, data: memoryview | None, settings: Settings
) -> tuple[str | None, tuple[str, ...]]:
    """Return the fault in a blob's header, and the names of its tensors. Raises: StorageError."""
    try:
        header = header_of(BytesReader(bytes(data), reader.name) if data is not None else reader)
        header.check_limits(reader.name)
        return None, tuple(tensor.name for tensor in stored_tensors(header, settings))
    except BlobStoreError as error:
        if error.errno is not None:
            raise
        return error.message.removeprefix(f"{reader.name}: "), ()


def _wrong_document(
    reader: FileReader, data: memoryview | None, uses: Sequence[BlobReference]
) -> str | None:
    """Return the fault in a config or config.json. Other documents are not read by blobstore.

    Raises: StorageError.
    """
    kinds = {use.is_config for use in uses if use.is_config or use.name == CONFIG_NAME}
    if not kinds:
        return None
    raw = reader.read(0, min(reader.size, MAX_CONFIG + 1)) if data is None else bytes(data)
    try:
        if False in kinds:
            parse_config(raw)
        if True in kinds:
            ModelConfig.parse(raw, "the config")
    except BlobStoreError as error:
        return error.message
    return None


def _name_of(uses: Sequence[BlobReference]) -> str:
    return next((use.name for use in uses if use.name), "")


def _wrong_mode(status: os.stat_result) -> str | None:
    mode = stat.S_IMODE(status.st_mode)
    return None if mode & stat.S_IRUSR else f"its mode is {mode:03o}: its owner may not read it"


def _wrong_size(size: int, uses: Sequence[BlobReference]) -> str | None:
    wrong = sorted({use.size for use in uses if use.size != size})
    return f"it has {size:,} bytes, not {wrong[0]:,}" if wrong else None


NOTHING = BlobListing({}, ())
_SMALL = 2**17
"""Blobs of up to so many bytes are for one thread: Python threads would take turns with them."""


@dataclass(slots=True)
class BlobChecks:
    """The blobs that models need and those of ``listing``, by hex digits, and their checks.

    ``damaged``: checks that found a fault; ``tensors``: the names in each blob. ``quick``: as in
    `BlobChecker`.
    """

    store: Store
    listing: BlobListing = NOTHING
    quick: bool = False
    uses: dict[str, list[BlobReference]] = field(default_factory=lambda: defaultdict(list))
    damaged: dict[str, BlobCheck] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hashed: int = 0
    _second: BlobChecker = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._second = BlobChecker(self.store, quick=self.quick, progress=silent)

    def add(self, users: Users, manifest: Manifest, lower: Sequence[Home] = ()) -> None:
        """Add the blobs of a manifest, except those that only a home of ``lower`` has."""
        below = self._below(manifest, lower) if lower else set()
        for blob in manifest.descriptors:
            if blob.digest in below:
                continue
            use = BlobReference(
                users, blob.media_type, blob.size, blob.name, blob is manifest.config
            )
            self.uses[blob.digest.hex].append(use)

    def _below(self, manifest: Manifest, lower: Sequence[Home]) -> set[Digest]:
        gone = [
            blob for blob in manifest.descriptors if self.store.blobs.is_missing(blob.digest.hex)
        ]
        nowhere = gone
        for home in lower:
            nowhere = home.blobs.missing(nowhere)
        return {blob.digest for blob in gone} - {blob.digest for blob in nowhere}

    def chosen(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return those blobs that are ``wanted``, the largest first."""
        digests = filter(wanted, self.uses.keys() | self.listing.named.keys())
        return sorted(digests, key=lambda digest: (-self.size(digest), digest))

    def size(self, digest: str) -> int:
        """Return the bytes that a blob should have, or has if no model needs it."""
        uses = self.uses.get(digest)
        if uses:
            return uses[0].size
        try:
            return self.listing.named[digest].stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    def run(self, digests: Iterable[str], jobs: int, progress: Progress) -> None:
        """Check blobs with ``jobs`` threads.

        Raises: StorageError if the process can't open more files.
        """
        queues: tuple[list[str], list[str]] = ([], [])
        for digest in digests:
            queues[self.quick or self.size(digest) <= _SMALL].append(digest)
        large, small = map(iter, queues)
        mutex = threading.Lock()
        stop = threading.Event()

        def work(*sources: Iterator[str]) -> None:
            checker = BlobChecker(self.store, quick=self.quick, progress=progress, stop=stop)
            while (digest := take(sources)) is not None:
                check = checker.check(digest, self.uses.get(digest, ()))
                with mutex:
                    self._add_check(digest, check)

        def take(sources: tuple[Iterator[str], ...]) -> str | None:
            with mutex:
                return None if stop.is_set() else next(chain(*sources), None)

        others = min(jobs - 1, len(queues[0]))  # more threads would have no work
        shares = [(small, large), *((large,) for _ in range(others))]
        each(shares, lambda share: work(*share), 1 + others, name="verify", stop=stop)

    def _add_check(self, digest: str, check: BlobCheck) -> None:
        self.hashed += check.hashed
        self.tensors[digest] = check.tensors
        if check.reason is not None:
            self.damaged[digest] = check

    def again(self, digest: str, uses: Sequence[BlobReference]) -> str | None:
        """Return the fault that a damaged blob still has, None if it was made again or is unneeded.

        ``uses``: the references to it that still exist.
        """
        first = self.damaged[digest]
        if not uses and digest not in self.listing.named:
            return None
        if first.identity is not None and first.identity == self._identity(digest):
            return first.reason
        check = self._second.check(digest, uses)
        return None if check.reason == MISSING and not uses else check.reason

    def _identity(self, digest: str) -> FileIdentity | None:
        try:
            with self.store.blobs.reader(Digest(digest)) as reader:
                return reader.identity
        except BlobStoreError:
            return None
