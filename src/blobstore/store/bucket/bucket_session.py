"""Session: a model on its way to a bucket.

A blob is written to its place as soon as it is complete, and is invisible until a manifest names
it. Blobs whose digest comes last (those that are made piece by piece) wait in a temporary file of
their own, which is freed when they are written. So the disk holds only what is being made. A lease
keeps a clean-up from removing them, and the manifest comes last, by a conditional write.

What was made is noted in ``.blobstore/made/<key>``, a digest and a size, so that workers on other
machines find it. A note is written after its blob, many at a time. A killed session loses those
that it has not written yet, and their blobs are made again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from blobstore.errors import BlobStoreError, ConflictError, LimitExceededError, NotFoundError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.strictjson import encode, parse_object
from blobstore.hashing import Bytes, digests
from blobstore.hashing.stage import HashStage
from blobstore.io.objects import Bucket
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.io.workers import each, results_of
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.leases import Lease, renew_lapsed
from blobstore.store.bucket.object_blobs import (
    LARGE_AT_ONCE,
    REQUESTS,
    SMALL,
    BucketBlobs,
    made_key,
)
from blobstore.store.bucket.object_manifests import BucketManifests, TagState
from blobstore.store.ports import (
    Expected,
    Finished,
    How,
    Session,
    blob_not_found,
    check_blob_size,
    check_reader_size,
    other_spelling,
    unique,
)
from blobstore.store.spool import Spool, SpoolWriter

_MAX_NOTE = 4096
_NOTES_TOGETHER = 4 * REQUESTS
_FLUSH_EVERY_S = 2.0


class BucketSession(Session):
    """What is being written to a bucket. See `Session`."""

    remembers = True

    def __init__(
        self,
        bucket: Bucket,
        blobs: BucketBlobs,
        manifests: BucketManifests,
        lease: Lease,
        wait_s: float | None = None,
    ) -> None:
        """``wait_s``: as in `BucketStore`."""
        self._bucket = bucket
        self._blobs = blobs
        self._manifests = manifests
        self._lease = lease
        self._wait_s = wait_s
        self._mutex = threading.Lock()
        # Many threads may add blobs, each with memory for what it writes.
        self._small = threading.BoundedSemaphore(REQUESTS)
        self._large = threading.BoundedSemaphore(LARGE_AT_ONCE)
        self._there: set[Digest] = set()
        self._written: dict[Digest, int] = {}
        self._created: set[Digest] = set()
        self._notes: dict[str, bytes] = {}
        self._flushed_at = time.monotonic()

    def write(self, blob: Descriptor, reader: OpenReader) -> Descriptor:
        """Write a blob, unless it is there. Raises: as `BucketBlobs.write`."""
        if blob.digest in self._there:
            return blob
        with self._large if blob.size > SMALL else self._small:
            is_new = self._blobs.write(blob, reader)
        with self._mutex:
            self._there.add(blob.digest)
            if is_new:
                self._written[blob.digest] = blob.size
                self._created.add(blob.digest)
        return blob

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._blobs.missing(descriptors)

    def writer(
        self,
        size: int,
        finished: Callable[[Any], None],
        stage: HashStage | None = None,  # noqa: ARG002  # hashed when it is complete
    ) -> SpoolWriter:
        """See `Session`: through a temporary file, because its key is its digest."""
        spool = Spool()
        blob = spool.reserve(size)

        def written(digest: Digest) -> None:
            done = self.write(Descriptor(media_type="", digest=digest, size=size), blob)
            spool.close()
            finished(done)

        return SpoolWriter(blob, written)

    def recall(self, key: str, size: int, *, verify: bool) -> Descriptor | None:
        """See `Session`: one request for the note, one for the blob."""
        digest = self._noted(key, size) or Digest.from_file_name(f"sha256-{key}")
        if digest is None or self._blobs.size(digest) != size:
            return None
        blob = Descriptor(media_type="", digest=digest, size=size)
        with suppress(NotFoundError):
            if not verify:
                return blob
            with self._blobs.open(blob) as reader:
                if reader.digest() == digest:
                    return blob
        return None

    def _noted(self, key: str, size: int) -> Digest | None:
        """Return the digest in a note, None if it is missing, of another size, or not a note."""
        try:
            raw, _ = self._bucket.get(made_key(key), limit=_MAX_NOTE)
        except (NotFoundError, LimitExceededError):
            return None
        with suppress(BlobStoreError):
            said = parse_object(raw, "a note", rule="L1", limit=_MAX_NOTE)
            if said.get("size") == size:
                return Digest.parse(said.get("digest"))
        return None

    def note(self, key: str, blob: Descriptor) -> None:
        raw = encode({"digest": str(blob.digest), "size": blob.size})
        with self._mutex:
            self._notes[made_key(key)] = raw
            is_young = time.monotonic() - self._flushed_at < _FLUSH_EVERY_S
            if len(self._notes) < _NOTES_TOGETHER and is_young:
                return
        self.keep()

    def keep(self) -> None:
        """See `Session`: what was written is kept; the notes of it are written now."""
        with self._mutex:
            self._flushed_at = time.monotonic()
            items, self._notes = list(self._notes.items()), {}
        if items:
            each(items, lambda item: self._put(*item), min(REQUESTS, len(items)), name="notes")

    def _put(self, key: str, raw: bytes) -> None:
        self._bucket.put(key, raw)

    def open(self, blob: Descriptor) -> OpenReader:
        return self._blobs.open(blob)

    def put_all(self, blobs: Sequence[Bytes]) -> list[Descriptor]:
        """See `Session`: several at once."""
        made = [
            Descriptor(media_type="", digest=Digest(raw.hex()), size=len(memoryview(data)))
            for data, raw in zip(blobs, digests(list(blobs)), strict=True)
        ]
        new = {blob.digest: (blob, data) for blob, data in zip(made, blobs, strict=True)}

        def write(item: tuple[Descriptor, Bytes]) -> Descriptor:
            return self.write(item[0], BytesReader(bytes(item[1]), "a blob in memory"))

        results_of(list(new.values()), write, REQUESTS, name="blobs")
        return made

    def copy(self, reader: OpenReader) -> Finished:
        """See `Session`: read twice, or through a temporary file if reading takes long."""
        if reader.size <= SMALL:
            return self.put_all([reader.read(0, reader.size)])[0]
        if not reader.is_remote:
            digest = reader.digest()
            return self.write(Descriptor("", digest, reader.size), reader)
        spool = Spool()
        try:
            blob = spool.keep(reader)
            return self.write(Descriptor("", blob.digest(), reader.size), blob)
        finally:
            spool.close()

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._there:
            return How.THERE
        check_reader_size(descriptor, reader)
        self.write(descriptor, reader)
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
        self.keep()
        before = self._manifests.state(name)
        if before.raw is None and (spelled := self._manifests.spelled(name)) != name:
            raise other_spelling(name, spelled)
        if expected is not None and before.raw not in expected:
            raise lost_race(name, before.raw)
        if self._lease.has_lapsed:  # a clean-up may have removed what was there
            renew_lapsed(self._bucket, self._lease, self._wait_s)
            self._check(named)
        else:
            self._check([blob for blob in named if self._written.get(blob.digest) != blob.size])
        self._move(name, manifest, before)
        if self._lease.has_lapsed:  # the machine slept just then
            renew_lapsed(self._bucket, self._lease, self._wait_s)
            self._check_late(name, manifest, before, named)
        with self._mutex:
            created = self._created & {blob.digest for blob in named}
            self._created -= created
        return created

    def _check(self, named: Sequence[Descriptor]) -> None:
        sizes = self._blobs.sizes([blob.digest for blob in named])
        for blob in named:
            size = sizes[blob.digest]
            if size is None:
                raise blob_not_found(blob.digest, self._bucket.address)
            check_blob_size(blob, size, self._bucket.address)

    def _check_late(
        self, name: ModelName, manifest: Manifest, before: TagState, named: Sequence[Descriptor]
    ) -> None:
        """Check the blobs of a model that is visible. Take it back if some are missing."""
        try:
            self._check(named)
        except BlobStoreError:
            now = self._manifests.state(name)
            if now.raw == manifest.raw and before.raw is None:
                self._manifests.remove(name)
            elif now.raw == manifest.raw and before.raw is not None:
                with suppress(ConflictError):
                    self._manifests.put(name, before.raw, now)
            raise

    def _move(self, name: ModelName, manifest: Manifest, before: TagState) -> None:
        """Move a tag. Raises: ConflictError if another writer was faster."""
        try:
            self._manifests.put(name, manifest.raw, before)
        except ConflictError:
            raise lost_race(name, self._manifests.state(name).raw) from None

    def close(self) -> None:
        """End the lease. Notes that can't be written are lost: what they say is made again."""
        with suppress(BlobStoreError):
            self.keep()
        self._lease.close()


def lost_race(name: ModelName, raw: bytes | None) -> ConflictError:
    """Return the error for a tag that another writer moved.

    ``raw``: the manifest that the tag has now, None if it was removed.
    """
    hint = "Check the model, and try again."
    if raw is None:
        message = f"another writer removed {name} meanwhile, or there never was one"
        return ConflictError(message, model=str(name), hint=hint)
    what = ""
    with suppress(BlobStoreError):
        manifest = Manifest.parse(raw)
        what = f", {manifest.size:,} bytes in {len(manifest.layers):,} layers"
    message = f"another writer moved {name} meanwhile: it is {Digest.of(raw)}{what}"
    return ConflictError(message, model=str(name), hint=hint)
