"""Usage of a bucket: the bytes of its blobs by model."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.names import ModelName
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.care.usage import Usage, usage_of_models


def measure_bucket(store: BucketStore, names: Sequence[str | ModelName] = ()) -> Usage:
    """Return the bytes of a bucket's blobs, and of the models ``names`` (all without ``names``).

    Blobs count with the sizes of their objects. Nothing but manifests is read. Raises:
    NotFoundError for a missing model; InvalidNameError; AmbiguousNameError.
    """
    wanted = [store.find(name) for name in names]
    references = store.manifests.references()
    sizes = {digest.hex: state.size for digest, state in store.blobs.listing().items()}
    unneeded = sizes.keys() - references.needed()
    chosen = wanted if names else references.names
    return Usage(
        blobs=len(sizes),
        nbytes=sum(sizes.values()),
        models=tuple(usage_of_models(references, set(sizes), chosen)),
        reclaimable=sum(map(sizes.__getitem__, unneeded)) if references.obstacle is None else 0,
        trash=0,
    )
