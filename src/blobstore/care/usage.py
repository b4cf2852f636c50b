"""Usage: what the blobs of a store take, by model: what only one model needs, what several share, what nobody needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.store import References, Store


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
    sizes = store.blobs.sizes()
    needed, shared = _needed_and_shared(references)
    chosen = wanted or [*references.models, *references.broken]
    unneeded = (size for digest, size in sizes.items() if digest not in needed)
    return Usage(
        len(sizes),
        sum(sizes.values()),
        tuple(_of_model(name, references, sizes, shared) for name in sorted(set(chosen))),
        sum(unneeded) if references.obstacle is None else 0,
        store.trash.nbytes(),
    )


def _needed_and_shared(references: References) -> tuple[set[str], set[str]]:
    """Return the blobs that some model needs, and those that more than one does."""
    needed: set[str] = set()
    shared: set[str] = set()
    for needs in references.models.values():
        shared |= needs & needed
        needed |= needs
    return needed, shared


def _of_model(name: ModelName, references: References, sizes: dict[str, int], shared: set[str]) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, 0, 0, references.broken.get(name))
    nbytes = sum(map(sizes.get, needs, repeat(0)))  # each look into a large dict costs: one a blob is enough
    return ModelUsage(name, nbytes, nbytes - sum(map(sizes.get, needs & shared, repeat(0))))
