"""BucketStore: the models of a bucket as a home.

No lock exists in a bucket. Blobs never change, a tag moves by a conditional write, and sessions and
clean-ups wait for each other's leases (leases.py).

Its care reads and hashes every blob by this machine, several at once. A clean-up deletes blobs for
good, under the lease of clean-ups: a bucket has no trash. With versions it keeps what is deleted,
and its lifecycle rules say for how long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from blobstore.errors import BlobStoreError, UsageError
from blobstore.formats.documents import Descriptor
from blobstore.io.objects import Bucket, ObjectState, open_bucket
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.blob_cache import CACHE_NBYTES, BlobCache, CachedBlobs
from blobstore.store.bucket.bucket_session import BucketSession
from blobstore.store.bucket.leases import (
    LEASE_S,
    LONGEST_LEASE_S,
    SweepLease,
    expired,
    open_lease,
    require_conditions,
)
from blobstore.store.bucket.object_blobs import (
    BLOBS,
    REQUESTS,
    SIGNATURES,
    BucketBlobs,
    ObjectReader,
    blob_key,
    digest_in,
)
from blobstore.store.bucket.object_manifests import BucketManifests, BucketSignatures
from blobstore.store.ports import (
    BlobState,
    Care,
    Home,
    Leftover,
    OddFile,
    Removal,
    blob_not_found,
    unique,
)
from blobstore.store.references import References

_Name = str | ModelName
_AT_ONCE = 1000
"""Objects that one request removes."""
_NEWER = "manifests-v2/"


class BucketStore(Home):
    """A home in a bucket. Safe to share between threads.

    ``lease_s``: seconds for which a session's lease counts after each renewal. ``wait_s``: how long
    a session waits for a clean-up (None: as long as one may take), and a clean-up for sessions.
    ``cache``: where blobs are kept that are opened. Without it they are read into memory.
    """

    blobs: BucketBlobs
    manifests: BucketManifests
    signatures: BucketSignatures

    def __init__(
        self,
        bucket: Bucket,
        *,
        cache: BlobCache | None = None,
        lease_s: float = LEASE_S,
        wait_s: float | None = None,
    ) -> None:
        """Raises: UsageError for a lease that is longer than an hour."""
        if not 0 < lease_s <= LONGEST_LEASE_S:
            raise UsageError(f"invalid lease: {lease_s!r} seconds", hint="At most 3600.")
        self.address = bucket.address
        self.bucket = bucket
        self.lease_s = lease_s
        self.manifests = BucketManifests(bucket)
        self.blobs = _blobs(bucket, self.manifests, cache)
        self.summaries = None if cache is None else cache.summaries
        self.has_cache = cache is not None
        self.signatures = BucketSignatures(bucket)
        self.wait_s = wait_s
        self._mutex = threading.Lock()
        self._has_conditions = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another machine without the cache, a folder of this one."""
        return partial(type(self), lease_s=self.lease_s, wait_s=self.wait_s), (self.bucket,)

    def find(self, name: _Name) -> ModelName:
        found = self.manifests.spelled(ModelName.of(name))
        if not self.manifests.has(found):
            self.manifests.text(found)  # raises the error of a missing one
        return found

    @contextmanager
    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> Iterator[BucketSession]:
        """See `Home`. Raises: StorageError for a bucket without conditional writes."""
        self.require_conditions()
        lease = open_lease(self.bucket, self.lease_s, self.wait_s)
        session = BucketSession(self.bucket, self.blobs, self.manifests, lease, self.wait_s)
        try:
            yield session
        finally:
            session.close()

    def require_conditions(self) -> None:
        """Raise StorageError for a bucket that ignores conditional writes; it is asked once."""
        with self._mutex:
            if not self._has_conditions:
                require_conditions(self.bucket)
                self._has_conditions = True

    def prefetch(self, descriptors: Iterable[Descriptor]) -> None:
        """Bring blobs into the cache, in their order; without a cache, do nothing.

        Raises: as `BlobCache.bring`.
        """
        if isinstance(self.blobs, CachedBlobs):
            self.blobs.bring(descriptors)

    def care(self) -> Care:
        return BucketCare(BucketStore(self.bucket, lease_s=self.lease_s, wait_s=self.wait_s))

    def remove(self, name: _Name) -> Removal:
        """See `Home`: the tag goes, and `prune` removes blobs that no model needs."""
        found = self.find(name)
        try:
            blobs = self.manifests.read(found).descriptors
        except BlobStoreError:
            blobs = ()  # a manifest that can't be read can still be removed
        self.manifests.remove(found)
        return Removal((), tuple(unique(blobs)), "prune removes them, if no other model needs them")


class BucketCare(Care):
    """The care of a bucket. See `Care`."""

    can_prune = True
    at_once = REQUESTS
    refusal_hint = "Is the prefix right? To give up all models, prune with `forget=True`."

    def __init__(self, home: BucketStore) -> None:
        """``home``: without a cache, whose copies say nothing about the bucket."""
        super().__init__(home)
        self._home = home
        self._bucket = home.bucket
        self._listing: Mapping[str, ObjectState] = {}
        self._lease: SweepLease | None = None

    def digests(self) -> AbstractSet[str]:
        listing = self._home.blobs.listing()
        self._listing = {digest.hex: state for digest, state in listing.items()}
        return self._listing.keys()

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        found = self._home.blobs.size(Digest(digest))
        if found is None:
            raise blob_not_found(Digest(digest), self.home.address)
        return ObjectReader(self._bucket, Descriptor("", Digest(digest), found))

    def place(self, digest: str) -> Path:
        return Path(blob_key(Digest(digest)))

    def oddities(self) -> Iterator[OddFile]:
        """See `Care`: the objects that are not part of a store."""
        for state in self._bucket.objects(BLOBS):
            if digest_in(state.key) is None:
                yield OddFile(Path(state.key), "its key is not a blob's")
        for state in self._home.manifests.strays():
            reason = "its key is not a model's name, but it may be a manifest"
            yield OddFile(Path(state.key), reason)

    def references(self, known: References | None = None) -> References:
        others = [*self._home.manifests.strays(), *self._bucket.objects(_NEWER)]
        # Programs that show folders make empty objects for them, with a slash at the end.
        strays = [Path(state.key) for state in others if state.size]
        return self._home.manifests.references(strays, known)

    def states(self, digests: Iterable[str]) -> Mapping[str, BlobState]:
        """See `Care`: of the last list."""
        return {
            digest: BlobState(state.size, state.modified.timestamp(), Path(state.key))
            for digest in self._listing.keys() & digests
            for state in [self._listing[digest]]
        }

    @contextmanager
    def alone(self, wait_s: float, *, sole_owner: bool) -> Iterator[None]:
        del sole_owner
        require_conditions(self._bucket)
        self._lease = SweepLease(self._bucket, self._home.lease_s)
        try:
            self._lease.wait_for_sessions(
                wait_s if self._home.wait_s is None else self._home.wait_s
            )
            yield
        finally:
            self._lease.close()
            self._lease = None

    def now(self) -> float:
        """See `Care`: the server's time, but of a dry run, which writes nothing."""
        return time.time() if self._lease is None else self._lease.now().timestamp()

    def rest(
        self,
        references: References,
        spared: AbstractSet[str],
        grace_s: float,
    ) -> tuple[Sequence[Leftover], Sequence[ModelName]]:
        """See `Care`: leases that expired long ago, and old signatures that no model has."""
        del spared
        now, bucket = datetime.fromtimestamp(self.now(), UTC), self._bucket
        why = "the lease of a session that was killed"
        leftovers = [Leftover(Path(key), 0, why) for key in expired(bucket, now)]
        known = {key.hex() for key in references.parsed}
        for state in bucket.objects(SIGNATURES):
            manifest = state.key.removeprefix(SIGNATURES).partition("/")[0]
            is_old = (now - state.modified).total_seconds() >= grace_s
            if manifest not in known and is_old:
                why = "a signature of a manifest that no model has"
                leftovers.append(Leftover(Path(state.key), state.size, why))
        return leftovers, ()

    def remove(
        self,
        blobs: Sequence[Path],
        leftovers: Sequence[Leftover],
        forgotten: Sequence[ModelName],
        references: References,
    ) -> int:
        """See `Care`. Raises: BusyError if the lease was lost; then nothing more is removed."""
        del forgotten, references
        keys = [str(path) for path in (*blobs, *(leftover.path for leftover in leftovers))]
        for start in range(0, len(keys), _AT_ONCE):
            if self._lease is not None:
                self._lease.check()
            self._bucket.delete(keys[start : start + _AT_ONCE])
        return 0


def _blobs(bucket: Bucket, manifests: BucketManifests, cache: BlobCache | None) -> BucketBlobs:
    def named() -> set[str]:
        return manifests.references().needed()

    return BucketBlobs(bucket, named) if cache is None else CachedBlobs(bucket, named, cache)


def open_bucket_store(
    address: str,
    options: Mapping[str, str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = CACHE_NBYTES,
) -> BucketStore:
    """Return the store at ``s3://BUCKET/PREFIX``, ``gs://…`` or ``az://…``; no server is asked yet.

    ``options``: those of `open_bucket`. ``cache``: a folder for the blobs of opened models, which
    holds up to ``cache_size`` bytes.

    Raises: as `open_bucket`; UsageError for a folder that is not a cache.
    """
    kept = None if cache is None else BlobCache(cache, cache_size)
    return BucketStore(open_bucket(address, options), cache=kept)
