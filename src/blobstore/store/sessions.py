"""Sessions of a store, its signatures, and the checks that all homes share: parts of the ports.

See ports.py.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import IO, Any, ClassVar, Protocol, TypeAlias, TypeVar

from blobstore import hashing
from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor, Manifest
from blobstore.formats.oci import MAX_SIGNATURES, Signature
from blobstore.formats.strictjson import check_limit
from blobstore.hashing import Bytes
from blobstore.hashing.stage import HashStage
from blobstore.io.budget import allow_open_files
from blobstore.io.durable import os_errors, write_all_at
from blobstore.io.ranges import BytesReader, OpenReader, fill
from blobstore.io.workers import Progress, each, results_of, start_progress
from blobstore.names import Digest, ModelName

Expected: TypeAlias = Collection[bytes | None] | None
"""The manifests, as bytes, that a name may have; None among them if it may be unused."""


class How(StrEnum):
    """How a blob was added to a home.

    It was there already; it is another name of the same file; it shares the blocks of a file; or
    its bytes were copied.
    """

    THERE = "there"
    LINKED = "linked"
    CLONED = "cloned"
    COPIED = "copied"


class Finished(Protocol):
    """A blob that is complete."""

    @property
    def digest(self) -> Digest:
        """The digest of its bytes."""

    @property
    def size(self) -> int:
        """Its size in bytes."""


class Writer(Protocol):
    """Writes one blob, in pieces in any order, from any number of threads."""

    def put(
        self,
        offset: int,
        data: Any,
        *,
        extra: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        aligned: bool = False,
        waits: bool = True,
        hashed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a contiguous buffer at ``offset``.

        ``extra``: buffers for other offsets, in a gap; they are written before it returns.
        ``gap``: that many bytes after the buffer belong to this piece and others, none of
        which comes later than the last piece in front of the gap. ``aligned``: the buffer's
        address and ``offset`` are equal modulo the page size. ``waits``: False if bytes before
        ``offset`` may come much later, so that the buffer must not wait for them. ``hashed`` is
        called by any thread when the buffer may be reused.
        Raises: StorageError.
        """

    def close(self) -> None:
        """Discard an unfinished blob, and call ``hashed`` for all buffers that wait.

        A second call does nothing.
        """


class Intake(Protocol):
    """A model that is being transferred to a `Receiver`.

    ``in_sequence``: whether blobs are added one at a time, because each is written after the one
    before.
    """

    in_sequence: bool = False

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those of ``descriptors``, each digest once, that have to be added.

        The others are in the home with their size, or can be had there without their bytes.
        """

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """Add a blob from another home, and check that its bytes match the descriptor.

        An intake in sequence may check several blobs together: then the error of one is raised when
        a later one is added, or when the model is published.

        Raises: DigestMismatchError; CorruptDataError for another size; as ``reader``; StorageError.
        """

    def publish(self, name: ModelName, manifest: Manifest) -> set[Digest]:
        """Make the blobs that the manifest names visible, then the model; return the new digests.

        Raises: NotFoundError or CorruptDataError if a blob of the manifest is neither in the
        session nor in the home with its size; LimitExceededError for a manifest that could not be
        read back; StorageError. The name keeps its manifest then.
        """

    def keep(self) -> None:
        """Keep what was written when the session ends unpublished, so that a later one recalls it.

        Then it is durable, and the session's end raises StorageError if it can't be. Ignored by
        homes that remember nothing.
        """
        return  # mypy takes an empty method for an abstract one


class Session(Intake, Protocol):
    """What is being written. When the session ends, everything unpublished is removed.

    A session may recall the blobs that earlier ones made by keys of 64 hex digits that say how, so
    that they are not made again. ``remembers``: whether later sessions recall what this one notes.
    """

    remembers: bool = False

    def recall(self, key: str, size: int, *, verify: bool) -> Finished | None:  # noqa: ARG002
        """Return the blob of ``size`` bytes that was made for ``key``, or None.

        A blob that a session kept is also recalled, on any machine, by the hex digits of its
        digest. ``verify``: hash it first, and return None unless its bytes match its digest. It may
        take as long as reading the blob. May be called from several threads. Raises: StorageError.
        """
        return None

    def note(self, key: str, blob: Any) -> None:
        """Note the blob that was made for ``key``, in case this session is killed."""
        del key, blob

    def open(self, blob: Any) -> OpenReader:
        """Return a reader of a blob that this session made or recalled."""
        raise NotFoundError(f"blob {blob} does not belong to this session")

    def writer(
        self, size: int, finished: Callable[[Any], None], stage: HashStage | None = None
    ) -> Writer:
        """Return a writer of one blob of ``size`` bytes. Any thread may call this.

        ``finished`` is called with the blob (`Finished`) when all of it is written and hashed.
        ``stage``: where the blob may be hashed together with others, by the threads that call
        `HashStage.work`; None: `Writer.put` hashes.
        """

    def copy(self, reader: OpenReader) -> Finished:
        """Write all bytes of a reader as one blob. Raises: as ``reader``; StorageError."""

    def put(self, data: Bytes) -> Any:
        """Write bytes in memory as one blob (`Finished`). Raises: StorageError."""
        return self.put_all([data])[0]

    def put_all(self, blobs: Sequence[Bytes]) -> Sequence[Finished]:
        """Write several small blobs; return them in their order. Raises: StorageError."""
        return [self.copy(BytesReader(bytes(data))) for data in blobs]

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """Make the blobs that the manifest names visible, then the model; return the new digests.

        ``expected``: the manifests, as bytes, that the name may have at this moment; None among
        them allows that the name is unused. If ``expected`` is None, any manifest is replaced.
        ``below``: blobs that another home has, and that need not be in this one (layered.py).

        Raises: ConflictError unless the name has an expected manifest, and in a bucket also if
        another writer changes it during the call; NotFoundError or
        CorruptDataError if a blob of the manifest is neither in the session nor in the home with
        its size; LimitExceededError for a manifest that could not be read back; StorageError. The
        name keeps its manifest then.
        """


class Signatures(Protocol):
    """Signatures of manifests, by digest.

    They may come before the manifest: a model that must be signed is never visible without them.
    """

    def read(self, name: ModelName, digest: Digest) -> Sequence[Signature]:
        """Return the signatures of a manifest that ``name`` has, or will have.

        They are not verified. Homes that keep signatures by the digest alone ignore ``name``.

        Raises: CorruptDataError, LimitExceededError if they can't be read; StorageError,
        RemoteError.
        """

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        """Add those signatures that the home lacks, durably; return how many these are.

        Raises: LimitExceededError for too many of one manifest; StorageError, RemoteError.
        """


class KeptSignatures(Protocol):
    """Signatures that are each kept under the sha256 of their bytes. See `Signatures`.

    So several processes add signatures without waiting for each other. ``at_once``: how many are
    read at once.
    """

    at_once: ClassVar[int] = 1

    def read(self, name: ModelName, digest: Digest) -> list[Signature]:  # noqa: ARG002  # see above
        """See `Signatures`. Sorted by the sha256 of their bytes."""
        keys = self._keys(digest)
        check_limit(f"{digest}", len(keys), "signatures", MAX_SIGNATURES, "S1")
        parse = partial(self._signature, digest)
        return results_of(keys, parse, self.at_once, name="signatures")

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:  # noqa: ARG002  # see above
        encoded = [signature.encode() for signature in signatures]
        there = self._keys(digest)
        new = {key: raw for raw in encoded if (key := Digest.of(raw).hex) not in there}
        what = f"{digest} with the new ones"
        check_limit(what, len(there) + len(new), "signatures", MAX_SIGNATURES, "S1")
        return self._write(digest, new)

    def _signature(self, digest: Digest, key: str) -> Signature:
        raw, place = self._raw(digest, key)
        if Digest.of(raw).hex != key:
            message = f"{place} is damaged: its bytes do not match its name"
            hint = "Remove it, and sign, pull or copy the model again."
            raise CorruptDataError(message, path=place, hint=hint)
        return Signature.parse(raw, place)

    def _keys(self, digest: Digest) -> list[str]:
        """Return the sha256 of a manifest's signatures, sorted."""

    def _raw(self, digest: Digest, key: str) -> tuple[bytes, str]:
        """Return the bytes of a signature, and where they are."""

    def _write(self, digest: Digest, new: Mapping[str, bytes]) -> int:
        """Write signatures durably; return how many were new."""


_Reader = TypeVar("_Reader", bound=OpenReader)


def unique(descriptors: Iterable[Descriptor]) -> list[Descriptor]:
    """Return the descriptors, one for each digest."""
    return list({descriptor.digest: descriptor for descriptor in descriptors}.values())


def blob_not_found(
    digest: Digest, path: str | None = None, *, hint: str | None = None
) -> NotFoundError:
    """Return the error for a blob that does not exist."""
    return NotFoundError(f"blob {digest} is missing", blob=str(digest), path=path, hint=hint)


def check_blob_size(descriptor: Descriptor, nbytes: int | None, path: str | None = None) -> None:
    """Raise CorruptDataError unless the blob has the descriptor's size, NotFoundError for None."""
    if nbytes is None:
        raise blob_not_found(descriptor.digest, path)
    if nbytes != descriptor.size:
        message = f"blob {descriptor.digest} has {nbytes:,} bytes, not {descriptor.size:,}"
        raise CorruptDataError(message, blob=str(descriptor.digest), path=path)


def of_size(descriptor: Descriptor, reader: _Reader) -> _Reader:
    """Return an open reader; it is closed unless it has the descriptor's size.

    Raises: as `check_blob_size`.
    """
    try:
        check_blob_size(descriptor, reader.size, reader.name)
    except BlobStoreError:
        reader.close()
        raise
    return reader


def check_document_size(descriptor: Descriptor) -> None:
    """Raise LimitExceededError for a document of more than `MAX_DOCUMENT` bytes."""
    if descriptor.size > MAX_DOCUMENT:
        message = (
            f"limit exceeded: blob {descriptor.digest} has {descriptor.size:,} bytes,"
            f" at most {MAX_DOCUMENT:,} for a document"
        )
        raise LimitExceededError(message, blob=str(descriptor.digest))


def mismatch_error(digest: Digest) -> DigestMismatchError:
    """Return the error of a blob whose bytes do not match its digest."""
    message = f"blob {digest} is damaged: its bytes do not match its digest"
    return DigestMismatchError(message, blob=str(digest))


def checked_bytes(data: bytes, digest: Digest) -> bytes:
    """Return ``data``. Raises: DigestMismatchError if they do not match the digest."""
    if Digest.of(data) != digest:
        raise mismatch_error(digest)
    return data


def check_reader_size(descriptor: Descriptor, reader: OpenReader) -> None:
    """Raise CorruptDataError unless a reader of another home's blob has the descriptor's size."""
    if reader.size != descriptor.size:
        message = (
            f"{reader.name} has {reader.size:,} bytes, {descriptor.digest} has {descriptor.size:,}"
        )
        raise CorruptDataError(message, blob=str(descriptor.digest), path=reader.name)


def wrong_bytes(descriptor: Descriptor, reader: OpenReader) -> DigestMismatchError:
    """Return the error for a reader whose bytes do not match the descriptor."""
    message = f"{reader.name}: its bytes are not those of {descriptor.digest}"
    return DigestMismatchError(message, blob=str(descriptor.digest), path=reader.name)


def checked_pieces(descriptor: Descriptor, reader: OpenReader) -> Iterator[bytes]:
    """Yield a blob's bytes. Raises: DigestMismatchError before the last ones, if they are wrong."""
    stream, left = hashing.stream(), descriptor.size
    for piece in reader.pieces(memoryview(bytearray(_PIECE))):
        data = bytes(piece)
        stream.update(data)
        left -= len(data)
        if not left and stream.digest().hex() != descriptor.digest.hex:
            raise wrong_bytes(descriptor, reader)
        yield data


def ambiguous(name: ModelName, spellings: Iterable[ModelName]) -> AmbiguousNameError:
    """Return the error for a name that a home has in several other spellings."""
    message = f"{str(name)!r} may be {' or '.join(map(str, spellings))}: they differ only in case"
    return AmbiguousNameError(message, model=str(name), hint="Use the spelling of one of them.")


def name_among(names: Iterable[ModelName], name: ModelName) -> ModelName:
    """Return a name in the spelling that ``names`` have, itself if they don't: case is ignored.

    Raises: AmbiguousNameError if there are several other spellings.
    """
    spellings = sorted(other for other in names if other.folded == name.folded)
    if name in spellings:
        return name
    if len(spellings) > 1:
        raise ambiguous(name, spellings)
    return spellings[0] if spellings else name


def check_spelling(name: ModelName, existing: ModelName) -> None:
    """Raise UsageError for publishing a name that the home has in another case."""
    if existing != name:
        message = f"the model {existing} exists, and {name} differs from it only in case"
        hint = f"Try again: {existing} will be used."
        raise UsageError(message, model=str(existing), hint=hint)


def check_expected(name: ModelName, raw: bytes | None, expected: Expected) -> None:
    """Raise ConflictError unless ``raw``, the manifest of the name, is an expected one."""
    if expected is not None and raw not in expected:
        message = f"another process changed {name} meanwhile"
        raise ConflictError(message, model=str(name), hint="Check the model, and try again.")


_PIECE = 2**20


@dataclass(eq=False)
class Spool:
    """Blobs one after the other in one file. Safe to share between threads."""

    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _file: IO[bytes] | None = None
    _end: int = 0

    def reserve(self, size: int) -> SpooledBlob:
        """Return the place of a blob that is written then. Raises: StorageError."""
        with self._mutex, os_errors("create", "a temporary file"):
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the spool
            begin, self._end = self._end, self._end + size
            return SpooledBlob(self._file.fileno(), begin, size)

    def keep(self, reader: OpenReader) -> SpooledBlob:
        blob, at = self.reserve(reader.size), 0
        for piece in reader.pieces(memoryview(bytearray(_PIECE))):
            blob.write(at, piece)
            at += len(piece)
        return blob

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(eq=False)
class SpooledBlob(OpenReader):
    """One blob of a `Spool`."""

    _fd: int
    _begin: int
    size: int
    identity = None
    name = "a temporary file"

    def write(self, offset: int, data: Any) -> None:
        with os_errors("write", self.name):
            write_all_at(self._fd, self._begin + offset, memoryview(data).cast("B"))

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        with os_errors("read", self.name):
            if fill(self._fd, self._begin + offset, buffer) < len(buffer):
                raise self._short(offset, len(buffer))


@dataclass(eq=False)
class SpoolWriter:
    """Writes one blob. See `Writer`. It is hashed at its end."""

    _blob: SpooledBlob
    _finished: Callable[[Digest], None]
    _written: int = 0
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def put(
        self,
        offset: int,
        data: Any,
        *,
        extra: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        aligned: bool = False,  # noqa: ARG002  # through the page cache
        waits: bool = True,  # noqa: ARG002  # no buffer waits
        hashed: Callable[[], None] = lambda: None,
    ) -> None:
        for at, part in (*extra, (offset, data)):
            self._blob.write(at, part)
        hashed()
        with self._mutex:
            self._written += memoryview(data).nbytes + gap
            is_complete = self._written == self._blob.size
        if is_complete:
            self._finished(self._blob.digest(HashStage()))

    def close(self) -> None:
        """Do nothing: no buffer waits."""


class SpooledSession(Session):
    """A session whose blobs wait in a `Spool` until they are published."""

    def __init__(self) -> None:
        self._spool = Spool()
        self._spooled: dict[Digest, SpooledBlob] = {}

    def writer(
        self,
        size: int,
        finished: Callable[[Any], None],
        stage: HashStage | None = None,  # noqa: ARG002  # hashed when it is complete
    ) -> SpoolWriter:
        blob = self._spool.reserve(size)
        return SpoolWriter(blob, lambda digest: finished(self._keep(digest, blob)))

    def copy(self, reader: OpenReader) -> Descriptor:
        blob = self._spool.keep(reader)
        return self._keep(blob.digest(), blob)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._spooled:
            return How.THERE
        check_reader_size(descriptor, reader)
        if self.copy(reader).digest != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
        return How.COPIED

    def _keep(self, digest: Digest, blob: SpooledBlob) -> Descriptor:
        self._spooled[digest] = blob
        return Descriptor(media_type="", digest=digest, size=blob.size)

    def close(self) -> None:
        self._spool.close()


def add_missing(
    session: Intake,
    manifest: Manifest,
    open_blob: Callable[[Descriptor], OpenReader],
    jobs: int,
    progress: Progress | None,
) -> dict[Digest, How]:
    """Add those blobs of a manifest that a session lacks; return how each of them was added."""
    # Each thread has one blob, and they are hashed together.
    at_once = jobs * hashing.width()
    allow_open_files(3 * at_once)
    missing = session.missing(manifest.descriptors)
    report = start_progress(progress, sum(blob.size for blob in missing))
    took: dict[Digest, How] = {}

    def take(blob: Descriptor) -> None:
        with open_blob(blob) as reader:
            took[blob.digest] = session.add(blob, reader)
        report(blob.size, blob.name or str(blob.digest))

    each(missing, take, 1 if session.in_sequence else min(at_once, len(missing)), name="transfer")
    return took


@contextmanager
def keep_for_the_next(session: Intake) -> Iterator[None]:
    """Keep the blobs for the next transfer if this one fails, unless the disk may be full."""
    try:
        yield
    except StorageError:
        raise
    except BaseException:
        session.keep()
        raise
