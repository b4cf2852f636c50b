"""The ports of a store: what a home of blobs and manifests does, and the errors all homes share.

A home keeps *blobs*, content by digest that never changes, and *manifests*, names that do. New
content is written to a *session*, and is invisible until it is published: the manifest last.
``store/local/`` is the home in a folder, shared with Ollama; ``store/bucket/`` is one in a bucket;
memory.py is one in memory; layered.py is one over several others. `transfer` copies models between
any two. `blobstore.testing.StoreTests` tests what is documented here.

A home is both a `Readable`, which models are read from, and a `Receiver`, which they are written
to. An archive (archive/) is written once and read afterwards: each half is one of the two only.
`blobstore.testing.ReadingTests` tests a `Readable`.

Some homes can do more: find what an earlier session made, map a file. That is an attribute that is
None elsewhere, or a method of what they return (`io.ranges.RangeReader`). No caller checks the
class of a home.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
    NotFoundError,
    UsageError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor, Manifest
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.sessions import (
    ContinuedWriter as ContinuedWriter,
    Earlier as Earlier,
    Expected as Expected,
    Finished as Finished,
    How as How,
    Intake as Intake,
    Session as Session,
    Unfinished as Unfinished,
    Writer as Writer,
)
from blobstore.store.signature_port import Signatures

_Reader = TypeVar("_Reader", bound=OpenReader)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list shows of a model.

    ``is_plain``: its manifest is formatted as Ollama formats them (local/references.py).
    """

    size: int
    parameters: int
    quant_type: str
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """The blobs that a removal took, those that had to stay, and why."""

    removed: tuple[Descriptor, ...]
    kept: tuple[Descriptor, ...] = ()
    reason: str | None = None


class Blobs(Protocol):
    """Content by digest. A blob never changes, and is never partly there."""

    def open(self, descriptor: Descriptor) -> OpenReader:
        """Return a reader over a blob that has the descriptor's size; its bytes are not checked.

        Raises: NotFoundError when it is missing; CorruptDataError when its size differs; with
        ``blob``.
        """

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob, checked against its digest.

        Raises: as `open`; LimitExceededError for a large one; DigestMismatchError.
        """

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> Sequence[Header | None]:
        """Return the headers of blobs of tensors, and count them.

        None for each that has to be read from an open blob: many homes read no header here.
        """

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those of ``descriptors``, each digest once, without a blob of their size."""

    def digests(self) -> set[str]:
        """Return the digests of all blobs, in hex digits."""

    def sequence(self, descriptors: Sequence[Descriptor]) -> Sequence[Descriptor] | None:
        """Return the blobs in the order in which they have to be opened and read, one at a time.

        None if any number can be read at once, in any order.
        """


class Manifests(Protocol):
    """Manifests by name: the only thing in a home that changes."""

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted."""

    def spelled(self, name: ModelName) -> ModelName:
        """Return a name in the home's spelling, whether the model exists or not: case is ignored.

        Raises: AmbiguousNameError if the home has several other spellings.
        """

    def read(self, name: ModelName) -> Manifest:
        """Return the manifest of ``name``, and the bytes it was read from (`Manifest.raw`).

        Raises: NotFoundError; DocumentError if it is not valid; StorageError; with ``model``.
        """

    def text(self, name: ModelName) -> bytes:
        """Return the bytes of a manifest, unparsed. Raises: NotFoundError; StorageError."""

    def modified(self, name: ModelName) -> datetime | None:
        """Return when the manifest was written, None if that is unknown."""


class Summaries(Protocol):
    """Summaries of models by the sha256 of their manifests: a list need not read headers again."""

    def read(self) -> Mapping[str, Summary]:
        """Return all summaries."""

    def add(self, summaries: Mapping[str, Summary]) -> None:
        """Add summaries. Failures are ignored."""


@dataclass(frozen=True, slots=True)
class Share:
    """A repository of the registry at ``host`` that has the model of the manifest."""

    host: str
    repository: str
    manifest: Digest


class Shares(Protocol):
    """Which registries have models of a home, as far as that was noted."""

    def read(self) -> Collection[Share]:
        """Return all that are noted."""

    def add(self, share: Share) -> None:
        """Note one. Failures are ignored."""


class Readable(Protocol):
    """Models that can be read, in one place."""

    @property
    def shares(self) -> Shares | None:
        """The registries that have its models; None if the home does not note them."""

    @property
    def summaries(self) -> Summaries | None:
        """The summaries of its models; None if the home does not keep them."""

    @property
    def signatures(self) -> Signatures | None:
        """The signatures of its models; None if the home does not keep them."""

    @property
    def address(self) -> str:
        """Where it is, for messages and journals."""

    @property
    def blobs(self) -> Blobs:
        """Its blobs."""

    @property
    def manifests(self) -> Manifests:
        """Its manifests."""

    def find(self, name: str | ModelName) -> ModelName:
        """Return the name of an existing model, as the home spells it: case is ignored.

        Raises: InvalidNameError; NotFoundError; AmbiguousNameError.
        """

    def lease(self) -> AbstractContextManager[bool]:
        """Keep blobs from being removed while they are read; yield whether the home can do that."""


class Receiver(Protocol):
    """A place that `transfer` writes models to."""

    @property
    def signatures(self) -> Signatures | None:
        """The signatures of its models; None if it does not keep them."""

    def target(self, name: str | ModelName) -> ModelName:
        """Return the name to write a model under: that of the model that it replaces, if any.

        Raises: InvalidNameError; AmbiguousNameError.
        """

    def session(
        self, source: str = "", name: ModelName | None = None
    ) -> AbstractContextManager[Intake]:
        """Begin to write.

        ``source`` names what is written, so that a later session can continue a killed one.
        ``name``: the model that will be published, if that is known. A home that keeps the blobs of
        models apart writes them to their place at once.
        """


class Home(Readable, Receiver, Protocol):
    """Blobs and manifests in one place."""

    def session(
        self, source: str = "", name: ModelName | None = None
    ) -> AbstractContextManager[Session]:
        """Begin to write. See `Receiver.session`."""

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model, and those of its blobs and signatures that no other model needs.

        Raises: NotFoundError; AmbiguousNameError.
        """


def unique(descriptors: Iterable[Descriptor]) -> list[Descriptor]:
    """Return the descriptors, one for each digest."""
    return list({descriptor.digest: descriptor for descriptor in descriptors}.values())


def blob_not_found(digest: Digest, path: str | None = None) -> NotFoundError:
    """Return the error for a blob that does not exist."""
    return NotFoundError(f"blob {digest} is missing", blob=str(digest), path=path)


def check_blob_size(descriptor: Descriptor, nbytes: int, path: str | None = None) -> None:
    """Raise CorruptDataError unless the blob has the descriptor's size."""
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


def check_document_size(descriptor: Descriptor, limit: int = MAX_DOCUMENT) -> None:
    """Raise LimitExceededError for a document that is larger than ``limit`` bytes."""
    if descriptor.size > limit:
        message = (
            f"limit exceeded: blob {descriptor.digest} has {descriptor.size:,} bytes,"
            f" at most {limit:,} for a document"
        )
        raise LimitExceededError(message, blob=str(descriptor.digest))


def checked_bytes(data: bytes, descriptor: Descriptor) -> bytes:
    """Return ``data``. Raises: DigestMismatchError if they are not the descriptor's bytes."""
    if Digest.of(data) != descriptor.digest:
        message = f"blob {descriptor.digest} is damaged: its bytes do not match its digest"
        raise DigestMismatchError(message, blob=str(descriptor.digest))
    return data


def check_reader_size(descriptor: Descriptor, reader: OpenReader) -> None:
    """Raise CorruptDataError unless a reader of another home's blob has the descriptor's size."""
    if reader.size != descriptor.size:
        message = (
            f"{reader.name} has {reader.size:,} bytes, and {descriptor.digest} {descriptor.size:,}"
        )
        raise CorruptDataError(message, blob=str(descriptor.digest), path=reader.name)


def wrong_bytes(descriptor: Descriptor, reader: OpenReader) -> DigestMismatchError:
    """Return the error for a reader whose bytes do not match the descriptor."""
    message = f"{reader.name}: its bytes are not those of {descriptor.digest}"
    return DigestMismatchError(message, blob=str(descriptor.digest), path=reader.name)


def ambiguous(name: ModelName, found: Iterable[ModelName]) -> AmbiguousNameError:
    """Return the error for a name that a home has in several other spellings."""
    message = f"{str(name)!r} may be {' or '.join(map(str, found))}: they differ only in case"
    return AmbiguousNameError(message, model=str(name), hint="Spell it as one of them.")


def spelled_among(names: Iterable[ModelName], name: ModelName) -> ModelName:
    """Return a name in the spelling that ``names`` have, itself if they don't: case is ignored.

    Raises: AmbiguousNameError if there are several other spellings.
    """
    found = sorted(other for other in names if other.folded == name.folded)
    if name in found:
        return name
    if len(found) > 1:
        raise ambiguous(name, found)
    return found[0] if found else name


def other_spelling(name: ModelName, spelled: ModelName) -> UsageError:
    """Return the error for publishing a name that the home has in another case."""
    message = f"there is a model {spelled}, and {name} differs from it only in case"
    return UsageError(message, model=str(spelled), hint=f"Try again: it will be {spelled}.")


def check_expected(name: ModelName, raw: bytes | None, expected: Expected) -> None:
    """Raise ConflictError unless ``raw``, the manifest of the name, is an expected one."""
    if expected is not None and raw not in expected:
        message = f"another process changed {name} meanwhile"
        raise ConflictError(message, model=str(name), hint="Check the model, and try again.")


def id_of(home: Readable, name: ModelName) -> Digest | None:
    """Return a model's ID; None if there is no such model, or its manifest can't be read."""
    try:
        return Digest.of(home.manifests.text(name))
    except BlobStoreError:
        return None


def replaced_id(before: Digest | None, now: Digest) -> Digest | None:
    """Return the ID of the model that ``now`` replaced; None if that is the same, or missing."""
    return before if before != now else None


def already_exists(name: ModelName) -> UsageError:
    """Return the error for a name that another model has."""
    hint = "Remove it first, or replace it: `replace=True`."
    return UsageError(f"model {name} already exists", model=str(name), hint=hint)


def publish_named(session: Session, new: ModelName, manifest: Manifest, *, replace: bool) -> None:
    """Publish a model under another name.

    Raises: as `Session.publish`; UsageError if another model has the name, unless ``replace``.
    """
    try:
        session.publish(new, manifest, expected=None if replace else (None, manifest.raw))
    except ConflictError as error:
        raise already_exists(new) from error
