"""Usage: the bytes of a store's blobs by model: unique to one, shared by several, or unneeded.

Of blobs that models need only the names are read: a stat of 600,000 files takes longer than all the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Annotated

from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Care, Readable
from blobstore.store.references import Needs, References


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What a model takes, each of its blobs counted once; null where its manifest can't be read.

    Of a packed model the bytes are those of the packed files that it needs.
    """

    KEYS = ("name", "bytes=nbytes", "unique", "shared", "error?", "packed?=is_packed")

    name: ModelName
    nbytes: int | None
    unique: Annotated[int | None, "bytes that rm would free"]
    shared: Annotated[int | None, "bytes that other models need too"]
    error: Annotated[BlobStoreError | None, "why its manifest can't be read"] = None
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What blobs take: all of them, and those of models, sorted by name.

    ``reclaimable``: `prune` removes them when they are old enough; 0 while a manifest can't be
    read, because it removes none then.
    """

    KEYS = ("blobs", "bytes=nbytes", "models", "reclaimable", "trash", "packed?")

    blobs: int
    nbytes: int
    models: tuple[ModelUsage, ...]
    reclaimable: Annotated[int, "bytes that no model needs"]
    trash: Annotated[int, "bytes of the blobs in the trash"]
    packed: Annotated[int, "bytes of packed files, not counted in the others"] = 0


def measure_usage(
    store: Readable | StorePlace = None, names: Sequence[str | ModelName] = ()
) -> Usage:
    """Return the bytes of a store's blobs, and of the models ``names`` (all without ``names``).

    Homes below a layered store are not counted. A blob counts with the size that manifests give it,
    as in `list_models`; one that no manifest names counts with its own. `verify` finds blobs of
    another size. Raises: NotFoundError for a missing model; InvalidNameError; AmbiguousNameError;
    StorageError.
    """
    home = opened_store(store).upper
    care = home.care()
    holders = [(home.holder(name), name) for name in names]
    wanted = [home.find(name) for holder, name in holders if holder is home]
    packed = [holder.find(name) for holder, name in holders if holder is not home]
    there = care.digests()
    references = care.references()
    needed, shared = _needed_and_shared(references)
    unneeded = care.states(there - needed.keys())
    chosen = wanted if names else [*references.models, *references.broken]
    models = [_of_model(name, references, there, shared) for name in set(chosen)]
    packed_nbytes = 0
    if care.packed is not None:
        whole = {name.folded for name in references.names}
        models += _packed_usage(care.packed, whole, packed if names else None)
        packed_nbytes = care.packed.files_nbytes()
    unneeded_nbytes = sum(state.size for state in unneeded.values())
    return Usage(
        blobs=len(needed.keys() & there) + len(unneeded),
        nbytes=_nbytes(needed, there) + unneeded_nbytes,
        models=tuple(sorted(models, key=lambda one: one.name)),
        reclaimable=unneeded_nbytes if references.obstacle is None else 0,
        trash=care.trash_nbytes(),
        packed=packed_nbytes,
    )


def _packed_usage(
    care: Care, whole: set[tuple[str, ...]], names: Sequence[ModelName] | None
) -> Iterator[ModelUsage]:
    """Yield the usage of packed models: ``names``, or all (None); not those that are whole, too."""
    files = care.references()
    needed, shared = _needed_and_shared(files)
    for name in sorted(files.names):
        if name.folded not in whole and (names is None or name in names):
            yield replace(_of_model(name, files, needed.keys(), shared), is_packed=True)


def _needed_and_shared(references: References) -> tuple[dict[str, int], set[str]]:
    needed: dict[str, int] = {}
    shared: set[str] = set()
    for needs in references.each():
        shared.update(needs.keys() & needed.keys())
        needed.update(needs)
    return needed, shared


def _of_model(
    name: ModelName, references: References, there: AbstractSet[str], shared: set[str]
) -> ModelUsage:
    needs = references.models.get(name)
    if needs is None:
        return ModelUsage(name, None, None, None, references.broken.get(name))
    nbytes, common = _nbytes(needs, there), _nbytes(needs, shared & there)
    return ModelUsage(name, nbytes, nbytes - common, common)


def _nbytes(needs: Needs, digests: AbstractSet[str]) -> int:
    return sum(map(needs.__getitem__, needs.keys() & digests))
