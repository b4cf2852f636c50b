"""The ports of a store: what a home of blobs and manifests does, and the errors all homes share.

A home keeps *blobs*, content by digest that never changes, and *manifests*, names that do. New
content is written to a *session*, and is invisible until it is published: the manifest last.
``store/local/`` is the home in a folder, shared with Ollama; ``store/bucket/`` is one in a bucket;
memory.py is one in memory; layered.py is one over several others. `transfer` copies models between
any two. `blobstore.testing.StoreTests` tests what is documented here.

A home is both a `Readable`, which models are read from, and a `Receiver`, which they are written
to. An archive (archive/) is written once and read afterwards: each half is one of the two only.
`blobstore.testing.ReadingTests` tests a `Readable`.

Some homes can do more: keep signatures, map a file, prune. That is an attribute or method that is
declared here with what most homes have: None, or nothing. So no caller checks the class of a home,
or asks for an attribute that is not declared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.hints import ResultFolder, ShareHints, SummaryHints
from blobstore.store.references import References
from blobstore.store.sessions import (
    Expected as Expected,
    Finished as Finished,
    How as How,
    Intake as Intake,
    KeptSignatures as KeptSignatures,
    Session as Session,
    Signatures as Signatures,
    Spool as Spool,
    SpooledSession as SpooledSession,
    SpoolWriter as SpoolWriter,
    Writer as Writer,
    ambiguous as ambiguous,
    blob_not_found as blob_not_found,
    check_blob_size as check_blob_size,
    check_document_size as check_document_size,
    check_expected as check_expected,
    check_reader_size as check_reader_size,
    check_spelling as check_spelling,
    checked_bytes as checked_bytes,
    checked_pieces as checked_pieces,
    mismatch_error as mismatch_error,
    name_among as name_among,
    of_size as of_size,
    unique as unique,
    wrong_bytes as wrong_bytes,
)

HEAD = 4096
"""Bytes in which the headers of most blobs end."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The blobs that a removal took, those that had to stay, and why."""

    removed: tuple[Descriptor, ...]
    kept: tuple[Descriptor, ...] = ()
    reason: Annotated[str | None, "why they were kept"] = None

    @property
    def removed_bytes(self) -> int:
        """Bytes of the blobs that were removed."""
        return sum(blob.size for blob in self.removed)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blobs that were kept."""
        return sum(blob.size for blob in self.kept)


class Blobs(Protocol):
    """Content by digest. A blob never changes, and is never partly there.

    ``headers_at_once``: requests at once for the headers of blobs on a server.
    """

    headers_at_once: ClassVar[int] = 0

    def open(self, descriptor: Descriptor) -> OpenReader:
        """Return a reader over a blob that has the descriptor's size; its bytes are not checked.

        Raises: NotFoundError when it is missing; CorruptDataError when its size differs; with
        ``blob``.
        """

    def read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a small blob, checked against its digest.

        Raises: as `open`; LimitExceededError for a large one; DigestMismatchError.
        """
        check_document_size(descriptor)
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor.digest)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> Sequence[Header | None]:
        """Return the headers of blobs of tensors, and count them.

        None for each that has to be read from an open blob: homes with `headers_at_once` of 0 read
        no header here.
        """
        if not self.headers_at_once:
            return [None] * len(descriptors)

        def header(descriptor: Descriptor) -> Header | None:
            try:
                with self.open(descriptor) as reader:
                    return header_of(reader, budget, first_nbytes=min(HEAD, reader.size))
            except BlobStoreError:
                return None  # it is read again, which raises the error

        return results_of(list(descriptors), header, self.headers_at_once, name="headers")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those of ``descriptors``, each digest once, without a blob of their size."""

    def digests(self) -> set[str]:
        """Return the digests of all blobs, in hex digits."""


class Manifests(Protocol):
    """Manifests by name: the only thing in a home that changes."""

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted."""

    def stored_name(self, name: ModelName) -> ModelName:
        """Return a name in the home's spelling, whether the model exists or not: case is ignored.

        Raises: AmbiguousNameError if the home has several other spellings.
        """
        return name_among(self.names(), name)

    def read(self, name: ModelName) -> Manifest:
        """Return the manifest of ``name``, and the bytes it was read from (`Manifest.raw`).

        Raises: NotFoundError; DocumentError if it is not valid; StorageError; with ``model``.
        """
        raw = self.text(name)
        try:
            return Manifest.parse(raw, f"the manifest of {name}")
        except BlobStoreError as error:
            raise error.about(model=str(name)) from None

    def text(self, name: ModelName) -> bytes:
        """Return the bytes of a manifest, unparsed. Raises: NotFoundError; StorageError."""

    def texts(self) -> Iterator[tuple[ModelName, bytes | BlobStoreError]]:
        """Yield every name with its bytes, or with the error of reading them."""
        for name in self.names():
            if (text := self.text_or_error(name)) is not None:
                yield name, text

    def text_or_error(self, name: ModelName) -> bytes | BlobStoreError | None:
        """Return the bytes of a manifest, or the error of reading them; None if it is missing."""
        try:
            return self.text(name)
        except NotFoundError:
            return None  # it was removed after the names were read
        except BlobStoreError as error:
            return error.without_traceback()

    def modified_at(self, name: ModelName) -> datetime | None:  # noqa: ARG002
        """Return when the manifest was written, None if that is unknown."""
        return None  # else mypy takes it for abstract


class OtherModels(Protocol):
    """Models of a home that other programs read, too."""

    def names(self) -> list[ModelName]:
        """Return their names. Raises: StorageError."""

    def has(self, name: ModelName) -> bool:
        """Return True if one has the name. Raises: StorageError."""


class Readable:
    """Models that can be read, in one place. What a home lacks is None, or empty, as here.

    ``address``: where it is, for messages. ``root``: the folder of a home in a folder. ``packed``:
    models whose blobs are kept compressed. ``lower``: homes below this one
    (layered.py), which are only read. ``shares``: the registries that have its models.
    ``has_cache``: whether `prefetch` brings blobs near. ``open_blobs_stay``: whether open blobs can
    be read on without a lease. ``newer``: the models that only newer Ollamas read.
    """

    address: str
    blobs: Blobs
    manifests: Manifests
    root: Path | None = None
    packed: Readable | None = None
    lower: Sequence[Readable] = ()
    signatures: Signatures | None = None
    summaries: SummaryHints | None = None
    results: ResultFolder | None = None
    shares: ShareHints | None = None
    has_cache: bool = False
    open_blobs_stay: bool = False
    newer: OtherModels | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    @property
    def upper(self) -> Readable:
        """The home without those below it."""
        return self

    def find(self, name: str | ModelName) -> ModelName:
        """Return the name of an existing model, as the home spells it: case is ignored.

        Raises: InvalidNameError; NotFoundError; AmbiguousNameError.
        """
        stored = self.manifests.stored_name(ModelName.of(name))
        self.manifests.text(stored)
        return stored

    def whole(self, name: str | ModelName) -> ModelName:
        """Return the name of an existing model, whose blobs can be read in place from now on.

        Raises: as `find`.
        """
        return self.find(name)

    def holder(self, name: str | ModelName) -> Readable:
        """Return this home, or its packed models if they have the model. Raises: as `find`."""
        try:
            self.find(name)
        except ModelNotFoundError:
            with suppress(ModelNotFoundError):
                if self.packed is not None:
                    self.packed.find(name)
                    return self.packed
            raise
        return self

    def home_of(self, name: str | ModelName) -> Readable:
        """Return the home that a model is read from. Raises: as `find`."""
        self.find(name)
        return self

    def lease(self) -> AbstractContextManager[bool]:
        """Keep blobs from being removed while they are read; yield whether the home can do that."""
        return nullcontext(self.open_blobs_stay)

    def prefetch(self, descriptors: Iterable[Descriptor]) -> None:
        """Fetch blobs into the home's cache, in the given order; without a cache, do nothing.

        Raises: NotFoundError, CorruptDataError for a blob; LimitExceededError for a cache that is
        too small; StorageError.
        """

    def care(self) -> Care:
        """Return what `verify`, `prune` and `measure_usage` ask of the home."""
        return Care(self)


class Receiver(Protocol):
    """A place that `transfer` writes models to."""

    @property
    def signatures(self) -> Signatures | None:
        """The signatures of its models; None if it does not keep them."""

    def target(self, name: str | ModelName) -> ModelName:
        """Return the name to write a model under: that of the model that it replaces, if any.

        Raises: InvalidNameError; AmbiguousNameError.
        """

    def session(self, *, name: ModelName | None = None) -> AbstractContextManager[Intake]:
        """Begin to write.

        ``name``: the model that will be published, if that is known. A home that keeps the blobs of
        models apart writes them to their place at once.
        """


class Home(Readable):
    """Blobs and manifests in one place: a `Readable` and a `Receiver`."""

    @property
    def upper(self) -> Home:
        return self

    def target(self, name: str | ModelName) -> ModelName:
        """Return the name to write a model under: that of the model that it replaces, if any."""
        return self.manifests.stored_name(ModelName.of(name))

    def session(self, *, name: ModelName | None = None) -> AbstractContextManager[Session]:
        """Begin to write; ``name``: the model that will be published, if that is known."""
        raise NotImplementedError

    def remove(self, name: str | ModelName) -> Removal:
        """Remove a model, and those of its blobs that no other model needs.

        Raises: NotFoundError; AmbiguousNameError.
        """
        raise NotImplementedError

    def copy(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool = False
    ) -> ModelName:
        """Give a model a second name, and return it as the home spells it; no blob is copied.

        Raises: as `find` and `Session.publish`; UsageError for its own name in another case, if
        another model has the name, unless ``replace``, or if a packed model would replace another.
        """
        return self._give_name(source, target, replace=replace, moves=False)

    def move(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool = False
    ) -> ModelName:
        """Rename a model, and return its new name as the home spells it.

        The new name is durable before the old one is removed. A crash in between leaves both, and
        the same call completes it. Raises: as `copy`; a model keeps its own name without an error.
        """
        return self._give_name(source, target, replace=replace, moves=True)

    def _give_name(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool, moves: bool
    ) -> ModelName:
        source, target = ModelName.of(source), ModelName.of(target)
        old, new = self.find(source), self.target(target)
        manifest = self.manifests.read(old)
        if old == new and self.home_of(old) is self.upper:
            if source.path_parts != target.path_parts:
                message = f"{target} is {old}: names that differ only in case are one model"
                hint = "To change the case, move it to another name first."
                raise UsageError(message, model=str(old), hint=hint)
            if moves:
                return new
        with self.session() as session:
            publish_named(session, new, manifest, replace=replace)
        if moves:
            self._drop_name(old, manifest)
        return new

    def _drop_name(self, name: ModelName, manifest: Manifest) -> None:
        """Remove a name whose model has another one now, unless a writer gave it a new model."""
        if id_of(self, name) == manifest.digest:
            self.remove(name)


@dataclass(frozen=True, slots=True)
class BlobState:
    """The bytes of a blob, the time of its last write (POSIX seconds), and its file or key."""

    size: int
    modified: float
    path: Path


@dataclass(frozen=True, slots=True)
class Leftover:
    """Our own file, folder or object that is no longer needed, its bytes, and the reason."""

    KEYS = ("path", "size=nbytes", "reason")

    path: Path
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class OddFile:
    """A file or folder, and why it is odd."""

    path: Path
    reason: str


class Care:
    """What `verify`, `prune` and `measure_usage` (care/) ask of a home.

    This one asks its blobs and manifests only. Homes with locks, a trash or files of their own
    have their own one. Blobs are given by their hex digits: there may be 600,000 of them.

    ``at_once``: how many blobs are read at once by default, each by one request; None: several by a
    core. ``grace``: why a short grace time is refused, and the hint. ``refusal_hint``: why models
    may seem to be lost; ``{}`` is the place. ``exists``: False if there is nothing to lock or to
    remove. ``blobs_place``, ``manifests_place``: where they are, for messages.
    """

    can_prune = False
    at_once: int | None = None
    grace = (
        "a grace time under 1 h may take blobs that wait for a commit",
        "If no worker's blobs wait for a commit, confirm it: `sole_owner=True`.",
    )
    refusal_hint = "Is the address right? To give up all models, prune with `forget=True`."
    exists = True

    def __init__(self, home: Readable) -> None:
        self.home = home
        self.blobs_place = self.manifests_place = home.address

    @property
    def packed(self) -> Care | None:
        return None if self.home.packed is None else self.home.packed.care()

    # Verify

    def require(self) -> None:
        """Raise NotFoundError if the home is not there: then nothing would be checked."""

    def digests(self) -> AbstractSet[str]:
        return self.home.blobs.digests()

    def digests_in_folder(self) -> AbstractSet[str]:
        """Return all that have names of blobs, and should be blobs."""
        return self.digests()

    def open(self, digest: str, size: int | None) -> OpenReader:
        """Return a reader of a blob, whatever its size is; ``size``: that in a manifest.

        Raises: NotFoundError; CorruptDataError; StorageError.
        """
        if size is None:
            raise blob_not_found(Digest(digest))
        return self.home.blobs.open(Descriptor(media_type="", digest=Digest(digest), size=size))

    def copies(self, name: ModelName) -> Sequence[bytes]:  # noqa: ARG002  # most keep none
        """Return copies of a model's manifests, which were made when they were written."""
        return ()

    def place(self, digest: str) -> Path:
        return Path(Digest(digest).file_name)

    def oddities(self) -> Iterator[OddFile]:
        """Yield what is not part of the home, or should not be as it is. Raises: StorageError."""
        return iter(())

    # Usage

    def references(self, known: References | None = None) -> References:
        """Return which blobs the manifests name; manifests that ``known`` has are not parsed again.

        Raises: StorageError if they can't be listed.
        """
        return References.read(self.home.manifests.texts(), (), (), known)

    def states(self, digests: Iterable[str]) -> Mapping[str, BlobState]:  # noqa: ARG002  # see below
        """Return the states of those blobs that are there; none if the home can't tell."""
        return {}

    def files_nbytes(self) -> int:
        return 0

    def trash_nbytes(self) -> int:
        return 0

    # Prune

    def alone(self, wait_s: float, *, sole_owner: bool) -> AbstractContextManager[None]:
        """Keep others from writing. Raises: BusyError after ``wait_s`` seconds; StorageError."""
        raise NotImplementedError

    def now(self) -> float:
        """Return the time of the home's clock, in POSIX seconds."""
        return time.time()

    def obstacle(
        self,
        references: References,
        unneeded: AbstractSet[str],  # noqa: ARG002  # for homes with copies of manifests
        removed: int,
        *,
        forget: bool,
    ) -> BlobStoreError | None:
        """Return why nothing may be removed, None if it may.

        ``unneeded``: the blobs that no manifest names; ``removed``: how many are old enough.
        """
        if not removed or forget or references.models or references.newer:
            return None
        message = f"no model has a manifest, and {removed:,} blobs would be removed"
        return self.refusal(self.manifests_place, message)

    def refusal(self, place: str, message: str) -> StorageError:
        hint = self.refusal_hint.format(place)
        return StorageError(f"{place}: {message}", path=place, hint=hint)

    def rest(
        self,
        references: References,  # noqa: ARG002  # for homes with files of their own
        spared: AbstractSet[str],  # noqa: ARG002
        grace_s: float,  # noqa: ARG002
    ) -> tuple[Sequence[Leftover], Sequence[ModelName]]:
        """Return our own files that are of no use, and the missing models to forget.

        ``spared``: the unneeded blobs that are too young to go.
        """
        return (), ()

    def remove(
        self,
        blobs: Sequence[Path],
        leftovers: Sequence[Leftover],
        forgotten: Sequence[ModelName],
        references: References,
    ) -> int:
        """Carry out a decision, inside `alone`. Return the bytes of the former trash, now gone."""
        raise NotImplementedError

    def undo(
        self,
        wait_s: float,  # noqa: ARG002  # for homes with a trash
    ) -> tuple[list[tuple[Digest, int]], list[tuple[Digest, int]], list[ModelName]]:
        """Restore the trash; return the blobs that are back and those that are not, with sizes.

        And the models that lack only their manifest. Raises: NotFoundError if the trash is empty;
        UsageError for a home without a trash; BusyError; StorageError.
        """
        raise UsageError(f"{self.home.address} has no trash")


def all_names(home: Readable) -> list[ModelName]:
    """Return the names of all models, packed ones too."""
    packed = home.packed.manifests.names() if home.packed is not None else []
    return list(dict.fromkeys([*home.manifests.names(), *packed]))


def id_of(home: Readable, name: ModelName) -> Digest | None:
    """Return a model's ID; None if there is no such model, or its manifest can't be read."""
    text = home.manifests.text_or_error(name)
    return Digest.of(text) if isinstance(text, bytes) else None


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
