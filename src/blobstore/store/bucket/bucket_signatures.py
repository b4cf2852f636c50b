"""Signatures in a bucket: ``.blobstore/signatures/<sha256 of a manifest>/<sha256>``.

The keys and bytes are those of a store in a folder (store/local/signature_folder.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.errors import ConflictError, CorruptDataError
from blobstore.formats.signatures import MAX_FILE, MAX_SIGNATURES, Signature
from blobstore.formats.strictjson import check_limit
from blobstore.io.objects import Bucket
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.object_blobs import REQUESTS
from blobstore.store.bucket.object_keys import SIGNATURES


class BucketSignatures:
    """The signatures of a bucket. See `Signatures`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def read(self, _name: ModelName, digest: Digest) -> list[Signature]:
        """See `Signatures`. Sorted by the sha256 of their objects."""
        return results_of(self._keys(digest), self._signature, REQUESTS, name="signatures")

    def add(self, _name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        encoded = {_key(digest, raw): raw for raw in (each.encode() for each in signatures)}
        there = set(self._keys(digest))
        new = {key: raw for key, raw in encoded.items() if key not in there}
        what = f"{digest} with the new ones"
        check_limit(what, len(there) + len(new), "signatures", MAX_SIGNATURES, "S1")
        return sum(results_of(list(new.items()), self._put, REQUESTS, name="signatures"))

    def _put(self, item: tuple[str, bytes]) -> bool:
        key, raw = item
        try:
            self._bucket.put(key, raw, if_absent=True)
        except ConflictError:  # another process has just added the same one
            return False
        return True

    def _keys(self, digest: Digest) -> list[str]:
        """Return the keys of a manifest's signatures, sorted. Raises: LimitExceededError."""
        folder = f"{SIGNATURES}{digest.hex}/"
        keys = sorted(state.key for state in self._bucket.objects(folder))
        found = [key for key in keys if Digest.from_file_name(f"sha256-{key[len(folder) :]}")]
        check_limit(f"{digest}", len(found), "signatures", MAX_SIGNATURES, "S1")
        return found

    def _signature(self, key: str) -> Signature:
        raw, _ = self._bucket.get(key, limit=MAX_FILE)
        place = self._bucket.place(key)
        if Digest.of(raw).hex != key.rpartition("/")[2]:
            message = f"{place} is damaged: its bytes do not match its name"
            hint = "Remove the object, and sign or copy the model again."
            raise CorruptDataError(message, path=place, hint=hint)
        return Signature.parse(raw, place)


def _key(digest: Digest, raw: bytes) -> str:
    return f"{SIGNATURES}{digest.hex}/{Digest.of(raw).hex}"
