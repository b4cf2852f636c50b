"""Checks of blobs: whether their bytes match their names and the manifests.

Each file is read once. Several threads check many blobs, the largest first, so that all threads end
together; one thread checks the small ones.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field

from blobstore import hashing
from blobstore.errors import BlobStoreError, NotFoundError, RemoteError
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest, ModelConfig
from blobstore.formats.safetensors.header import header_of
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.io.ranges import BytesReader, FileReader, OpenReader, digests_of
from blobstore.io.workers import Progress, each, silent
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Care, Readable
from blobstore.store.stored import Settings, UnclearTypeError, stored_tensors

SMALL = 2**17
"""Blobs of up to so many bytes are read whole, by one thread: Python threads would take turns."""
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

    ``hashed`` counts the bytes that were hashed; ``odd``: as in `TensorNames`.
    """

    reason: str | None
    hashed: int = 0
    tensors: tuple[str, ...] = ()
    odd: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a blob's tensors, or why they can't be read.

    ``wrong``: the fault in its header; ``odd``: the fault in its metadata, which do not name the
    type of its arrays (`UnclearTypeError`).
    """

    names: tuple[str, ...] = ()
    wrong: str | None = None
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
        return any(use.media_type == TENSOR_MEDIA_TYPE for use in self.uses)


class BlobChecker:
    """Checks blobs, in one thread, several together.

    ``quick``: of tensor blobs only the headers are read. If ``stop`` is set, a check ends early,
    and its result is meaningless.
    """

    def __init__(
        self, care: Care, *, quick: bool, progress: Progress, stop: threading.Event | None = None
    ) -> None:
        self._care = care
        self._stop = stop or threading.Event()
        self._quick = quick
        self._progress = progress

    def check_all(self, blobs: Sequence[tuple[str, Sequence[BlobReference]]]) -> list[BlobCheck]:
        """Return the checks of blobs, given in hex digits, and the references to each.

        Raises: StorageError if the process can't open more files; a fault of a blob is a result.
        """
        with ExitStack() as files:
            opened: list[_Opened | BlobCheck] = []
            for hexadecimal, uses in blobs:
                blob = self._open(hexadecimal, uses)
                if isinstance(blob, _Opened):
                    files.enter_context(blob.reader)
                opened.append(blob)
            self._hash([blob for blob in opened if isinstance(blob, _Opened)])
            return [self._checked(blob) if isinstance(blob, _Opened) else blob for blob in opened]

    def _open(self, hexadecimal: str, uses: Sequence[BlobReference]) -> _Opened | BlobCheck:
        if self._care.is_missing(hexadecimal):  # a hundred thousand may be
            return BlobCheck(MISSING)
        try:
            reader = self._care.open(hexadecimal, uses[0].size if uses else None)
            return _Opened(Digest(hexadecimal), reader, uses)
        except NotFoundError:
            return BlobCheck(MISSING)
        except BlobStoreError as error:
            if error.errno in _OURS or isinstance(error, RemoteError):
                raise
            return BlobCheck(error.message)

    def _hash(self, opened: Sequence[_Opened]) -> None:
        wanted = [blob for blob in opened if self._reads_all(blob)]
        small = [(blob, data) for blob in wanted if (data := self._read_whole(blob)) is not None]
        digests = hashing.digests([data for _, data in small])
        for (blob, _), raw in zip(small, digests, strict=True):
            blob.found = Digest(raw.hex())
            self._progress(blob.reader.size, name_of(blob.uses))
        large: list[_Opened] = []
        for blob in wanted:
            if blob.found is None and isinstance(blob.reader, FileReader):
                blob.reader.read_ahead()
                large.append(blob)
            elif blob.found is None:  # it is read from its beginning to its end
                try:
                    blob.found = blob.reader.digest()
                    self._progress(blob.reader.size, name_of(blob.uses))
                except BlobStoreError as error:
                    blob.found = error
        names = [name_of(blob.uses) for blob in large]
        readers = [blob.reader for blob in large]
        results = digests_of(readers, names, progress=self._progress, stop=self._stop)
        for blob, found in zip(large, results, strict=True):
            blob.found = found

    def _reads_all(self, blob: _Opened) -> bool:
        return not self._quick or (not blob.is_tensor and blob.reader.size <= MAX_CONFIG)

    def _read_whole(self, blob: _Opened) -> memoryview | None:
        """Read a small blob, and return its bytes; None if it is large or can't be read."""
        if blob.reader.size > SMALL:
            return None
        data = memoryview(bytearray(blob.reader.size))
        try:
            blob.reader.readinto(0, data)
        except BlobStoreError as error:
            blob.found = error
        else:
            blob.data = data
        return blob.data

    def _checked(self, blob: _Opened) -> BlobCheck:
        reader, uses = blob.reader, blob.uses
        tensors = TensorNames()
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
        return BlobCheck(wrong or tensors.wrong, hashed, tensors.names, odd)


def tensors_in(reader: OpenReader, data: memoryview | None, settings: Settings) -> TensorNames:
    """Return the names of a blob's tensors, or the fault in its header. Raises: StorageError."""
    try:
        header = header_of(BytesReader(bytes(data), reader.name) if data is not None else reader)
        header.check_limits(reader.name)
        return TensorNames(tuple(tensor.name for tensor in stored_tensors(header, settings)))
    except UnclearTypeError as error:
        return TensorNames(odd=f"its bytes are whole, but {error.message}")
    except BlobStoreError as error:
        if error.errno is not None or isinstance(error, NotFoundError | RemoteError):
            raise
        return TensorNames(wrong=error.message.removeprefix(f"{reader.name}: "))


def wrong_document(
    reader: OpenReader, data: memoryview | None, uses: Sequence[BlobReference]
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


def name_of(uses: Sequence[BlobReference]) -> str:
    """Return a name that a manifest gives a blob, else ""."""
    return next((use.name for use in uses if use.name), "")


def _wrong_mode(status: os.stat_result) -> str | None:
    mode = stat.S_IMODE(status.st_mode)
    return None if mode & stat.S_IRUSR else f"its mode is {mode:03o}: its owner may not read it"


def wrong_size(size: int, uses: Sequence[BlobReference]) -> str | None:
    """Return what is wrong with a blob's size, None if all manifests say the same."""
    wrong = sorted({use.size for use in uses if use.size != size})
    return f"it has {size:,} bytes, not {wrong[0]:,}" if wrong else None


_TOGETHER = 16
"""Blobs that a thread checks at once: as many as the widest processors hash at once."""


@dataclass(slots=True)
class BlobChecks:
    """The blobs that models need and ``others``, by hex digits, and their checks.

    ``damaged``: checks that found a fault; ``odd``: the reasons of odd blobs; ``tensors``: the
    names in each blob. ``quick``: as in `BlobChecker`.
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

    def add(self, users: Users, manifest: Manifest, lower: Sequence[Readable] = ()) -> None:
        """Add the blobs of a manifest, except those that only a home of ``lower`` has."""
        below = self._below(manifest, lower) if lower else set()
        for blob in manifest.descriptors:
            if blob.digest in below:
                continue
            use = BlobReference(
                users, blob.media_type, blob.size, blob.name, blob is manifest.config
            )
            self.uses[blob.digest.hex].append(use)

    def _below(self, manifest: Manifest, lower: Sequence[Readable]) -> set[Digest]:
        gone = [blob for blob in manifest.descriptors if self.care.is_missing(blob.digest.hex)]
        nowhere = gone
        for home in lower:
            nowhere = home.blobs.missing(nowhere)
        return {blob.digest for blob in gone} - {blob.digest for blob in nowhere}

    def chosen(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return those blobs that are ``wanted``, the largest first."""
        digests = set(filter(wanted, self.uses.keys() | self.others))
        states = self.care.states(digests - self.uses.keys())
        self._sizes = {digest: state.size for digest, state in states.items()}
        return sorted(digests, key=lambda digest: (-self.size(digest), digest))

    def size(self, digest: str) -> int:
        """Return the bytes that a blob should have, or has if no model needs it."""
        uses = self.uses.get(digest)
        return uses[0].size if uses else self._sizes.get(digest, 0)

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
            checker = BlobChecker(self.care, quick=self.quick, progress=progress, stop=stop)
            while digests := take(sources):
                blobs = [(digest, self.uses.get(digest, ())) for digest in digests]
                checks = checker.check_all(blobs)
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
        checker = BlobChecker(self.care, quick=self.quick, progress=silent)
        reason = checker.check_all([(digest, uses)])[0].reason
        return None if reason == MISSING and not uses else reason
