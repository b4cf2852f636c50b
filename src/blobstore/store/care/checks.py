"""Checks of blobs: whether their bytes match their names and the manifests.

Each file is read once. Several threads check many blobs, the largest first, so that all threads end
together; one thread checks the small ones.
"""

import errno
import os
import stat
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field

from blobstore import hashing
from blobstore.errors import BlobStoreError, NotFoundError, RemoteError
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest, ModelConfig
from blobstore.formats.safetensors.header import header_of
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.io.ranges import BytesReader, FileReader, OpenReader, digests_of
from blobstore.io.workers import Progress, each, no_progress
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Care
from blobstore.store.stored import Settings, UnclearTypeError, stored_tensors

SMALL = 2**17
"""Blobs of up to this many bytes are read whole, by one thread: Python threads would take turns."""
MISSING = "it is missing"
# Errors of the process, not of a file.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


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
    blob: Descriptor
    is_config: bool


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """The result of a check: ``reason`` is None if the blob is sound; ``tensors`` are names.

    ``hashed`` counts the bytes that were hashed; ``odd``: the fault in its metadata, which do not
    name the type of its arrays (`UnclearTypeError`).
    """

    reason: str | None = None
    hashed: int = 0
    tensors: tuple[str, ...] = ()
    odd: str | None = None


@dataclass(slots=True)
class _Opened:
    """An open blob, what was read of it (all, if it is small), and its digest if it was hashed."""

    digest: Digest
    reader: OpenReader
    uses: Sequence[BlobReference]
    data: memoryview | None = None
    found: Digest | BlobStoreError | None = None

    @property
    def is_tensor(self) -> bool:
        return any(use.blob.media_type == TENSOR_MEDIA_TYPE for use in self.uses)

    @property
    def name(self) -> str:
        """A name that a manifest gives the blob, else ""."""
        return next((use.blob.name for use in self.uses if use.blob.name), "")


def tensors_in(reader: OpenReader, data: memoryview | None, settings: Settings) -> BlobCheck:
    """Return the names of a blob's tensors, or the fault in its header. Raises: StorageError."""
    try:
        header = header_of(BytesReader(bytes(data), reader.name) if data is not None else reader)
        header.check_limits(reader.name)
        names = tuple(tensor.name for tensor in stored_tensors(header, settings))
        return BlobCheck(tensors=names)
    except UnclearTypeError as error:
        return BlobCheck(odd=f"its bytes are whole, but {error.message}")
    except BlobStoreError as error:
        if error.errno is not None or isinstance(error, NotFoundError | RemoteError):
            raise
        return BlobCheck(error.message.removeprefix(f"{reader.name}: "))


def wrong_document(
    reader: OpenReader, data: memoryview | None, uses: Sequence[BlobReference]
) -> str | None:
    """Return the fault in a config or config.json. Other documents are not read by blobstore.

    Raises: StorageError.
    """
    kinds = {use.is_config for use in uses if use.is_config or use.blob.name == CONFIG_NAME}
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


def _wrong_mode(status: os.stat_result) -> str | None:
    mode = stat.S_IMODE(status.st_mode)
    return None if mode & stat.S_IRUSR else f"its mode is {mode:03o}: its owner may not read it"


def wrong_size(size: int, uses: Sequence[BlobReference]) -> str | None:
    """Return what is wrong with a blob's size, None if all manifests say the same."""
    wrong = sorted({use.blob.size for use in uses if use.blob.size != size})
    return f"it has {size:,} bytes, not {wrong[0]:,}" if wrong else None


# Blobs that a thread checks at once: as many as the widest processors hash at once.
_TOGETHER = 16


@dataclass(slots=True)
class BlobChecks:
    """The blobs that models need and ``others``, by hex digits, and their checks.

    ``damaged``: checks that found a fault; ``odd``: the reasons of odd blobs; ``tensors``: the
    names in each blob. ``quick``: of tensor blobs only the headers are read.
    """

    care: Care
    others: AbstractSet[str] = frozenset()
    quick: bool = False
    uses: dict[str, list[BlobReference]] = field(default_factory=lambda: defaultdict(list))
    damaged: dict[str, BlobCheck] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hashed: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)

    def add(self, users: Users, manifest: Manifest, below: Collection[Digest] = ()) -> None:
        """Add the blobs of a manifest, except those ``below``, which only another home has."""
        for blob in manifest.descriptors:
            if blob.digest not in below:
                is_config = blob is manifest.config
                self.uses[blob.digest.hex].append(BlobReference(users, blob, is_config))

    def largest_first(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return those blobs that are ``wanted``, the largest first."""
        digests = set(filter(wanted, self.uses.keys() | self.others))
        states = self.care.states(digests - self.uses.keys())
        self._sizes = {digest: state.size for digest, state in states.items()}
        return sorted(digests, key=lambda digest: (-self.size(digest), digest))

    def size(self, digest: str) -> int:
        """Return the bytes that a blob should have, or has if no model needs it."""
        uses = self.uses.get(digest)
        return uses[0].blob.size if uses else self._sizes.get(digest, 0)

    def run(self, digests: Iterable[str], jobs: int, progress: Progress) -> None:
        """Check blobs with ``jobs`` threads.

        Raises: StorageError if the process can't open more files.
        """
        queues: tuple[list[str], list[str]] = ([], [])
        is_far = self.care.at_once is not None  # each blob takes a thread, which waits
        for digest in digests:
            is_small = self.quick or self.size(digest) <= SMALL
            queues[is_small and not is_far].append(digest)
        large, small = map(deque, queues)
        mutex = threading.Lock()
        stop = threading.Event()
        others = min(jobs - 1, len(large))  # more threads would have no work

        def work(*sources: deque[str]) -> None:
            while digests := take(sources):
                blobs = [(digest, self.uses.get(digest, ())) for digest in digests]
                checks = self._check(blobs, progress, stop)
                with mutex:
                    for digest, check in zip(digests, checks, strict=True):
                        self._add_check(digest, check)

        def take(sources: tuple[deque[str], ...]) -> list[str]:
            with mutex:
                source = next(filter(None, sources), None)
                if source is None or stop.is_set():
                    return []
                # Of the last large ones each thread gets its share.
                share = _TOGETHER if source is small else -(-len(source) // (1 + others))
                share = 1 if is_far else share
                return [source.popleft() for _ in range(min(_TOGETHER, share, len(source)))]

        shares = [(small, large), *((large,) for _ in range(others))]
        each(shares, lambda share: work(*share), 1 + others, name="verify", stop=stop)

    def _add_check(self, digest: str, check: BlobCheck) -> None:
        self.hashed += check.hashed
        self.tensors[digest] = check.tensors
        if check.reason is not None:
            self.damaged[digest] = check
        elif check.odd is not None:
            self.odd[digest] = check.odd

    def again(self, digest: str, uses: Sequence[BlobReference]) -> str | None:
        """Return the fault that a damaged blob still has, None if it was made again or is unneeded.

        ``uses``: the references to it that still exist.
        """
        if not uses and digest not in self.others:
            return None
        reason = self._check([(digest, uses)])[0].reason
        return None if reason == MISSING and not uses else reason

    def _check(
        self,
        blobs: Sequence[tuple[str, Sequence[BlobReference]]],
        progress: Progress = no_progress,
        stop: threading.Event | None = None,
    ) -> list[BlobCheck]:
        """Return the checks of blobs, given in hex digits, and the references to each.

        If ``stop`` is set, they end early, and their results are meaningless.
        Raises: StorageError if the process can't open more files; a fault of a blob is a result.
        """
        with ExitStack() as files:
            opened = [self._open(digest, uses, files) for digest, uses in blobs]
            self._hash([blob for blob in opened if isinstance(blob, _Opened)], progress, stop)
            return [_checked(blob) if isinstance(blob, _Opened) else blob for blob in opened]

    def _open(
        self, digest: str, uses: Sequence[BlobReference], files: ExitStack
    ) -> _Opened | BlobCheck:
        try:
            reader = self.care.open(digest, uses[0].blob.size if uses else None)
        except NotFoundError:
            return BlobCheck(MISSING)
        except BlobStoreError as error:
            if error.errno in _OURS or isinstance(error, RemoteError):
                raise
            return BlobCheck(error.message)
        return _Opened(Digest(digest), files.enter_context(reader), uses)

    def _hash(
        self, opened: Sequence[_Opened], progress: Progress, stop: threading.Event | None
    ) -> None:
        wanted = [
            blob
            for blob in opened
            if not (self.quick and (blob.is_tensor or blob.reader.size > MAX_CONFIG))
        ]
        small = [(blob, data) for blob in wanted if (data := _read_whole(blob)) is not None]
        digests = hashing.digests([data for _, data in small])
        for (blob, _), raw in zip(small, digests, strict=True):
            blob.found = Digest(raw.hex())
            progress(blob.reader.size, blob.name)
        large: list[_Opened] = []
        for blob in wanted:
            if blob.found is None and isinstance(blob.reader, FileReader):
                blob.reader.read_ahead()
                large.append(blob)
            elif blob.found is None:  # it is read from its beginning to its end
                try:
                    blob.found = blob.reader.digest()
                    progress(blob.reader.size, blob.name)
                except BlobStoreError as error:
                    blob.found = error
        readers, names = [blob.reader for blob in large], [blob.name for blob in large]
        results = digests_of(readers, names, progress=progress, stop=stop)
        for blob, found in zip(large, results, strict=True):
            blob.found = found


def _read_whole(blob: _Opened) -> memoryview | None:
    if blob.reader.size <= SMALL:
        data = memoryview(bytearray(blob.reader.size))
        try:
            blob.reader.readinto(0, data)
        except BlobStoreError as error:
            blob.found = error
        else:
            blob.data = data
    return blob.data


def _checked(blob: _Opened) -> BlobCheck:
    reader, uses = blob.reader, blob.uses
    tensors = BlobCheck()
    try:
        if isinstance(blob.found, BlobStoreError):
            raise blob.found
        mode = _wrong_mode(reader.status()) if isinstance(reader, FileReader) else None
        wrong = mode or wrong_size(reader.size, uses)
        if blob.is_tensor:
            tensors = tensors_in(reader, blob.data, uses[0].users.settings)
            if tensors.odd and blob.found is None:  # only whole bytes are odd
                blob.found = reader.digest()
        else:
            wrong = wrong or wrong_document(reader, blob.data, uses)
    except NotFoundError:
        return BlobCheck(MISSING)
    except RemoteError:
        raise
    except BlobStoreError as error:
        return BlobCheck(f"it can't be read: {error.message}")
    hashed = reader.size if blob.found is not None else 0
    if blob.found not in (None, blob.digest):
        wrong = "its bytes do not match its digest"
    odd = None if wrong else tensors.odd
    return BlobCheck(wrong or tensors.reason, hashed, tensors.tensors, odd)
