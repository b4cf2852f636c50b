"""Verify in a bucket: every blob is read and hashed by this machine, several at once.

Nothing is written, and no lock is taken. A fault is checked again at the end, and dropped if its
model was removed or replaced meanwhile.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.io.workers import Progress, begun, results_of, threads
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.bucket_store import BucketStore
from blobstore.store.bucket.object_blobs import REQUESTS
from blobstore.store.bucket.object_keys import BLOBS, blob_key, digest_in
from blobstore.store.care.checks import (
    MISSING,
    SMALL,
    BlobCheck,
    BlobReference,
    TensorNames,
    Users,
    name_of,
    tensors_in,
    wrong_document,
    wrong_size,
)
from blobstore.store.care.usage import OddFile
from blobstore.store.care.verify import (
    BrokenManifest,
    DamagedBlob,
    Sample,
    VerifyResult,
    held_twice,
    twice_text,
)

_ODD = "its key is not a blob's"
_STRAY = "its key is not a model's name, but it may be a manifest"


@dataclass(slots=True)
class _Checks:
    """The blobs of a bucket, by hex digits, and the models that need them."""

    store: BucketStore
    quick: bool
    uses: dict[str, list[BlobReference]] = field(default_factory=lambda: defaultdict(list))
    users: dict[bytes, Users] = field(default_factory=dict)
    broken: dict[ModelName, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def read(self, name: ModelName) -> None:
        """Read a manifest, and note what it names. A fault is noted."""
        try:
            raw = self.store.manifests.text(name)
        except NotFoundError:
            return  # it was removed after the names were read
        except BlobStoreError as error:
            self.broken[name] = error.message
            return
        key = hashlib.sha256(raw).digest()
        if key not in self.users:
            try:
                manifest = Manifest.parse(raw, "the manifest")
            except BlobStoreError as error:
                self.broken[name] = error.message
                return
            users = self.users[key] = Users(key, settings_of(self.store.blobs.read, manifest))
            for blob in manifest.descriptors:
                is_config = blob is manifest.config
                use = BlobReference(users, blob.media_type, blob.size, blob.name, is_config)
                self.uses[blob.digest.hex].append(use)
        self.users[key].names.append(name)

    def check(self, hexadecimal: str) -> BlobCheck:
        """Return the check of a blob."""
        uses, size = self.uses.get(hexadecimal, ()), self.sizes.get(hexadecimal)
        if size is None:
            return BlobCheck(MISSING)
        digest = Digest(hexadecimal)
        try:
            blob = Descriptor(media_type="", digest=digest, size=size)
            with self.store.blobs.open(blob) as reader:
                return self._checked(digest, reader, uses)
        except NotFoundError:
            return BlobCheck(MISSING)
        except CorruptDataError as error:
            return BlobCheck(error.message, size)

    def _checked(
        self, digest: Digest, reader: OpenReader, uses: Sequence[BlobReference]
    ) -> BlobCheck:
        data = memoryview(reader.read(0, reader.size)) if reader.size <= SMALL else None
        is_tensor = any(use.media_type == TENSOR_MEDIA_TYPE for use in uses)
        reads_all = not self.quick or (not is_tensor and reader.size <= MAX_CONFIG)
        wrong, tensors = wrong_size(reader.size, uses), TensorNames()
        if is_tensor:
            tensors = tensors_in(reader, data, uses[0].users.settings)
            reads_all = reads_all or tensors.odd is not None  # only whole bytes are odd
        if reads_all:
            whole = reader if data is None else BytesReader(bytes(data))
            if whole.digest() != digest:
                wrong = "its bytes do not match its digest"
        fault = tensors.wrong if is_tensor else wrong_document(reader, data, uses)
        hashed = reader.size if reads_all else 0
        odd = None if wrong else tensors.odd
        return BlobCheck(wrong or fault, reader.size, hashed, tensors.names, odd=odd)

    def damaged(self, checks: dict[str, BlobCheck]) -> Iterator[DamagedBlob]:
        """Yield the blobs that are still damaged, and still needed or there."""
        for digits in sorted(digits for digits, check in checks.items() if check.reason):
            uses = self.uses.get(digits, [])
            models = sorted({name for use in uses for name in self._still(use.users)})
            if uses and not models:
                continue
            size = self.store.blobs.size(Digest(digits))
            if size is None:
                self.sizes.pop(digits, None)
            else:
                self.sizes[digits] = size
            check = self.check(digits)
            if check.reason is not None and (uses or size is not None):
                named = tuple(dict.fromkeys(use.name for use in uses if use.name))
                tensors = check.tensors or named
                yield DamagedBlob(Digest(digits), check.reason, tuple(models), tensors)

    def _still(self, users: Users) -> Iterator[ModelName]:
        for name in dict.fromkeys(users.names):
            raw = self.store.manifests.state(name).raw
            if raw is not None and hashlib.sha256(raw).digest() == users.key:
                yield name


def verify_bucket(
    store: BucketStore,
    names: Sequence[str | ModelName] = (),
    *,
    quick: bool = False,
    sample: Sample | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Return the damage in a bucket, or in the models ``names`` only. See `verify`.

    ``jobs``: blobs that are read at once (None: 16). Raises: NotFoundError for a missing model;
    InvalidNameError; RemoteError, AccessError. Damage is a result, not an error.
    """
    store = BucketStore(store.bucket)  # without a cache, whose copies say nothing about the bucket
    workers = REQUESTS if jobs is None else threads(jobs)
    checks = _Checks(store, quick)
    for name in [store.find(name) for name in names] if names else store.manifests.names():
        checks.read(name)
    if names:
        found = store.blobs.sizes(map(Digest, checks.uses))
        checks.sizes = {digest.hex: size for digest, size in found.items() if size is not None}
    else:
        listing = store.blobs.listing()
        checks.sizes = {digest.hex: state.size for digest, state in listing.items()}
    chosen = [
        digits
        for digits in sorted({*checks.uses, *(checks.sizes if not names else ())})
        if sample is None or sample.has(Digest(digits))
    ]
    told = begun(progress, sum(checks.sizes.get(digits, 0) for digits in chosen))

    def check(digits: str) -> BlobCheck:
        result = checks.check(digits)
        told(checks.sizes.get(digits, 0), name_of(checks.uses.get(digits, ())))
        return result

    results: dict[str, BlobCheck] = dict(
        zip(chosen, results_of(chosen, check, workers, name="verify"), strict=True)
    )
    held = {digits: result.tensors for digits, result in results.items()}
    for users, tensor in held_twice(checks.uses, held).items():
        for name in users.names:
            checks.broken.setdefault(name, twice_text(tensor))
    return VerifyResult(
        len(chosen),
        sum(result.hashed for result in results.values()),
        tuple(checks.damaged(results)),
        tuple(BrokenManifest(name, reason) for name, reason in sorted(checks.broken.items())),
        (*_odd_blobs(results), *(() if names else _odd(store))),
    )


def _odd_blobs(results: dict[str, BlobCheck]) -> Iterator[OddFile]:
    """Yield the blobs whose metadata do not name the type of their arrays."""
    for digits, result in results.items():
        if result.odd is not None:
            yield OddFile(Path(blob_key(Digest(digits))), result.odd)


def _odd(store: BucketStore) -> Iterator[OddFile]:
    """Yield the objects that are not part of a store."""
    for state in store.bucket.objects(BLOBS):
        if digest_in(state.key) is None:
            yield OddFile(Path(state.key), _ODD)
    for state in store.manifests.strays():
        yield OddFile(Path(state.key), _STRAY)
