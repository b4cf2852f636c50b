"""BucketStore: the models of a bucket as a home.

Keys are the paths of a store in a folder: ``blobs/sha256-<hex>`` and
``manifests/HOST/NAMESPACE/MODEL/TAG``. Our own objects are under ``.blobstore/``. So a copy of the
prefix is a store that Ollama reads.

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
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    DocumentError,
    InvalidDigestError,
    LimitExceededError,
    NotFoundError,
    UsageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.strictjson import encode, parse_object
from blobstore.hashing import Bytes
from blobstore.hashing.stage import HashStage
from blobstore.io.objects import Bucket, ObjectReader, ObjectState, open_bucket
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.leases import (
    LEASE_S,
    LONGEST_LEASE_S,
    SweepLease,
    open_lease,
    require_conditions,
)
from blobstore.store.bucket.objects import (
    BLOBS,
    CACHE_NBYTES,
    LEASES,
    MADE,
    REQUESTS,
    SIGNATURES,
    SMALL,
    BlobCache,
    BucketBlobs,
    BucketManifests,
    BucketSignatures,
    blob_key,
    digest_in,
)
from blobstore.store.ports import (
    BlobState,
    Care,
    Expected,
    Home,
    How,
    Leftover,
    OddFile,
    Removal,
    Session,
    Spool,
    SpoolWriter,
    blob_not_found,
    check_blob_size,
    check_reader_size,
    check_spelling,
    unique,
)
from blobstore.store.references import References

_Name = str | ModelName
# Objects that one request removes.
_AT_ONCE = 1000
# Blobs in parts at once. Together they hold 160 MiB.
_LARGE_AT_ONCE = 4
_NEWER = "manifests-v2/"
_MAX_NOTE = 4096
_NOTES_TOGETHER = 4 * REQUESTS
_FLUSH_EVERY_S = 2.0


class BucketStore(Home):
    """A home in a bucket. Safe to share between threads.

    `remove` removes the name of a model; `prune` removes the blobs that no other model needs.
    `session` raises StorageError for a bucket without conditional writes.

    ``lease_s``: seconds for which a session's lease counts after each renewal. ``wait_s``: how long
    a session waits for a clean-up (None: as long as one may take), and a clean-up for sessions.
    ``cache``: where blobs are kept that `prefetch` brings. Others are read into memory.

    Raises: UsageError for a lease that is longer than an hour.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        cache: BlobCache | None = None,
        lease_s: float = LEASE_S,
        wait_s: float | None = None,
    ) -> None:
        if not 0 < lease_s <= LONGEST_LEASE_S:
            raise UsageError(f"invalid lease: {lease_s!r} seconds", hint="Use at most 3600.")
        self.address = bucket.address
        self.bucket = bucket
        self.lease_s = lease_s
        self.manifests: BucketManifests = BucketManifests(bucket)
        self.blobs: BucketBlobs = BucketBlobs(bucket, self.manifests, cache)
        self.summaries = None if cache is None else cache.store.summaries
        self.has_cache = cache is not None
        self.signatures: BucketSignatures = BucketSignatures(bucket)
        self.wait_s = wait_s
        self._cache = cache
        self._has_conditions = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Travels to another machine, or is copied, without the cache: a folder of this one.
        return partial(type(self), lease_s=self.lease_s, wait_s=self.wait_s), (self.bucket,)

    def find(self, name: _Name) -> ModelName:
        # The manifest is not read, so one that is too large can be removed.
        stored = self.manifests.stored_name(ModelName.of(name))
        if not self.manifests.has(stored):
            self.manifests.text(stored)  # raises the error of a missing one
        return stored

    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # all blobs are in one place
    ) -> AbstractContextManager[BucketSession]:
        if not self._has_conditions:
            require_conditions(self.bucket)
            self._has_conditions = True
        return closing(BucketSession(self))

    def prefetch(self, descriptors: Iterable[Descriptor]) -> None:
        if self._cache is not None:
            self._cache.bring(descriptors, self.blobs.open)

    def care(self) -> Care:
        return BucketCare(copy(self))  # without the cache, whose copies say nothing about it

    def remove(self, name: _Name) -> Removal:
        stored = self.find(name)
        try:
            blobs = self.manifests.read(stored).descriptors
        except BlobStoreError:
            blobs = ()  # a manifest that can't be read can still be removed
        self.manifests.remove(stored)
        return Removal((), tuple(unique(blobs)), "prune removes them, if no other model needs them")


class BucketSession(Session):
    """A model on its way to a bucket.

    A blob is written to its place as soon as it is complete, and is invisible until a manifest
    names it. Blobs whose digest comes last (those that are made piece by piece) wait in a temporary
    file of their own, which is freed when they are written. So the disk holds only what is being
    made. A lease keeps a clean-up from removing them, and the manifest comes last, by a conditional
    write.

    What was made is noted in ``.blobstore/made/<key>``, a digest and a size, so that workers on
    other machines find it. A note is written after its blob, many at a time. A killed session loses
    those that it has not written yet, and their blobs are made again.

    Raises: as `open_lease`.
    """

    remembers = True

    def __init__(self, home: BucketStore) -> None:
        self._home = home
        self._bucket = home.bucket
        self._lease = open_lease(home.bucket, home.lease_s, home.wait_s)
        self._mutex = threading.Lock()
        # Many threads may add blobs, each with memory for what it writes.
        self._large = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self._there: dict[Digest, int] = {}
        self._created: set[Digest] = set()
        self._notes: dict[str, bytes] = {}
        self._flushed_at = time.monotonic()

    def _write(self, blob: Descriptor, reader: OpenReader) -> Descriptor:
        if blob.digest in self._there:
            return blob
        with self._large if blob.size > SMALL else nullcontext():
            is_new = self._home.blobs.write(blob, reader)
        with self._mutex:
            self._there[blob.digest] = blob.size
            if is_new:
                self._created.add(blob.digest)
        return blob

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._home.blobs.missing(descriptors)

    def writer(
        self,
        size: int,
        finished: Callable[[Any], None],
        stage: HashStage | None = None,  # noqa: ARG002  # hashed when it is complete
    ) -> SpoolWriter:
        # Through a temporary file, because its key is its digest.
        spool = Spool()
        blob = spool.reserve(size)

        def written(digest: Digest) -> None:
            done = self._write(Descriptor(media_type="", digest=digest, size=size), blob)
            spool.close()
            finished(done)

        return SpoolWriter(blob, written)

    def recall(self, key: str, size: int, *, verify: bool) -> Descriptor | None:
        digest = self._read_note(key, size) or Digest.from_file_name(f"sha256-{key}")
        if digest is None or self._home.blobs.size(digest) != size:
            return None
        blob = Descriptor(media_type="", digest=digest, size=size)
        with suppress(NotFoundError):
            if not verify:
                return blob
            with self.open(blob) as reader:
                if reader.digest() == digest:
                    return blob
        return None

    def _read_note(self, key: str, size: int) -> Digest | None:
        """Return the digest in a note, None if it is missing, of another size, or not a note."""
        with suppress(NotFoundError, LimitExceededError, DocumentError, InvalidDigestError):
            raw, _ = self._bucket.get(MADE + key, limit=_MAX_NOTE)
            said = parse_object(raw, "a note", rule="L1", limit=_MAX_NOTE)
            if said.get("size") == size:
                return Digest.parse(said.get("digest"))
        return None

    def note(self, key: str, blob: Descriptor) -> None:
        raw = encode({"digest": str(blob.digest), "size": blob.size})
        with self._mutex:
            self._notes[MADE + key] = raw
            is_young = time.monotonic() - self._flushed_at < _FLUSH_EVERY_S
            if len(self._notes) < _NOTES_TOGETHER and is_young:
                return
        self.keep()

    def keep(self) -> None:
        # What was written is kept anyway; the notes of it are written now.
        with self._mutex:
            self._flushed_at = time.monotonic()
            items, self._notes = list(self._notes.items()), {}
        if items:
            results_of(items, lambda item: self._bucket.put(*item), REQUESTS, name="notes")

    def open(self, blob: Descriptor) -> OpenReader:
        return self._home.blobs.open(blob)

    def put_all(self, blobs: Sequence[Bytes]) -> list[Descriptor]:
        readers = [BytesReader(bytes(data), "a blob in memory") for data in blobs]
        return results_of(readers, self.copy, REQUESTS, name="blobs")

    def copy(self, reader: OpenReader) -> Descriptor:
        # It is read twice, or through a temporary file if reading takes long.
        with closing(Spool()) as spool:
            source = spool.keep(reader) if reader.is_remote else reader
            return self._write(Descriptor("", source.digest(), source.size), source)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._there:
            return How.THERE
        check_reader_size(descriptor, reader)
        self._write(descriptor, reader)
        return How.COPIED

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """See `Session`.

        The tag moves only if it has not moved since the start of this call. Raises: ConflictError
        that says which model has it then.
        """
        manifest.check_limits()
        named = unique(blob for blob in manifest.descriptors if blob.digest not in below)
        manifests = self._home.manifests
        self.keep()
        raw, version = manifests.state(name)
        if raw is None:
            check_spelling(name, manifests.stored_name(name))
        if expected is not None and raw not in expected:
            raise lost_race(name, raw)
        self._check([blob for blob in named if self._there.get(blob.digest) != blob.size])
        while self._lease.has_lapsed:  # a clean-up may have removed what was there
            self._lease.close()
            self._lease = open_lease(self._bucket, self._home.lease_s, self._home.wait_s)
            self._check(named)
        try:
            manifests.put(name, manifest.raw, version)
        except ConflictError:
            raise lost_race(name, manifests.state(name)[0]) from None
        with self._mutex:
            created = self._created & {blob.digest for blob in named}
            self._created -= created
        return created

    def _check(self, named: Sequence[Descriptor]) -> None:
        for blob, size in self._home.blobs.sizes(named):
            check_blob_size(blob, size, self._bucket.address)

    def close(self) -> None:
        """End the lease. Notes that can't be written are lost: what they say is made again."""
        with suppress(BlobStoreError):
            self.keep()
        self._lease.close()


def lost_race(name: ModelName, now: bytes | None) -> ConflictError:
    """Return the error for a tag that another writer moved."""
    if now is None:
        message = f"another writer removed {name} meanwhile, or it never existed"
    else:
        message = f"another writer moved {name} meanwhile: it is {Digest.of(now)}"
    return ConflictError(message, model=str(name), hint="Check the model, and try again.")


class BucketCare(Care):
    """The care of a bucket. Its home has no cache, whose copies say nothing about the bucket."""

    home: BucketStore
    can_prune = True
    at_once = REQUESTS
    refusal_hint = "Is the prefix right? To give up all models, prune with `forget=True`."

    def __init__(self, home: BucketStore) -> None:
        super().__init__(home)
        self._bucket = home.bucket
        self._listing: Mapping[str, ObjectState] = {}
        self._lease: SweepLease | None = None

    def digests(self) -> AbstractSet[str]:
        listing = self.home.blobs.listing()
        self._listing = {digest.hex: state for digest, state in listing.items()}
        return self._listing.keys()

    def open(self, digest: str, size: int | None) -> OpenReader:  # noqa: ARG002  # of any size
        nbytes = self.home.blobs.size(Digest(digest))
        if nbytes is None:
            raise blob_not_found(Digest(digest), self.home.address)
        return ObjectReader(self._bucket, blob_key(Digest(digest)), nbytes)

    def place(self, digest: str) -> Path:
        return Path(blob_key(Digest(digest)))

    def oddities(self) -> Iterator[OddFile]:
        for state in self._bucket.objects(BLOBS):
            if digest_in(state.key) is None:
                yield OddFile(Path(state.key), "its key is not a blob's")
        for state in self.home.manifests.strays():
            reason = "its key is not a model's name, but it may be a manifest"
            yield OddFile(Path(state.key), reason)

    def references(self, known: References | None = None) -> References:
        others = [*self.home.manifests.strays(), *self._bucket.objects(_NEWER)]
        # Programs that show folders make empty objects for them, with a slash at the end.
        strays = [Path(state.key) for state in others if state.size]
        return References.read(self.home.manifests.texts(), strays, (), known)

    def states(self, digests: Iterable[str]) -> Mapping[str, BlobState]:
        # Those of the last list.
        return {
            digest: BlobState(state.size, state.modified.timestamp(), Path(state.key))
            for digest in self._listing.keys() & digests
            for state in [self._listing[digest]]
        }

    @contextmanager
    def alone(self, wait_s: float, *, sole_owner: bool) -> Iterator[None]:  # noqa: ARG002
        now = require_conditions(self._bucket)
        self._lease = SweepLease(self._bucket, self.home.lease_s, now)
        try:
            self._lease.wait_for_sessions(wait_s if self.home.wait_s is None else self.home.wait_s)
            yield
        finally:
            self._lease.close()
            self._lease = None

    def now(self) -> float:
        # The server's time, but not in a dry run, which writes nothing.
        return time.time() if self._lease is None else self._lease.now().timestamp()

    def rest(
        self,
        references: References,
        spared: AbstractSet[str],  # noqa: ARG002  # no copies of manifests need them
        grace_s: float,
    ) -> tuple[Sequence[Leftover], Sequence[ModelName]]:
        now, bucket = datetime.fromtimestamp(self.now(), UTC), self._bucket
        why = "the lease of a session that was killed"
        leftovers = [
            Leftover(Path(state.key), 0, why)
            for state in bucket.objects(LEASES)
            if now - state.modified > timedelta(seconds=LONGEST_LEASE_S)
        ]
        known = {key.hex() for key in references.parsed}
        why = "a signature of a manifest that no model has"
        for state in bucket.objects(SIGNATURES):
            manifest = state.key.removeprefix(SIGNATURES).partition("/")[0]
            if manifest not in known and now - state.modified >= timedelta(seconds=grace_s):
                leftovers.append(Leftover(Path(state.key), state.size, why))
        return leftovers, ()

    def remove(
        self,
        blobs: Sequence[Path],
        leftovers: Sequence[Leftover],
        forgotten: Sequence[ModelName],  # noqa: ARG002  # none are
        references: References,  # noqa: ARG002  # nor are there hints
    ) -> int:
        """See `Care`. Raises: BusyError if the lease was lost; then nothing more is removed."""
        keys = [str(path) for path in (*blobs, *(leftover.path for leftover in leftovers))]
        for start in range(0, len(keys), _AT_ONCE):
            if self._lease is not None:
                self._lease.check()
            self._bucket.delete(keys[start : start + _AT_ONCE])
        return 0


def open_bucket_store(
    address: str,
    options: Mapping[str, str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = CACHE_NBYTES,
) -> BucketStore:
    """Return the store at ``s3://BUCKET/PREFIX``, ``gs://…`` or ``az://…``; no request is sent yet.

    ``options``: those of `open_bucket`. ``cache``: a folder for the blobs of opened models, which
    holds up to ``cache_size`` bytes.

    Raises: as `open_bucket`; UsageError for a folder that is not a cache.
    """
    kept = None if cache is None else BlobCache(cache, cache_size)
    return BucketStore(open_bucket(address, options), cache=kept)
