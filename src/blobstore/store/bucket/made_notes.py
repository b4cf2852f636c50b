"""Notes of blobs that sessions made: ``.blobstore/made/<key>``, a digest and a size.

So workers on other machines find what was made. A note is written after its blob, many at a time. A
killed session loses those that it has not written yet, and their blobs are made again.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from blobstore.errors import BlobStoreError, LimitExceededError, NotFoundError
from blobstore.formats.documents import Descriptor
from blobstore.formats.strictjson import encode, parse_object
from blobstore.io.objects import Bucket
from blobstore.io.workers import each
from blobstore.names import Digest
from blobstore.store.bucket.object_blobs import REQUESTS, BucketBlobs
from blobstore.store.bucket.object_keys import made_key

_MAX_NOTE = 4096
_TOGETHER = 4 * REQUESTS
_FLUSH_EVERY_S = 2.0


class MadeNotes:
    """What sessions made, by keys. See `Session.recall`."""

    def __init__(self, bucket: Bucket, blobs: BucketBlobs) -> None:
        self._bucket = bucket
        self._blobs = blobs
        self._mutex = threading.Lock()
        self._unwritten: dict[str, bytes] = {}
        self._flushed_at = time.monotonic()

    def recall(self, key: str, size: int, *, verify: bool) -> Descriptor | None:
        """See `Session`: one request for the note, one for the blob."""
        digest = self._noted(key, size) or Digest.from_file_name(f"sha256-{key}")
        if digest is None:
            return None
        if self._blobs.size(digest) != size:
            return None
        blob = Descriptor(media_type="", digest=digest, size=size)
        if verify:
            try:
                with self._blobs.open(blob) as reader:
                    if reader.digest() != digest:
                        return None
            except NotFoundError:
                return None
        return blob

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

    def note(self, key: str, blob: Any) -> None:
        raw = encode({"digest": str(blob.digest), "size": blob.size})
        with self._mutex:
            self._unwritten[made_key(key)] = raw
            is_young = time.monotonic() - self._flushed_at < _FLUSH_EVERY_S
            if len(self._unwritten) < _TOGETHER and is_young:
                return
        self.flush()

    def flush(self) -> None:
        """Write all notes. Raises: as `Bucket.put`."""
        with self._mutex:
            self._flushed_at = time.monotonic()
            items, self._unwritten = list(self._unwritten.items()), {}
        if items:
            each(items, lambda item: self._write(*item), min(REQUESTS, len(items)), name="notes")

    def _write(self, key: str, raw: bytes) -> None:
        self._bucket.put(key, raw)
