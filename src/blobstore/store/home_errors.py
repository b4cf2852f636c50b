"""Checks that all homes share, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

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
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.sessions import Expected

_Reader = TypeVar("_Reader", bound=OpenReader)


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
