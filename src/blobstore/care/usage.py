"""Usage: what the blobs of a store take, by model: what only one model needs, what several share, what nobody needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.names import ModelName
from blobstore.store import BlobListing, References, Store
from blobstore.store.files import os_errors


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What a model takes, in bytes, each blob counted once: ``unique`` is what its removal would free.

    ``error``: why its manifest can't be read; the bytes are 0 then.
    """

    name: ModelName
    nbytes: int
    unique: int
    error: BlobStoreError | None = None

    @property
    def shared(self) -> int:
        """Bytes of blobs that other models need too."""
        return self.nbytes - self.unique


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in a store: the number and bytes of its blobs, its models by name, sorted.

    ``reclaimable``: bytes of blobs that no manifest names, which `prune` takes when they are old enough; 0 while a manifest
    can't be read, because it takes none then. ``trash``: bytes of what the last one took.
    """

    blobs: int
    nbytes: int
    models: tuple[ModelUsage, ...]
    reclaimable: int
    trash: int


def measure_usage(store: Store, names: Sequence[str | ModelName] = ()) -> Usage:
    """Return what the blobs of a store take; of ``models`` those called ``names``, all when there are none.

    Bytes are those of the files. Raises: NotFoundError for a name that there is not; InvalidNameError; StorageError.
    """
    wanted = [ModelName.parse(name) if isinstance(name, str) else name for name in names]
    for name in wanted:
        store.manifests.require(name)
    references = store.references()
    sizes = _sizes(store.blobs.listing())
    counts: Counter[str] = Counter()
    for needs in references.models.values():
        counts.update(needs.keys())
    chosen = wanted or [*references.models, *references.broken]
    unneeded = sizes.keys() - counts.keys() if references.obstacle is None else ()
    return Usage(
        len(sizes),
        sum(sizes.values()),
        tuple(_of_model(name, references, sizes, counts) for name in sorted(set(chosen))),
        sum(sizes[digest] for digest in unneeded),
        store.trash.nbytes(),
    )


def _of_model(name: ModelName, references: References, sizes: dict[str, int], counts: Counter[str]) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, 0, 0, references.broken.get(name))
    there = [(digest, sizes[digest]) for digest in needs if digest in sizes]
    return ModelUsage(name, sum(size for _, size in there), sum(size for digest, size in there if counts[digest] == 1))


def _sizes(listing: BlobListing) -> dict[str, int]:
    """Return the bytes of every blob, by the hex digits of its digest: regular files only. Raises: StorageError."""
    sizes = {}
    for digest, entry in listing.named.items():
        # One that has been removed since the folder was listed takes nothing.
        with suppress(NotFoundError), os_errors("look at", entry.path):
            if entry.is_file(follow_symlinks=False):
                sizes[digest] = entry.stat(follow_symlinks=False).st_size
    return sizes
