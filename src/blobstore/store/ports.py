"""The ports of a store: what a home of blobs and manifests does, wherever it lies.

A home keeps *blobs*, content by digest that never changes, and *manifests*, names that do. What is
being written lies in a *session*, and nobody sees it before it is published: the manifest last.
``store/local/`` is the home in a folder, shared with Ollama; memory.py one in memory; layered.py
one over several others. `transfer` copies models between any two. `blobstore.testing.StoreTests`
says in tests what is said here in words.

What only some homes can do (make a blob again from what an earlier import left, map a file) is an
attribute that is None, or a method of what they return (`io.ranges.RangeReader`), and never asked
for by the class of a home.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName


class How(StrEnum):
    """How a blob came into a home: it was there; as another name of the same file.

    Sharing its blocks; copied.
    """

    THERE = "there"
    LINKED = "linked"
    CLONED = "cloned"
    COPIED = "copied"


@dataclass(frozen=True, slots=True)
class Summary:
    """A model in short.

    ``is_plain``: its manifest is written as Ollama writes them (local/references.py).
    """

    size: int
    parameters: int
    quant_type: str
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """What a removal did: the blobs that are gone, those that had to stay, and why they had to."""

    removed: tuple[Descriptor, ...]
    kept: tuple[Descriptor, ...] = ()
    reason: str | None = None


class Finished(Protocol):
    """A blob that is written whole."""

    @property
    def digest(self) -> Digest:
        """Of its bytes."""

    @property
    def size(self) -> int:
        """In bytes."""


class Writer(Protocol):
    """Writes one blob, in pieces of any order, from any number of threads."""

    def put(
        self,
        offset: int,
        data: Any,
        *,
        gap: int = 0,
        aligned: bool = False,
        hashed: Callable[[], None] = lambda: None,
    ) -> Finished | None:
        """Write a contiguous buffer at ``offset``.

        Return the blob when it is complete now, else None.

        ``gap``: so many bytes behind it come by `put_aside`, before the last piece before the gap.
        ``aligned``: the buffer's address has the same remainder by the page size as ``offset``.
        ``hashed`` is called, from any thread, when the buffer is not needed any more. Raises:
        StorageError.
        """

    def put_aside(self, offset: int, data: Any) -> None:
        """Write bytes that lie in a gap. Raises: StorageError."""

    def release(self) -> None:
        """Give back the buffers that wait, when the blob will not be finished."""

    def close(self) -> None:
        """Give up what is not finished; a second call does nothing."""


class Earlier(Protocol):
    """What earlier sessions made, by keys that say how: not made again."""

    def find(self, key: str, size: int, *, verify: bool) -> Finished | None:
        """Return the blob of ``size`` bytes that was made for ``key``; ``verify``: only when its bytes are its digest's."""

    def note(self, key: str, blob: Any) -> None:
        """Note what was made for ``key``, for the case that this session does not end."""

    def keep(self) -> None:
        """Let what was made and noted outlast this session, though nothing of it is published: another one finds it."""

    def takes_time(self) -> bool:
        """Return True when finding takes as long as reading the blobs."""


class Session(Protocol):
    """What is being written. It is gone when the session ends, but for what was published."""

    @property
    def earlier(self) -> Earlier | None:
        """What earlier sessions made; None where the home does not remember."""

    def writer(self, size: int) -> Writer:
        """Return a writer of one blob of ``size`` bytes. Any thread may ask."""

    def put(self, data: bytes) -> Finished:
        """Write a blob that is in memory. Raises: StorageError."""

    def copy(self, reader: OpenReader) -> Finished:
        """Write all that a reader gives as one blob. Raises: as ``reader``; StorageError."""

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """Take a blob from elsewhere, and check that its bytes are the descriptor's.

        Raises: DigestMismatchError; CorruptDataError for another size; as ``reader``; StorageError.
        """

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """Make the blobs that the manifest names visible, then the model.

        Return the digests that were not there before.

        ``expected``: the bytes of manifests that the name may have just now, None among them
        standing for no manifest; else somebody was faster. None alone: whatever it has is replaced.
        ``below``: blobs that need not be here, because another home has them (layered.py); what the
        session made of them is forgotten.

        Raises: ConflictError; NotFoundError or CorruptDataError when a blob of the manifest is
        neither in the session nor in the home with its size; LimitExceededError for a manifest that
        could not be read back; StorageError. The name keeps what it had then.
        """


Expected = Collection[bytes | None] | None


class Blobs(Protocol):
    """Content by digest. It never changes: a blob is there whole, or not at all."""

    def open(self, descriptor: Descriptor) -> OpenReader:
        """Return a reader over a blob that has the descriptor's size.

        Its bytes are not checked here.

        Raises: NotFoundError when it is missing; CorruptDataError when its size differs; with
        ``blob``.
        """

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob, checked against its digest.

        Raises: as `open`; LimitExceededError for a large one; DigestMismatchError.
        """

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those of ``descriptors``, each digest once, that no blob of that size is there for."""

    def digests(self) -> set[str]:
        """Return the hex digits of the digests of all blobs that are there."""


class Manifests(Protocol):
    """Names: the only thing that changes."""

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted."""

    def spelled(self, name: ModelName) -> ModelName:
        """Return a name as it is spelled here, whether there is such a model or not: case tells no models apart.

        Raises: AmbiguousNameError when there are several other spellings.
        """

    def read(self, name: ModelName) -> Manifest:
        """Return the manifest of ``name``, and the bytes it was read from (`Manifest.raw`).

        Raises: NotFoundError; DocumentError when it is no manifest; StorageError; with ``model``.
        """

    def text(self, name: ModelName) -> bytes:
        """Return the bytes of a manifest, not parsed. Raises: NotFoundError; StorageError."""

    def modified(self, name: ModelName) -> datetime | None:
        """Return when the model got its manifest, None where that is not known."""


class Summaries(Protocol):
    """What models are in short, by the sha256 of their manifests, so that a list need not read headers again."""

    def read(self) -> Mapping[str, Summary]:
        """Return what is known."""

    def add(self, summaries: Mapping[str, Summary]) -> None:
        """Remember more. A failure to do so is no error."""


class Home(Protocol):
    """Blobs and manifests in one place."""

    @property
    def summaries(self) -> Summaries | None:
        """What it remembers of its models; None where it remembers nothing."""

    @property
    def address(self) -> str:
        """Where it lies, for messages and journals."""

    @property
    def blobs(self) -> Blobs:
        """Its blobs."""

    @property
    def manifests(self) -> Manifests:
        """Its manifests."""

    def find(self, name: str | ModelName) -> ModelName:
        """Return the name of a model that is there, as the home spells it: case tells no models apart.

        Raises: InvalidNameError; NotFoundError; AmbiguousNameError.
        """

    def target(self, name: str | ModelName) -> ModelName:
        """Return the name that a model is written under: the one of the model that it replaces, where there is one.

        Raises: InvalidNameError; AmbiguousNameError.
        """

    def session(self, source: str = "") -> AbstractContextManager[Session]:
        """Begin to write.

        ``source`` says what is written, to go on with it when the session does not end.
        """

    def lease(self) -> AbstractContextManager[bool]:
        """Keep blobs from being removed while they are read; the value says whether that is so."""

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model, and those of its blobs that no other model needs.

        Raises: NotFoundError; AmbiguousNameError.
        """
