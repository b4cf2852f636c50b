"""An archive that is read: the models of a file or of a pipe, without unpacking them.

The index, the manifests and the headers of all files are read and checked when a file is opened.
Blobs are read in place. A plain file's can be mapped, so its weights are not copied.

From a pipe, files are read as they come: the index has to come first, then the manifests, then the
blobs in the order of the index, as `save_models` writes them. The end of the archive is checked
before the last blob of its last model is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Self

from blobstore.errors import CorruptDataError, ModelNotFoundError, UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.oci import (
    INDEX_PATH,
    LAYOUT_PATH,
    MAX_INDEX,
    OciDescriptor,
    blob_path,
    check_layout,
    parse_index,
)
from blobstore.formats.strictjson import check_limit
from blobstore.formats.tar import Member
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.archive.tar_contents import (
    Contents,
    Members,
    Range,
    contents_of,
    contents_of_pipe,
)
from blobstore.store.ports import (
    Blobs,
    Manifests,
    Readable,
    blob_not_found,
    check_blob_size,
    check_document_size,
    checked_bytes,
    spelled_among,
    unique,
)

_PREFIX = blob_path(Digest("0" * 64))[:-64]


class _Blobs(Blobs):
    """The blobs of an archive. See `Blobs`."""

    def __init__(self, contents: Contents, members: Members) -> None:
        self._contents = contents
        self._members = members
        self._order: dict[Digest, int] = {}
        """Where a pipe has each blob, known when its manifests are."""

    def follow(self, descriptors: Iterable[Descriptor]) -> None:
        """Read the blobs of a pipe in this order, the one in which it has them."""
        self._order = {blob.digest: rank for rank, blob in enumerate(unique(descriptors))}

    def open(self, descriptor: Descriptor) -> OpenReader:
        member = self._members.find(blob_path(descriptor.digest))
        if member is None:
            raise blob_not_found(descriptor.digest, self._contents.name)
        check_blob_size(descriptor, member.size, self._contents.name)
        name = f"blob {descriptor.digest} of {self._contents.name}"
        rank = self._order.get(descriptor.digest)
        if rank is not None and rank == len(self._order) - 1:
            # The last blob of a pipe: the archive's end is checked before its last byte is given.
            return Range(self._contents, member.offset, member.size, name, self._members.all)
        return Range(self._contents, member.offset, member.size, name)

    def read(self, descriptor: Descriptor) -> bytes:
        check_document_size(descriptor)
        return self.read_whole(descriptor)

    def read_whole(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a blob, checked against its digest. Raises: as `read`."""
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        found = ((blob, self._members.find(blob_path(blob.digest))) for blob in unique(descriptors))
        return [blob for blob, member in found if member is None or member.size != blob.size]

    def digests(self) -> set[str]:
        length = len(_PREFIX) + 64
        paths = [path for path in self._members.all() if len(path) == length]
        return {path.removeprefix(_PREFIX) for path in paths if path.startswith(_PREFIX)}

    def sequence(self, descriptors: Sequence[Descriptor]) -> Sequence[Descriptor] | None:
        if not self._contents.in_sequence:
            return None
        if self._contents.is_pipe:
            return sorted(descriptors, key=lambda blob: self._order.get(blob.digest, -1))
        found = {blob.digest: self._members.find(blob_path(blob.digest)) for blob in descriptors}
        return sorted(descriptors, key=lambda blob: _offset(found[blob.digest]))


def _offset(member: Member | None) -> int:
    return -1 if member is None else member.offset  # a missing blob is an error at once


class FixedManifests(Manifests):
    """Manifests that are all known, of the home called ``what``. See `Manifests`."""

    def __init__(self, what: str, manifests: dict[ModelName, bytes]) -> None:
        self._what = what
        self._raw = manifests
        self._spellings: dict[tuple[str, ...], list[ModelName]] = {}
        for name in manifests:
            self._spellings.setdefault(name.folded, []).append(name)

    def names(self) -> list[ModelName]:
        return sorted(self._raw)

    def in_order(self) -> list[ModelName]:
        """Return the names in the order of the index."""
        return list(self._raw)

    def spelled(self, name: ModelName) -> ModelName:
        return spelled_among(self._spellings.get(name.folded, ()), name)

    def read(self, name: ModelName) -> Manifest:
        return Manifest.parse(self.text(name), f"{self._what}: the manifest of {name}")

    def text(self, name: ModelName) -> bytes:
        if name not in self._raw:
            message = f"{self._what} has no model {str(name)!r}"
            names = ", ".join(map(str, self.names()[:8]))
            hint = f"It has {names}." if names else "Its models have no names."
            raise ModelNotFoundError(message, model=str(name), hint=hint)
        return self._raw[name]


class Archive(Readable):
    """The models of an archive, to be read. See `Readable`. A context manager.

    ``name``: that of the archive's only model, which then needs none in the index.
    """

    blobs: _Blobs
    manifests: FixedManifests

    def __init__(self, contents: Contents, name: ModelName | None = None) -> None:
        """Raises: as `open_archive`."""
        self.address = contents.name
        self._contents = contents
        self._members = Members(contents)
        self.blobs = _Blobs(contents, self._members)
        if not contents.is_pipe:
            self._members.all()
        check_layout(self._document(LAYOUT_PATH), f"{LAYOUT_PATH} of {self.address}")
        index = parse_index(self._document(INDEX_PATH), f"{INDEX_PATH} of {self.address}")
        raw = self._manifests_of(index)
        named = [(one.model, raw[one.digest]) for one in index if one.model is not None]
        self.unnamed = tuple(one.digest for one in index if one.model is None)
        """Manifests without a name, which can only be loaded under a given one."""
        if name is not None:
            if len(raw) != 1:
                message = f"{self.address} has {len(raw):,} models: a name is for one only"
                raise UsageError(message, hint="Choose models by their own names.")
            named = [(name, text) for text in raw.values()]
            self.unnamed = ()
        self.manifests = FixedManifests(self.address, dict(named))
        if contents.is_pipe:
            whole = (Manifest.parse(text, self.address) for text in raw.values())
            self.blobs.follow(blob for manifest in whole for blob in manifest.descriptors)

    def _document(self, path: str) -> bytes:
        member = self._members.find(path)
        if member is None:
            message = f"{self.address}: not a valid archive: it has no {path} (rule A2)"
            raise CorruptDataError(message, rule="A2", path=self.address)
        check_limit(f"{path} of {self.address}", member.size, "bytes", MAX_INDEX, "A2")
        with Range(self._contents, member.offset, member.size, path) as reader:
            return reader.read(0, member.size)

    def _manifests_of(self, entries: Sequence[OciDescriptor]) -> dict[Digest, bytes]:
        """Return the bytes of all manifests, by their digests in the order of the index."""
        blobs = unique(entries)
        raw = {
            blob.digest: self.blobs.read_whole(blob) for blob in self.blobs.sequence(blobs) or blobs
        }
        return {blob.digest: raw[blob.digest] for blob in blobs}

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """See `Readable`: an archive is not changed in place."""
        yield True

    def finish(self) -> None:
        """Read a pipe to the end of the archive, and check it; its writer can end then.

        Raises: CorruptDataError.
        """
        self._members.all()

    def close(self) -> None:
        """Close the file. Arrays of models that were opened stay valid."""
        self._contents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_archive(
    source: str | os.PathLike[str] | BinaryIO, *, name: str | ModelName | None = None
) -> Archive:
    """Return the models of an archive: of a file, or of a pipe that is open for reading.

    An archive is an OCI image layout in a tar, plain or compressed by zstandard or gzip.
    ``transfer`` copies its models to a store, and `open_model` takes it as a store. ``name``: the
    name for the archive's only model, whatever its index calls it.

    Raises: NotFoundError; CorruptDataError (rules A1 to A3), DocumentError (A2, M1),
    DigestMismatchError for a manifest; LimitExceededError; UsageError for a pipe whose files come
    in another order, or for a ``name`` if there are several models; StorageError.
    """
    given = None if name is None else ModelName.of(name)
    if isinstance(source, str | os.PathLike):
        contents = contents_of(source)
    else:
        contents = contents_of_pipe(source, f"the pipe {source.name}")
    try:
        return Archive(contents, given)
    except BaseException:
        contents.close()
        raise
