"""What a bucket adds to `verify`, `prune` and usage.

Every blob is read and hashed by this machine, several at once. A clean-up deletes blobs for good,
under the lease of clean-ups (leases.py): a bucket has no trash. With versions it keeps what is
deleted, and its lifecycle rules say for how long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from blobstore.formats.documents import Descriptor
from blobstore.io.objects import Bucket, ObjectState
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.leases import SweepLease, expired, require_conditions
from blobstore.store.bucket.object_blobs import (
    BLOBS,
    REQUESTS,
    SIGNATURES,
    BucketBlobs,
    ObjectReader,
    blob_key,
    digest_in,
)
from blobstore.store.bucket.object_manifests import BucketManifests
from blobstore.store.ports import BlobState, Care, Leftover, OddFile, Readable, blob_not_found
from blobstore.store.references import References

_AT_ONCE = 1000
"""Objects that one request removes."""
_NEWER = "manifests-v2/"


class BucketCare(Care):
    """The care of a bucket. See `Care`."""

    can_prune = True
    at_once = REQUESTS
    refusal_hint = "Is the prefix right? To give up all models, prune with `forget=True`."

    def __init__(
        self,
        home: Readable,
        bucket: Bucket,
        blobs: BucketBlobs,
        manifests: BucketManifests,
        lease_s: float,
        wait_s: float | None,
    ) -> None:
        """``home``: without a cache, whose copies say nothing about the bucket."""
        super().__init__(home)
        self._bucket = bucket
        self._blobs = blobs
        self._manifests = manifests
        self._lease_s = lease_s
        self._wait_s = wait_s
        self._listing: Mapping[str, ObjectState] = {}
        self._lease: SweepLease | None = None

    def digests(self) -> AbstractSet[str]:
        listing = self._blobs.listing()
        self._listing = {digest.hex: state for digest, state in listing.items()}
        return self._listing.keys()

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        found = self._blobs.size(Digest(digest))
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
        for state in self._manifests.strays():
            reason = "its key is not a model's name, but it may be a manifest"
            yield OddFile(Path(state.key), reason)

    def references(self, known: References | None = None) -> References:
        others = [*self._manifests.strays(), *self._bucket.objects(_NEWER)]
        # Programs that show folders make empty objects for them, with a slash at the end.
        strays = [Path(state.key) for state in others if state.size]
        return self._manifests.references(strays, known)

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
        self._lease = SweepLease(self._bucket, self._lease_s)
        try:
            self._lease.wait_for_sessions(wait_s if self._wait_s is None else self._wait_s)
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
