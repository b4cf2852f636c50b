"""Manifests in a bucket: small objects that move by conditional writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blobstore.errors import BlobStoreError, ModelNotFoundError, NotFoundError
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.io.objects import Bucket, ObjectState, ObjectVersion
from blobstore.io.workers import results_of
from blobstore.names import ModelName
from blobstore.store.bucket.object_blobs import REQUESTS
from blobstore.store.bucket.object_keys import MANIFESTS, manifest_key, model_of
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
