"""BlobChecks: many blobs, checked by several threads.

The largest come first, so that all threads end together; the small ones are for one thread.

BlobCheck: whether one file of ``blobs/`` is what its name and the manifests say. Each file is read
once.
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

    ``size`` is the file's, None when it could not be opened; ``identity`` tells whether it was
    written to since.
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
    """Checks blobs; one for each thread.

    ``quick``: tensor blobs are not hashed, only their headers are read.

    A file with several names (hard links) is read once.
    When ``stop`` is set, a check ends early, and what it finds means nothing.
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

    def check(self, digest: Digest, uses: Sequence[Use]) -> BlobCheck:
        """Return what is wrong with the blob of that digest, which ``uses`` need.

        Nothing is raised for what is wrong.

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
            content = (
                self._content(reader, uses)
                if status.st_nlink == 1
                else self._content_of_links(reader, uses)
            )
        except BlobStoreError as error:
            return BlobCheck(
                f"it can't be read: {error.message}", reader.size, identity=reader.identity
            )
        hashed = reader.size if content.digest is not None else 0
        reason = (
            _wrong_mode(status)
            if content.digest in (None, digest)
            else "its bytes do not match its digest"
        )
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


def _tensors(
    reader: FileReader, data: memoryview | None, settings: Settings
) -> tuple[str | None, tuple[str, ...]]:
    """Return what is wrong with a blob's header, and the names of its tensors.

    Raises: StorageError.
    """
    try:
        header = header_of(BytesReader(bytes(data), reader.name) if data is not None else reader)
        header.check_limits(reader.name)
        return None, tuple(tensor.name for tensor in stored_tensors(header, settings))
    except BlobStoreError as error:
        if error.errno is not None:
            raise
        return error.message.removeprefix(f"{reader.name}: "), ()


def _wrong_document(reader: FileReader, data: memoryview | None, uses: Sequence[Use]) -> str | None:
    """Return what is wrong with a document that is read here; what others read is their business.

    Raises: StorageError.
    """
    kinds = {use.is_config for use in uses if use.is_config or use.name == CONFIG_NAME}
    raw = (
        b""
        if not kinds
        else bytes(data)
        if data is not None
        else reader.read(0, min(reader.size, MAX_CONFIG + 1))
    )
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


NOTHING = BlobListing({}, ())
_SMALL = 2**17
"""Blobs of at most so many bytes are one thread's: most of their time is Python's, and two threads take turns at that."""


@dataclass(slots=True)
class BlobChecks:
    """The blobs that models need and those of ``listing``, and what was found about them.

    By the hex digits of digests.

    ``damaged``: checks that found something; ``tensors``: the names in each blob. ``quick``: as in
    `BlobChecker`.
    """

    store: Store
    listing: BlobListing = NOTHING
    quick: bool = False
    uses: dict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))
    damaged: dict[str, BlobCheck] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hashed: int = 0
    _second: BlobChecker = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._second = BlobChecker(self.store, quick=self.quick, progress=silent)

    def add(self, users: Users, manifest: Manifest, lower: Sequence[Home] = ()) -> None:
        """Take in the blobs that models with this manifest need, but for those that only a home of ``lower`` has."""
        below = self._below(manifest, lower) if lower else set()
        for blob in manifest.descriptors:
            if blob.digest in below:
                continue
            use = Use(users, blob.media_type, blob.size, blob.name, blob is manifest.config)
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
        """Return the blobs to check, of all those that are ``wanted``, the largest first."""
        digests = filter(wanted, self.uses.keys() | self.listing.named.keys())
        return sorted(digests, key=lambda digest: (-self.size(digest), digest))

    def size(self, digest: str) -> int:
        """Return the bytes that a blob should have, or has when no model needs it."""
        uses = self.uses.get(digest)
        if uses:
            return uses[0].size
        try:
            return self.listing.named[digest].stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    def run(self, digests: Iterable[str], jobs: int, progress: Progress) -> None:
        """Check blobs with so many threads.

        Raises: StorageError when no more files can be opened.
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
                check = self._checked(checker, digest, self.uses.get(digest, ()))
                with mutex:
                    self._note(digest, check)

        def take(sources: tuple[Iterator[str], ...]) -> str | None:
            with mutex:
                return (
                    None
                    if stop.is_set()
                    else next((digest for source in sources for digest in source), None)
                )

        others = min(jobs - 1, len(queues[0]))  # more would find nothing to do
        shares = [(small, large), *((large,) for _ in range(others))]
        each(shares, lambda share: work(*share), 1 + others, name="verify", stop=stop)

    def _checked(self, checker: BlobChecker, digest: str, uses: Sequence[Use]) -> BlobCheck:
        if self.store.blobs.is_missing(digest):  # a hundred thousand may be
            return BlobCheck(MISSING)
        return checker.check(Digest(digest), uses)

    def _note(self, digest: str, check: BlobCheck) -> None:
        self.hashed += check.hashed
        self.tensors[digest] = check.tensors
        if check.reason is not None:
            self.damaged[digest] = check

    def again(self, digest: str, uses: Sequence[Use]) -> str | None:
        """Return what is still wrong with a damaged blob that ``uses`` need now; None when it was made again, or is gone."""
        first = self.damaged[digest]
        if not uses and digest not in self.listing.named:
            return None
        if first.identity is not None and first.identity == self._identity(digest):
            return first.reason
        check = self._checked(self._second, digest, uses)
        return None if check.reason == MISSING and not uses else check.reason

    def _identity(self, digest: str) -> FileIdentity | None:
        try:
            with self.store.blobs.reader(Digest(digest)) as reader:
                return reader.identity
        except BlobStoreError:
            return None
