"""Stores in buckets: how commands open them, and the cache of their blobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from blobstore.cli.bucket_settings import bucket_options
from blobstore.cli.output import parse_size, store_at, stores_at
from blobstore.errors import UsageError

CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where the blobs of a bucket are kept "
        "[default: $BLOBSTORE_CACHE, else ~/.cache/blobstore].",
    ),
]
CacheSizeOption = Annotated[
    str | None,
    typer.Option("--cache-size", metavar="SIZE", help="Most bytes of the cache [default: 50GB]."),
]


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """What ``--cache`` and ``--cache-size`` say about the cache of a bucket's blobs."""

    folder: str | None = None
    size: str | None = None

    @property
    def place(self) -> str:
        """The cache's folder."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        return self.folder or os.environ.get("BLOBSTORE_CACHE") or f"{home}/blobstore"

    def open(self) -> Any:
        """Return the cache. Raises: UsageError for an invalid size, or a folder of another kind."""
        from blobstore.store.bucket.blob_cache import CACHE_NBYTES, BlobCache

        return BlobCache(self.place, CACHE_NBYTES if self.size is None else parse_size(self.size))


def cached_stores_at(
    store: str | None, lower: Sequence[str] | None, cache: str | None, cache_size: str | None
) -> Any:
    """Return the store of `stores_at`, with a cache of the blobs of buckets.

    Raises: UsageError if a cache is asked for, and no store is in a bucket.
    """
    opened = stores_at(store, lower, cache=CacheChoice(cache, cache_size))
    is_asked_for = cache is not None or cache_size is not None
    if is_asked_for and not any(home.has_cache for home in (opened.upper, *opened.lower)):
        message = f"a cache is for a store in a bucket, and {opened.address} is a folder"
        raise UsageError(message, hint="Leave out --cache and --cache-size.")
    return opened


def store_in_bucket(address: str, wait_s: float | None, cache: CacheChoice | None) -> Any:
    """Return the store at the address of a bucket.

    Raises: UsageError for another address, or without the extra `cloud`; as `CacheChoice.open`.
    """
    from blobstore.io.objects import open_bucket
    from blobstore.store.bucket.bucket_store import BucketStore

    kept = cache.open() if cache is not None else None
    bucket = open_bucket(address, bucket_options(address))
    return BucketStore(bucket, cache=kept, wait_s=wait_s)


def folder_store_at(
    command: str, folder: str | None, wait_s: float | None = None, *, may_be_new: bool = False
) -> Any:
    """Return the store of `store_at`. Raises: UsageError if it is in a bucket."""
    store = store_at(folder, wait_s, may_be_new=may_be_new)
    if store.root is None:
        message = f"{command} is for a store in a folder, and {store.address} is a bucket"
        raise UsageError(message, hint="blobstore cp --to DIR brings a model to a folder.")
    return store
