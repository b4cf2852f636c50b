"""Usage: what the blobs of a store take, by model: what only one model needs, what several share, what none needs.

Files of blobs that models need are not read or stat-ed, only their names are: 600,000 sizes take longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.store import Needs, References, Store


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
    """Return what the blobs of a store take; of ``models`` those called ``names``, all without ``names``.

    A blob that is there counts as manifests say, as in `list_models`; one that none names counts as long as its file is.
    What was cut or grew is for `verify` to find. Raises: NotFoundError for a name that there is not; InvalidNameError;
    AmbiguousNameError; StorageError.
    """
    wanted = [store.find(name) for name in names]
    references = store.references()
    there = store.blobs.digests()
    needed, shared = _needed_and_shared(references)
    others = there - needed.keys()
    unneeded = store.blobs.sizes(others)
    chosen = wanted or [*references.models, *references.broken]
    return Usage(
        len(there) - len(others) + len(unneeded),
        sum(_sizes(needed, there)) + sum(unneeded.values()),
        tuple(_of_model(name, references, there, shared) for name in sorted(set(chosen))),
        sum(unneeded.values()) if references.obstacle is None else 0,
        store.trash.nbytes(),
    )


def _needed_and_shared(references: References) -> tuple[dict[str, int], set[str]]:
    """Return the sizes of the blobs that some model needs, and the blobs that more than one does."""
    needed: dict[str, int] = {}
    shared: set[str] = set()
    for needs in references.each():
        shared.update(needs.keys() & needed.keys())
        needed.update(needs)
    return needed, shared


def _of_model(name: ModelName, references: References, there: set[str], shared: set[str]) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, 0, 0, references.broken.get(name))
    nbytes = sum(_sizes(needs, there))
    both = needs.keys() & shared
    return ModelUsage(name, nbytes, nbytes - sum(needs[digest] for digest in both if digest in there))


def _sizes(needs: Needs, there: set[str]) -> Iterable[int]:
    """Return the sizes of the blobs that are there."""
    if there.issuperset(needs):  # of 600,000 blobs that is faster than to look for each
        return needs.values()
    return [size for digest, size in needs.items() if digest in there]
