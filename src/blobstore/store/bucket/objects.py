"""The objects of a store in a bucket: blobs, manifests that move by conditional writes, signatures.

An object under a blob's key is not trusted: any user with write permission could have put it
there. Its size is checked when it is opened, and its bytes by everything that keeps them.

A blob is never changed. It is written only if it is missing, and its bytes are known to be right
before its object appears. A large blob is written in parts, which become an object together: first
the bucket is asked for it, and two writers at once replace it by the same bytes.

Signatures are ``.blobstore/signatures/<sha256 of a manifest>/<sha256>``: the keys and bytes are
those of a store in a folder (store/local/backups.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    ModelNotFoundError,
    NotFoundError,
)
from blobstore.formats.documents import MAX_MANIFEST, Descriptor
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.formats.signatures import MAX_FILE, MAX_SIGNATURES, Signature
from blobstore.formats.strictjson import check_limit
from blobstore.io.budget import Budget
from blobstore.io.objects import Bucket, ObjectReader, ObjectState, ObjectVersion
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import results_of
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.blob_cache import BlobCache
from blobstore.store.ports import (
    Blobs,
    Manifests,
    blob_not_found,
    check_blob_size,
    spelled_among,
    unique,
    wrong_bytes,
)
from blobstore.store.references import References
from blobstore.store.sessions import checked_pieces

BLOBS = "blobs/"
MANIFESTS = "manifests/"
_PRIVATE = ".blobstore/"
LEASES = f"{_PRIVATE}leases/"
MADE = f"{_PRIVATE}made/"
PROBES = f"{_PRIVATE}probes/"
SIGNATURES = f"{_PRIVATE}signatures/"
SWEEP = f"{_PRIVATE}sweep"

REQUESTS = 16
"""Requests at once for many small objects."""
_HEAD = 4096
"""Bytes in which the headers of most blobs end."""
SMALL = 4 * 2**20
"""Bytes of a blob that is written in one request."""
_PART = 8 * 2**20
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of one object (Amazon S3 User Guide, "Multipart upload limits")."""
_AT_ONCE = 4
"""Parts of one blob at once."""


def blob_key(digest: Digest) -> str:
    """Return the key of a blob."""
    return BLOBS + digest.file_name


def manifest_key(name: ModelName) -> str:
    """Return the key of a model's manifest."""
    return MANIFESTS + "/".join(name.path_parts)


def digest_in(key: str) -> Digest | None:
    """Return the digest of the blob with a key, None if it is not the key of a blob."""
    return Digest.from_file_name(key.removeprefix(BLOBS)) if key.startswith(BLOBS) else None


def model_of(key: str) -> ModelName | None:
    """Return the name of the model whose manifest has a key, None if it is not that of a model."""
    if not key.startswith(MANIFESTS):
        return None
    return ModelName.of_path(key.removeprefix(MANIFESTS).split("/"))


@dataclass(frozen=True, slots=True)
class TagState:
    """A manifest's bytes and the version of its object; twice None if it is missing."""

    raw: bytes | None
    version: ObjectVersion | None


class BucketManifests(Manifests):
    """The manifests of a bucket, and when each was written, as far as that was asked."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._modified: dict[ModelName, datetime] = {}

    def names(self) -> list[ModelName]:
        """See `Manifests`. Objects whose keys are not those of a model are left out."""
        found = [(model_of(state.key), state) for state in self._bucket.objects(MANIFESTS)]
        self._modified = {name: state.modified for name, state in found if name is not None}
        return sorted(self._modified)

    def strays(self) -> list[ObjectState]:
        """Return the objects among the manifests whose keys are not those of models."""
        return [state for state in self._bucket.objects(MANIFESTS) if model_of(state.key) is None]

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

    def texts(self) -> Iterator[tuple[ModelName, bytes | BlobStoreError]]:
        """See `Manifests`: several at once."""

        def text(name: ModelName) -> bytes | BlobStoreError | None:
            try:
                return self.text(name)
            except NotFoundError:
                return None  # it was removed after it was listed
            except BlobStoreError as error:
                return error.kept()

        names = self.names()
        texts = results_of(names, text, REQUESTS, name="manifests")
        return ((name, raw) for name, raw in zip(names, texts, strict=True) if raw is not None)

    def modified(self, name: ModelName) -> datetime | None:
        """See `Manifests`: by the server's clock, as it was listed last."""
        if name not in self._modified:
            self.has(name)
        return self._modified.get(name)

    def state(self, name: ModelName) -> TagState:
        """Return the manifest that a name has now, with its version."""
        try:
            return TagState(*self._bucket.get(manifest_key(name), limit=MAX_MANIFEST))
        except NotFoundError:
            return TagState(None, None)

    def put(self, name: ModelName, raw: bytes, before: TagState) -> None:
        """Move a tag, if it has not moved since ``before``. Raises: ConflictError otherwise."""
        self._bucket.replace(manifest_key(name), raw, before.version)
        self._modified.pop(name, None)

    def remove(self, name: ModelName) -> None:
        """Remove a tag; a missing one is not an error."""
        self._bucket.delete([manifest_key(name)])
        self._modified.pop(name, None)


class BucketBlobs(Blobs):
    """The blobs of a bucket; a ``cache`` keeps some of them."""

    def __init__(
        self, bucket: Bucket, manifests: BucketManifests, cache: BlobCache | None = None
    ) -> None:
        self._bucket = bucket
        self._manifests = manifests
        self._cache = cache

    def open(self, descriptor: Descriptor) -> OpenReader:
        """See `Blobs`: the server is asked for the blob's size."""
        if self._cache is not None and (found := self._cache.find(descriptor)) is not None:
            return found
        size = self.size(descriptor.digest)
        place = self._bucket.place(blob_key(descriptor.digest))
        if size is None:
            raise blob_not_found(descriptor.digest, place)
        check_blob_size(descriptor, size, place)
        return ObjectReader(self._bucket, blob_key(descriptor.digest), descriptor.size)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> list[Header | None]:
        """See `Blobs`: several at once."""

        def header(descriptor: Descriptor) -> Header | None:
            try:
                with self.open(descriptor) as reader:
                    return header_of(reader, budget, first_nbytes=min(_HEAD, reader.size))
            except BlobStoreError:
                return None  # it is read again, which raises the error

        return results_of(list(descriptors), header, REQUESTS, name="headers")

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`: a request for each."""
        wanted = unique(descriptors)
        sizes = self.sizes([blob.digest for blob in wanted])
        return [blob for blob in wanted if sizes[blob.digest] != blob.size]

    def digests(self) -> set[str]:
        """See `Blobs`: those that manifests name. Sessions write the others, before a manifest."""
        named = References.read(self._manifests.texts(), (), (), None).needed()
        return named & {digest.hex for digest in self.listing()} if named else named

    def size(self, digest: Digest) -> int | None:
        """Return the size of the object of a blob, None if it is missing."""
        state = self._state(digest)
        return None if state is None else state.size

    def _state(self, digest: Digest) -> ObjectState | None:
        try:
            return self._bucket.head(blob_key(digest))
        except NotFoundError:
            return None

    def sizes(self, digests: Sequence[Digest]) -> dict[Digest, int | None]:
        """Return the size of each blob's object, None for one that is missing."""
        found = results_of(digests, self.size, REQUESTS, name="sizes")
        return dict(zip(digests, found, strict=True))

    def listing(self) -> dict[Digest, ObjectState]:
        """Return the objects of all blobs. Other objects beside them are left out."""
        found = ((digest_in(state.key), state) for state in self._bucket.objects(BLOBS))
        return {digest: state for digest, state in found if digest is not None}

    def write(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        """Write a blob whose bytes ``reader`` has, unless it is there; return whether it was not.

        An object of another size in its place is replaced. Raises: DigestMismatchError for other
        bytes, and nothing is written then.
        """
        if descriptor.size <= SMALL:
            return self._write_small(descriptor, reader)
        if self.size(descriptor.digest) == descriptor.size:
            return False
        part = max(_PART, descriptor.size // _MOST_PARTS)
        pieces = checked_pieces(descriptor, reader)
        self._bucket.upload(blob_key(descriptor.digest), pieces, part=part, at_once=_AT_ONCE)
        return True

    def _write_small(self, descriptor: Descriptor, reader: OpenReader) -> bool:
        data = reader.read(0, reader.size)
        if Digest.of(data) != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
        key = blob_key(descriptor.digest)
        while True:
            try:
                self._bucket.put(key, data, if_absent=True)
            except ConflictError:
                found = self._state(descriptor.digest)
                if found is None:  # it was removed meanwhile
                    continue
                if found.size == descriptor.size:
                    return False
                self._bucket.replace(key, data, found.version)
            return True


class BucketSignatures:
    """The signatures of a bucket."""

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
