"""Packing: a model's blobs are kept compressed in the same store, and restored.

`pack` writes packed files, each of which is decoded once and made durable; then the packed model's
manifest takes the place of the whole one's, and last the blobs that no other model needs are
removed. `unpack` goes the other way, through a session of the store: every blob is checked against
its digest, and the model is published before its packed files are removed. So a model is at any
moment whole or packed. A killed run continues with the packed files, or blobs, that were finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore import hashing
from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    ModelNotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import allow_open_files
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import Progress, begun, each, threads
from blobstore.names import ModelName
from blobstore.store.holders import holder_of
from blobstore.store.local.store import Store
from blobstore.store.packed.cuts import BasePlace, BaseTensor, Cut, cuts_of
from blobstore.store.packed.encoding import write_packed
from blobstore.store.ports import Readable, Removal, unique
from blobstore.store.transfer import kept_for_the_next

SMALL = 2**16
"""Blobs below so many bytes share packed files: a file of its own would take whole pages, and most
of the time of packing one would be that of making a file (docs/performance.md)."""
_TOGETHER = 2**25
"""Bytes of the small blobs of one packed file."""
_MOST_TOGETHER = 4096


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that is packed now.

    ``nbytes``: bytes of its blobs; ``stored``: of their packed form; ``base_stored``: of the base
    model's blobs that are kept packed for it. ``removal``: which of its blobs were removed.
    """

    name: ModelName
    blobs: int
    nbytes: int
    stored: int
    base_stored: int
    removal: Removal


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """A model that is whole now: how many blobs, and bytes, were unpacked."""

    name: ModelName
    blobs: int
    nbytes: int


def unpacked(name: str | ModelName, home: Readable) -> ModelName:
    """Return the name of a model that ``home`` has, after unpacking it if it is packed.

    Raises: as `Home.find` and `unpack`.
    """
    try:
        return home.find(name)
    except ModelNotFoundError:
        if holder_of(name, home) is home:
            raise
    upper: Any = home.upper
    return unpack(upper, name).name


def pack(
    store: Store,
    name: str | ModelName,
    *,
    base: str | ModelName | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PackedModel:
    """Keep a model's blobs compressed, and remove the plain ones that no other model needs.

    ``base``: a model that this one was made from, whole or packed; tensors of the same name, shape
    and dtype are stored as their difference where that is smaller. The blobs of the base that are
    needed for it are kept packed until no packed model needs them, whatever becomes of the base.
    ``jobs``: threads (None: one a core). ``progress`` is called with the bytes of each blob. A
    packed model stays as it is.

    Raises: NotFoundError for a missing model or blob; UsageError for a base that is the model
    itself, or is packed against another base; DigestMismatchError for a damaged blob; ConflictError
    if the model was changed meanwhile; BusyError; StorageError. The store is unchanged then.
    """
    if store.is_packed(name):
        full = store.packed.find(name)
        manifest = store.packed.manifests.read(full)
        store.copies.remove(full)  # a run that was killed may have left it
    else:
        full = store.find(name)
        with store.packing() as folder, _nothing_left(store):
            manifest = store.manifests.read(full)
            _Packing(store, folder, threads(jobs), progress).run(full, manifest, base)
            store.become_packed(full, manifest, folder)
            store.packed.remove_unneeded()
    removal = store.remove_orphans(full, manifest.descriptors)
    return _result(store, full, manifest, removal)


def _result(store: Store, name: ModelName, manifest: Manifest, removal: Removal) -> PackedModel:
    own = {blob.digest.hex for blob in manifest.descriptors}
    stored = store.packed.blobs.stored(own)
    bases = {base.hex for blob in stored.values() for base in blob.bases} - own
    return PackedModel(
        name=name,
        blobs=len(own),
        nbytes=manifest.size,
        stored=sum(blob.nbytes for blob in stored.values()),
        base_stored=sum(blob.nbytes for blob in store.packed.blobs.stored(bases).values()),
        removal=removal,
    )


@contextmanager
def _nothing_left(store: Store) -> Iterator[None]:
    """Remove the packed files of a run that fails because of the disk; it may be full.

    After other errors they are kept for the next run.
    """
    try:
        yield
    except StorageError:
        store.packed.remove_unneeded()
        raise


@dataclass(frozen=True, slots=True)
class _Packing:
    """Makes the packed files of one model, each by one thread."""

    store: Store
    folder: Path
    jobs: int
    progress: Progress | None

    def run(self, name: ModelName, manifest: Manifest, base: str | ModelName | None) -> None:
        """Pack the blobs of ``manifest`` that are not packed yet, and those of the base first."""
        missing = self._missing(manifest.descriptors)
        bases = {} if base is None else self._bases(name, base, missing)
        self._write(self.store, missing, bases)

    def _missing(self, blobs: Sequence[Descriptor]) -> list[Descriptor]:
        """Return the blobs that are not packed yet; those that are get decoded and hashed.

        Their plain forms may be the last sound ones. Raises: as `PackedBlobs.check`.
        """
        packed = self.store.packed.blobs
        missing = packed.missing(blobs)
        there = [blob for blob in unique(blobs) if blob not in missing]
        each(there, packed.check, max(1, min(self.jobs, len(there))), name="pack")
        return missing

    def _bases(
        self, name: ModelName, base: str | ModelName, missing: Sequence[Descriptor]
    ) -> dict[str, BaseTensor]:
        """Return the tensors of the base that may resemble ours, in blobs that are packed."""
        home = holder_of(base, self.store)
        full = home.find(base)
        if full == name:
            raise UsageError(f"model {name} can't be its own base", model=str(name))
        names = {blob.name for blob in missing if blob.size >= SMALL}
        layers = unique(
            layer
            for layer in home.manifests.read(full).tensor_layers
            if layer.size >= SMALL and layer.name in names
        )
        self._write(home, self._missing(layers), {})
        self._refuse_chain(full, layers)
        return dict(tensor for layer in layers for tensor in self._tensors(layer))

    def _refuse_chain(self, base: ModelName, layers: Sequence[Descriptor]) -> None:
        stored = self.store.packed.blobs.stored(layer.digest.hex for layer in layers)
        if any(blob.bases for blob in stored.values()):
            message = f"{base} is itself packed against another model, and can't be a base"
            hint = "Pack against that model, or without a base."
            raise UsageError(message, model=str(base), hint=hint)

    def _tensors(self, layer: Descriptor) -> Iterator[tuple[str, BaseTensor]]:
        with self.store.packed.blobs.open(layer) as reader:
            header = _header(layer, reader)
        if header is None:
            return
        for name, entry in header.tensors.items():
            place = BasePlace(layer.digest, layer.size, header.data_start + entry.begin)
            yield name, BaseTensor(entry.dtype, entry.shape, place)

    def _write(
        self,
        home: Readable,
        blobs: Sequence[Descriptor],
        bases: Mapping[str, BaseTensor],
    ) -> None:
        """Make packed files of blobs of ``home``. Each is durable when it is visible."""
        told = begun(self.progress, sum(blob.size for blob in blobs))
        packed = self.store.packed.blobs

        def cut_blob(blob: Descriptor, reader: OpenReader) -> list[Cut]:
            return cuts_of(_header(blob, reader), blob.size, bases if blob.size >= SMALL else {})

        def write(group: Sequence[Descriptor]) -> None:
            path = self.folder / f"packed-{group[0].digest.hex}"
            index = write_packed(path, group, home.blobs.open, cut_blob, packed.open_base, told)
            packed.add(path, index.blobs)

        groups = list(grouped(blobs))
        each(groups, write, max(1, min(self.jobs, len(groups))), name="pack")
        packed.settle()


def grouped(blobs: Sequence[Descriptor]) -> Iterator[list[Descriptor]]:
    """Yield the blobs of each packed file: large ones alone and first, small ones together."""
    yield from ([blob] for blob in blobs if blob.size >= SMALL)
    group: list[Descriptor] = []
    nbytes = 0
    for blob in blobs:
        if blob.size >= SMALL:
            continue
        if len(group) == _MOST_TOGETHER or nbytes + blob.size > _TOGETHER:
            yield group
            group, nbytes = [], 0
        group.append(blob)
        nbytes += blob.size
    if group:
        yield group


def _header(blob: Descriptor, reader: OpenReader) -> Header | None:
    """Return the header of a tensor blob, None for any other, and for one without a valid header.

    Such a blob is packed as text. Raises: StorageError.
    """
    if blob.media_type != TENSOR_MEDIA_TYPE:
        return None
    try:
        return header_of(reader)
    except (CorruptDataError, LimitExceededError):
        return None


def unpack(
    store: Store,
    name: str | ModelName,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> UnpackedModel:
    """Restore a packed model's blobs, each checked against its digest; return their number.

    ``jobs``, ``progress``: as in `transfer`. A model that is whole stays as it is.

    Raises: NotFoundError; CorruptDataError for a damaged packed file, with ``blob`` and ``path``;
    DigestMismatchError; ConflictError if another process gives the name to another model;
    BusyError; StorageError. The model stays packed then.
    """
    with store.packing():
        if store.is_packed(name):
            done = _unpack(store, store.packed.find(name), threads(jobs), progress)
        else:
            done = UnpackedModel(store.find(name), 0, 0)
            store.manifests.read(done.name)  # what can't be read is not a whole model
            store.packed.replaced(done.name)  # a run that was killed may have left it
        store.packed.remove_unneeded()
    return done


def _unpack(store: Store, name: ModelName, jobs: int, progress: Progress | None) -> UnpackedModel:
    """Publish a packed model as a whole one, unless the name has a model by then."""
    at_once = jobs * hashing.width()  # each thread has one blob, and they are hashed together
    allow_open_files(3 * at_once)
    with store.session(store.packed.address) as session:
        manifest = store.packed.manifests.read(name)
        missing = session.missing(manifest.descriptors)
        told = begun(progress, sum(blob.size for blob in missing))

        def take(blob: Descriptor) -> None:
            with store.packed.blobs.open(blob) as reader:
                session.add(blob, reader)
            told(blob.size, blob.name or str(blob.digest))

        written = store.packed.manifests.modified(name)
        with kept_for_the_next(session):
            each(missing, take, max(1, min(at_once, len(missing))), name="unpack")
            session.publish(name, manifest, expected=(None,))
        store.manifests.set_modified(name, written)
    return UnpackedModel(name, len(missing), sum(blob.size for blob in missing))
