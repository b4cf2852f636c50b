"""Precautions: what keeps a clean-up from taking an unmounted disk for models that are gone.

An unmounted disk, bind mount or volume is an empty folder. What was committed here left copies of its manifests, so the lost
models (store/missing.py) are known. A clean-up refuses when, in the whole store or below one host's folder,

- no manifest is there at all, and at least one model is lost; or
- at least two models are lost, and more are lost than copied models have a manifest;

when the whole store has no manifest and blobs would be removed; and when ``blobs/`` has no blob of any manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from blobstore.errors import StorageError
from blobstore.names import ModelName
from blobstore.store import MissingModel, References, Store

_NAMED = 5
_SEVERAL = 2


def without_blobs(store: Store, needed: AbstractSet[str], named: AbstractSet[str]) -> StorageError | None:
    """Return why a store is left alone that has none of the blobs that its manifests need, else None.

    ``needed``, ``named``: the hex digits of the blobs that manifests name, and of those in ``blobs/``.
    """
    if not needed or not named.isdisjoint(needed):
        return None
    message = f"the manifests need {len(needed):,} blobs, and {store.blobs.path} contains none of them"
    hint = "Is its disk mounted? Models that are to go are removed by blobstore rm NAME."
    return StorageError(message, path=str(store.blobs.path), hint=hint)


def without_manifests(
    store: Store, references: References, there: Sequence[ModelName], lost: Sequence[MissingModel], removed: int
) -> StorageError | None:
    """Return why a store is left alone that has lost too many manifests, else None.

    ``there``: the copied models that have a manifest; ``removed``: how many blobs would go.
    """
    for place, host in _places(store.manifests.path, lost):
        manifests = sum(_is_below(name, host) for name in references.models) + (0 if host else len(references.newer))
        remaining = sum(_is_below(name, host) for name in there)
        gone = [model.name for model in lost if _is_below(model.name, host)]
        if not manifests or (len(gone) >= _SEVERAL and len(gone) > remaining):
            return _refusal(place, f"{_subject(len(gone), len(gone) + remaining)} no manifest: {_listed(gone)}")
    if removed and not references.models and not references.newer:
        return _refusal(store.manifests.path, f"no model has a manifest, and {removed:,} blobs would go")
    return None


def _places(manifests: Path, lost: Sequence[MissingModel]) -> Iterator[tuple[Path, str | None]]:
    """Yield the folders of manifests that may be unmounted, and the host of each: None for the folder of all hosts."""
    if lost:
        yield manifests, None
        for host in sorted({model.name.host for model in lost}):
            yield manifests / host, host


def _is_below(name: ModelName, host: str | None) -> bool:
    return host is None or name.host == host


def _subject(lost: int, known: int) -> str:
    """Return the subject of a refusal, and its verb."""
    if known == 1:
        return "the only model that was stored here has"
    return f"{lost:,} of the {known:,} models that were stored here {'has' if lost == 1 else 'have'}"


def _listed(names: Sequence[ModelName]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more


def _refusal(place: Path, message: str) -> StorageError:
    hint = (
        f"Is the disk of {place} mounted? A manifest that was deleted comes back by blobstore repair NAME. "
        "If these models are to go: prune --forget."
    )
    return StorageError(f"{place}: {message}", path=str(place), hint=hint)
