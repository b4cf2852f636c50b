"""Places of stores: a text or a path that stands for a store, wherever functions take one."""

import os
from typing import TypeAlias, TypeVar

from blobstore.store.local.store import default_place, open_store
from blobstore.store.ports import Home, Readable

StorePlace: TypeAlias = str | os.PathLike[str] | None
"""A store's folder, the address of its bucket, or None for the default store."""
_R = TypeVar("_R", bound=Readable)


def opened_store(store: _R | StorePlace) -> _R | Home:
    """Return the store at a place; an open store as it is. Raises: as `open_store`."""
    if isinstance(store, Readable):
        return store
    place = default_place() if store is None else os.fspath(store)
    if "://" not in place:
        return open_store(place)
    from blobstore.store.bucket.bucket_store import open_bucket_store

    return open_bucket_store(place)
