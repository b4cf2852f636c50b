"""The removal of what a removed model needed, and of files of ours that are of no use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor
from blobstore.names import Digest, ModelName
from blobstore.store.local.backups import CopiedModels
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.journal import dead_journals
from blobstore.store.local.kept import KEPT_S, KeptBlobs
from blobstore.store.local.leftovers import Leftovers
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.ports import Leftover, Removal
from blobstore.store.references import References


def manifest_digests(names: Iterable[ModelName], *folders: ManifestFolder) -> set[str]:
    """Return the hex digits of the manifests that these names have, if they can be read."""
    found = set()
    for name in names:
        for manifests in folders:
            with suppress(StorageError):
                if (raw := manifests.raw(name)) is not None:
                    found.add(Digest.of(raw).hex)
    return found


def remove_unreferenced(
    candidates: tuple[Descriptor, ...],
    references: References,
    blobs: BlobFolder,
    copied: Callable[[AbstractSet[ModelName]], CopiedModels],
) -> Removal:
    """Remove those of ``candidates`` that no manifest names, except those that a lost model needs.

    ``copied`` returns the models with copies of their manifests. Only for a holder of the store's
    exclusive lock. Raises: StorageError.
    """
    if (obstacle := references.obstacle) is not None:
        return Removal((), candidates, obstacle.message)
    needed = references.needed()
    orphans = {blob.digest: blob for blob in candidates if blob.digest.hex not in needed}
    try:
        found = copied(references.names)
        named = blobs.listing().named.keys() if found.missing else set()
        lost = found.lost(named - needed - {digest.hex for digest in orphans})
    except StorageError as error:
        return Removal((), candidates, error.message)
    saved = {digest: model for model in lost for digest in model.needs}
    removed = tuple(
        blob for digest, blob in orphans.items() if digest.hex not in saved and blobs.remove(digest)
    )
    kept = tuple(blob for digest, blob in orphans.items() if digest.hex in saved)
    if not kept:
        return Removal(removed)
    name = saved[kept[0].digest.hex].name
    reason = f"{name} may need them: its manifest is gone, but blobs that only it needs exist"
    return Removal(removed, kept, reason)


def unused_files(
    private: Path, kept: KeptBlobs, kept_s: float, is_there: Callable[[Digest], bool]
) -> list[Leftover]:
    """Return what killed imports left in our folder ``private``, and journals without a use.

    ``kept_s``: how long finished blobs of a killed import are kept for the next one. Blobs that
    were kept for a later session stay for a week, unless it is 0. ``is_there``: whether the store
    has a blob of that digest. Raises: StorageError.
    """
    left = Leftovers(private / "tmp")
    stale = [*left.stale(kept_s), *kept.stale(KEPT_S if kept_s else 0)]
    waiting = {*left.finished(), *kept.digests()}
    journals = dead_journals(
        private / "journal", lambda digest: digest in waiting or is_there(digest)
    )
    return [*stale, *journals]
