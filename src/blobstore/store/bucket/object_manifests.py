"""Manifests in a bucket, small objects that move by conditional writes; and their signatures.

Signatures are ``.blobstore/signatures/<sha256 of a manifest>/<sha256>``: the keys and bytes are
those of a store in a folder (store/local/backups.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    ModelNotFoundError,
    NotFoundError,
)
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.formats.signatures import MAX_FILE, MAX_SIGNATURES, Signature
from blobstore.formats.strictjson import check_limit
from blobstore.io.objects import Bucket, ObjectState, ObjectVersion
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.object_blobs import (
    MANIFESTS,
    REQUESTS,
    SIGNATURES,
    manifest_key,
    model_of,
)
from blobstore.store.ports import Manifests, spelled_among
from blobstore.store.references import References


@dataclass(frozen=True, slots=True)
class TagState:
    """A manifest's bytes and the version of its object; twice None if it is missing."""

    raw: bytes | None
    version: ObjectVersion | None


class BucketManifests(Manifests):
    """The manifests of a bucket. See `Manifests`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._modified: dict[ModelName, datetime] = {}

    def names(self) -> list[ModelName]:
        """See `Manifests`. Objects whose keys are not those of a model are left out."""
        found = [(model_of(state.key), state) for state in self._listed()]
        listed = {name: state.modified for name, state in found if name is not None}
        self._modified = listed
        return sorted(listed)

    def strays(self) -> list[ObjectState]:
        """Return the objects among the manifests whose keys are not those of models."""
        return [state for state in self._listed() if model_of(state.key) is None]

    def _listed(self) -> Iterator[ObjectState]:
        yield from self._bucket.objects(MANIFESTS)

    def spelled(self, name: ModelName) -> ModelName:
        return name if self.has(name) else spelled_among(self.names(), name)

    def has(self, name: ModelName) -> bool:
        """Return True if the bucket has a model of exactly this name."""
        try:
            self._modified[name] = self._bucket.head(manifest_key(name)).modified
        except NotFoundError:
            return False
        return True

    def text(self, name: ModelName) -> bytes:
        """See `Manifests`. Raises: LimitExceededError for one of over 64 MiB."""
        raw = self.state(name).raw
        if raw is None:
            message = f"model {str(name)!r} not found in {self._bucket.address}"
            hint = "blobstore list shows the models of the store."
            raise ModelNotFoundError(message, model=str(name), hint=hint)
        return raw

    def modified(self, name: ModelName) -> datetime | None:
        """See `Manifests`: by the server's clock, as it was listed last."""
        if name not in self._modified:
            self.has(name)
        return self._modified.get(name)

    def state(self, name: ModelName) -> TagState:
        """Return the manifest that a name has now, with its version."""
        try:
            raw, version = self._bucket.get(manifest_key(name), limit=MAX_MANIFEST)
        except NotFoundError:
            return TagState(None, None)
        return TagState(raw, version)

    def put(self, name: ModelName, raw: bytes, before: TagState) -> None:
        """Move a tag, if it has not moved since ``before``. Raises: ConflictError otherwise."""
        self._bucket.replace(manifest_key(name), raw, before.version)
        self._modified.pop(name, None)

    def remove(self, name: ModelName) -> None:
        """Remove a tag; a missing one is not an error."""
        self._bucket.delete([manifest_key(name)])
        self._modified.pop(name, None)

    def references(
        self, strays: Sequence[Path] = (), known: References | None = None
    ) -> References:
        """Return which blobs the manifests name. See `References.read`."""
        names = self.names()

        def text(name: ModelName) -> bytes | BlobStoreError | None:
            try:
                return self.text(name)
            except NotFoundError:
                return None  # it was removed after it was listed
            except BlobStoreError as error:
                return error.kept()

        texts = results_of(names, text, REQUESTS, name="manifests")
        found = ((name, raw) for name, raw in zip(names, texts, strict=True) if raw is not None)
        return References.read(found, strays, (), known)


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
