"""Places of stores: a text or a path that stands for a store, wherever functions take one."""

import os
from typing import TypeAlias, TypeVar

from blobstore.store.local.store import default_place, open_store
from blobstore.store.ports import Home

StorePlace: TypeAlias = str | os.PathLike[str] | None
"""A store's folder, the address of its bucket, or None for the default store."""
_Opened = TypeVar("_Opened")


def opened_store(store: _Opened | StorePlace) -> _Opened | Home:
    """Return the store at a place; an open store as it is. Raises: as `open_store`."""
    if not isinstance(store, str | os.PathLike | None):
        return store
    place = default_place() if store is None else os.fspath(store)
    if "://" not in place:
        return open_store(place)
    from blobstore.store.bucket.bucket_store import open_bucket_store

    return open_bucket_store(place)
