"""Packing: a model's blobs are kept compressed in the same store, and restored.

`pack` writes packed files, each of which is decoded once and made durable; then the packed model's
manifest takes the place of the whole one's, and last the blobs that no other model needs are
removed. `unpack` goes the other way, through a session of the store: every blob is checked against
its digest, and the model is published before its packed files are removed. So a model is at any
moment whole or packed. A killed run continues with the packed files, or blobs, that were finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor
from blobstore.io.workers import Progress, begun, each, threads
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.packed.files import write_packed
from blobstore.store.ports import Readable, Removal, unique
from blobstore.store.transfer import add_missing, kept_for_the_next


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that is packed.

    ``removal``: which of its plain blobs were removed, and why others could not be.
    """

    KEYS = (
        "name",
        "blobs",
        "size=nbytes",
        "stored",
        "freed=removal.removed_bytes",
        "kept=removal.kept_bytes",
        "reason=removal.reason",
    )

    name: ModelName
    blobs: int
    nbytes: Annotated[int, "bytes of its blobs"]
    stored: Annotated[int, "bytes of their packed form"]
    removal: Removal


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """A model that is whole again."""

    KEYS = ("name", "blobs", "bytes=nbytes")

    name: ModelName
    blobs: Annotated[int, "blobs that were unpacked"]
    nbytes: int


def unpacked(name: str | ModelName, home: Readable) -> ModelName:
    """Return the name of a model that ``home`` has, after unpacking it if it is packed.

    Raises: as `Home.find` and `unpack`.
    """
    if home.holder(name) is home:
        return home.find(name)
    upper: Any = home.upper
    return unpack(upper, name).name


def pack(
    store: Store,
    name: str | ModelName,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PackedModel:
    """Keep a model's blobs compressed, and remove the plain ones that no other model needs.

    ``jobs``: threads (None: one a core). ``progress`` is called with the bytes of each blob. A
    packed model stays as it is.

    Raises: NotFoundError for a missing model or blob; DigestMismatchError for a damaged blob;
    ConflictError if the model was changed meanwhile; BusyError; StorageError. The store is
    unchanged then.
    """
    if store.is_packed(name):
        full = store.packed.find(name)
        manifest = store.packed.manifests.read(full)
        store.copies.remove(full)  # a run that was killed may have left it
    else:
        full = store.find(name)
        with store.packing() as folder:
            manifest = store.manifests.read(full)
            try:
                _write(store, manifest.descriptors, folder, threads(jobs), progress)
                store.become_packed(full, manifest, folder)
            except StorageError:  # the disk may be full; else they are kept for the next run
                store.packed.remove_unneeded()
                raise
            store.packed.remove_unneeded()
    removal = store.remove_orphans(full, manifest.descriptors)
    own = {blob.digest.hex for blob in manifest.descriptors}
    return PackedModel(full, len(own), manifest.size, store.packed.blobs.stored(own), removal)


def _write(
    store: Store, blobs: Sequence[Descriptor], folder: Path, jobs: int, progress: Progress | None
) -> None:
    """Make the packed files of blobs, each by one thread, and durable when it is visible.

    Those that are packed already get decoded and hashed: their plain forms may be the last sound
    ones.
    """
    packed = store.packed.blobs
    missing = packed.missing(blobs)
    there = [blob for blob in unique(blobs) if blob not in missing]
    each(there, packed.check, min(jobs, len(there)), name="pack")
    told = begun(progress, sum(blob.size for blob in missing))

    def write(blob: Descriptor) -> None:
        path = folder / f"packed-{blob.digest.hex}"
        with store.blobs.open(blob) as reader:
            write_packed(path, blob, reader)
        packed.add(path, blob.digest)
        told(blob.size, blob.name or str(blob.digest))

    each(missing, write, min(jobs, len(missing)), name="pack")
    packed.settle()


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
    with store.session() as session:
        manifest = store.packed.manifests.read(name)
        written = store.packed.manifests.modified(name)
        with kept_for_the_next(session):
            took = add_missing(session, manifest, store.packed, jobs, progress)
            session.publish(name, manifest, expected=(None,))
        store.manifests.set_modified(name, written)
    sizes = {blob.digest: blob.size for blob in manifest.descriptors}
    return UnpackedModel(name, len(took), sum(map(sizes.__getitem__, took)))
