"""Verify: finds damaged blobs, manifests and documents of a store. Nothing is written.

No lock is taken, because a run may take hours, and other processes change the store meanwhile. So
each fault is checked again at the end, and dropped if its model was removed or replaced, or its
blob was made again.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.io.workers import Progress, begun, threads
from blobstore.names import Digest, ModelName
from blobstore.store.care.checks import NOTHING, BlobChecks, BlobReference, Users
from blobstore.store.care.packed_checks import PackedChecks, check_packed, models_of, names_of
from blobstore.store.care.usage import OddFile, odd_mode, oddities
from blobstore.store.local.references import KnownNeeds
from blobstore.store.local.store import Store
from blobstore.store.ports import Home

_FEW_BYTES = 16
"""A manifest that differs in so few bytes was not replaced: a digest alone has 64 hex digits."""


def manifest_bytes(store: Store, name: ModelName) -> bytes:
    """Return the bytes of a manifest, b"" if it is gone or can't be read."""
    return store.manifests.raw(name) or b""


def read_manifest(store: Store, name: ModelName) -> tuple[Manifest | None, str | None]:
    """Return a model's manifest if it can be read, and its fault; twice None if it is missing."""
    try:
        raw = store.manifests.text(name)
        manifest = Manifest.parse(raw, f"the manifest of {name}")
    except NotFoundError:
        return None, None
    except BlobStoreError as error:
        return None, error.message
    return manifest, difference(raw, store.copies.of(name))


def difference(raw: bytes, copies: Sequence[bytes]) -> str | None:
    """Return the fault of a manifest that differs from a copy in a few bytes only.

    One that differs in more bytes, or in length, is another model, written by another program.
    """
    same_length = [copy for copy in copies if len(copy) == len(raw)]
    for copy in same_length if raw not in copies else ():
        count = sum(map(operator.ne, raw, copy))
        if count <= _FEW_BYTES:
            return f"it differs in {count} byte{'s' if count > 1 else ''} from what was written"
    return None


class ManifestReader:
    """Reads the manifests of many models. Bytes that many names share are parsed once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[bytes, Users] = {}
        self._wrong: dict[bytes, str] = {}
        self._suspects: list[ModelName] = []

    def read(self, names: Iterable[ModelName]) -> Iterator[tuple[Users, Manifest]]:
        """Yield each different manifest once; ``Users.names`` is complete at the end."""
        for name in names:
            try:
                raw = self._store.manifests.text(name)
            except NotFoundError:
                continue  # it was removed after the names were read
            except BlobStoreError:
                self._suspects.append(name)
                continue
            key = _key(raw)
            manifest = self._parsed(key, raw)
            if manifest is not None:
                yield self._users[key], manifest
            if key in self._users:
                self._users[key].names.append(name)
            if self._reason(name, key, raw) is not None:
                self._suspects.append(name)

    def broken(self) -> Iterator[tuple[ModelName, str]]:
        """Yield the models whose manifests were faulty and still are, and the faults."""
        for name in self._suspects:
            if (reason := self._reason_now(name)) is not None:
                yield name, reason

    def _reason_now(self, name: ModelName) -> str | None:
        try:
            raw = self._store.manifests.text(name)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            return error.message
        key = _key(raw)
        self._parsed(key, raw)
        return self._reason(name, key, raw)

    def _reason(self, name: ModelName, key: bytes, raw: bytes) -> str | None:
        return self._wrong.get(key) or difference(raw, self._store.copies.of(name))

    def _parsed(self, key: bytes, raw: bytes) -> Manifest | None:
        """Return the manifest in ``raw`` if these bytes are new and valid, and keep the result."""
        if key in self._users or key in self._wrong:
            return None
        try:
            manifest = Manifest.parse(raw, "the manifest")
        except BlobStoreError as error:
            self._wrong[key] = error.message
            return None
        self._users[key] = Users(key, settings_of(self._store.blobs.read, manifest))
        return manifest


class CurrentNeeds:
    """Which models need a blob now: they may have been removed or replaced meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._needs = KnownNeeds()
        self._replaced: dict[bytes, list[tuple[ModelName, AbstractSet[str]]]] = {}
        self._kept: dict[bytes, tuple[ModelName, ...]] = {}

    def models(self, users: Users, digest: str) -> tuple[ModelName, ...]:
        """Return those of ``users`` that need the blob of these hex digits now.

        It is the same tuple for each blob that all of them need.
        """
        if users.key not in self._kept:
            self._compare(users)
        found = [name for name, needs in self._replaced[users.key] if digest in needs]
        return tuple(sorted((*self._kept[users.key], *found))) if found else self._kept[users.key]

    def _compare(self, users: Users) -> None:
        kept: list[ModelName] = []
        replaced: list[tuple[ModelName, AbstractSet[str]]] = []
        for name in dict.fromkeys(users.names):  # a user may have asked for one twice
            raw = manifest_bytes(self._store, name)
            if _key(raw) == users.key:
                kept.append(name)
            elif not isinstance(needs := self._needs.of(raw), BlobStoreError):
                replaced.append((name, needs.keys()))
        self._kept[users.key] = tuple(sorted(kept))
        self._replaced[users.key] = replaced


def _key(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


_PART = re.compile(r"(?P<number>[0-9]{1,9})/(?P<count>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class DamagedBlob:
    """A damaged blob, the reason, and the models and tensors that are affected.

    ``tensors``: those of its header if that can be read, else the names that the manifests give the
    blob.
    """

    digest: Digest
    reason: str
    models: tuple[ModelName, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrokenManifest:
    """A model whose manifest is invalid, or not what was written, and why."""

    name: ModelName
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of `verify`: ``checked`` blobs, ``nbytes`` hashed, damage, and odd files.

    Damaged blobs are sorted by digest, broken manifests by name.
    """

    checked: int
    nbytes: int
    damaged: tuple[DamagedBlob, ...]
    broken: tuple[BrokenManifest, ...]
    odd: tuple[OddFile, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged; odd files do not count."""
        return not (self.damaged or self.broken)


@dataclass(frozen=True, slots=True)
class Sample:
    """The ``number``-th of ``count`` parts of all blobs, divided by digest."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Return the sample that ``n/t`` names. Raises: UsageError unless 1 <= n <= t."""
        match = _PART.fullmatch(text)
        if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
            hint = "Write it as n/t, such as 1/7: the first of seven parts."
            raise UsageError(f"invalid part {text!r}", hint=hint)
        return cls(int(match["number"]), int(match["count"]))

    def has(self, digest: Digest) -> bool:
        """Return True if a blob belongs to the part."""
        return int(digest.hex[:16], 16) % self.count == self.number - 1


def verify(
    store: Store,
    names: Sequence[str | ModelName] = (),
    *,
    quick: bool = False,
    sample: Sample | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    lower: Sequence[Home] = (),
) -> VerifyResult:
    """Return the damage in a store, or in the models ``names`` only.

    Every blob is hashed, and the headers and companions of tensor blobs and the documents that
    blobstore reads are checked; without ``names`` also blobs that no model needs. ``quick``: of
    tensor blobs presence, size and header only. ``sample``: only a part of the blobs. ``jobs``:
    threads (None: one a core). ``lower``: homes below this one (layered.py); a blob that only they
    have is not damage, and is not read. ``progress`` is called with the bytes of blobs.

    Raises: NotFoundError for a missing store or model; InvalidNameError; UsageError; StorageError
    if folders can't be listed, or there are too many open files. Damage is a result, not an error.
    """
    workers = threads(jobs)
    store.require()  # else nothing of an unmounted disk, or of a misspelt path, would be checked
    wanted = [store.find(name) for name in names if not store.is_packed(name)]
    cold = [store.packed.find(name) for name in names if store.is_packed(name)]
    checks = BlobChecks(store, NOTHING if names else store.blobs.listing(), quick)
    manifests = ManifestReader(store)
    for users, manifest in manifests.read(wanted if names else store.manifests.names()):
        checks.add(users, manifest, lower)
    part = partial(_is_in, sample)
    chosen = checks.chosen(part)
    told = begun(progress, sum(map(checks.size, chosen)))
    checks.run(chosen, workers, told)
    packed = check_packed(
        store, cold if names else None, part, quick=quick, jobs=workers, progress=told
    )
    odd = (*(() if names else oddities(store, checks.listing)), *_odd_blobs(checks))
    return VerifyResult(
        len(chosen) + packed.checked,
        checks.hashed + packed.nbytes,
        (*_damaged(checks), *_damaged_packed(packed)),
        (
            *_broken(checks, manifests),
            *(BrokenManifest(name, reason) for name, reason in packed.broken.items()),
        ),
        odd,
    )


def _is_in(sample: Sample | None, digest: str) -> bool:
    return sample is None or sample.has(Digest(digest))


def _damaged_packed(packed: PackedChecks) -> Iterator[DamagedBlob]:
    for digest, reason in sorted(packed.damaged.items()):
        users = packed.users.get(digest, ())
        yield DamagedBlob(Digest(digest), reason, models_of(users), names_of(users))


def _damaged(checks: BlobChecks) -> Iterator[DamagedBlob]:
    """Yield the blobs that are still damaged, and still needed."""
    needs = CurrentNeeds(checks.store)

    @cache  # thousands of blobs may be of the same models: equal unions are one tuple
    def union(parts: tuple[tuple[ModelName, ...], ...]) -> tuple[ModelName, ...]:
        return parts[0] if len(parts) == 1 else tuple(sorted(set().union(*parts)))

    for digest, check in sorted(checks.damaged.items()):
        found = {
            use: models
            for use in checks.uses.get(digest, ())
            if (models := needs.models(use.users, digest))
        }
        if (reason := checks.again(digest, list(found))) is not None:
            names = check.tensors or tuple(
                dict.fromkeys(use.name for use in found if use.name is not None)
            )
            yield DamagedBlob(
                Digest(digest), reason, union(tuple(dict.fromkeys(found.values()))), names
            )


def _broken(checks: BlobChecks, manifests: ManifestReader) -> Iterator[BrokenManifest]:
    """Yield the models that are still broken, and those with two tensors of one name."""
    reasons = dict(manifests.broken())
    for users, tensor in held_twice(checks.uses, checks.tensors).items():
        for name in users.names:
            reasons.setdefault(name, twice_text(tensor))
    for name, reason in sorted(reasons.items()):
        yield BrokenManifest(name, reason)


def twice_text(tensor: str) -> str:
    """Return what is wrong with a model of which two blobs hold a tensor."""
    return f"two of its blobs hold the tensor {tensor!r}"


def held_twice(
    uses: Mapping[str, Sequence[BlobReference]], held: Mapping[str, Sequence[str]]
) -> dict[Users, str]:
    """Return the manifests of which two blobs hold a tensor, with the first such tensor.

    ``uses``: of blobs, by their hex digits; ``held``: the names of the tensors in each.
    """
    names: dict[Users, set[str]] = defaultdict(set)
    twice: dict[Users, str] = {}
    for digest, tensors in held.items():
        for use in uses.get(digest, ()) if tensors else ():
            if use.media_type == TENSOR_MEDIA_TYPE and use.users not in twice:
                if common := names[use.users].intersection(tensors):
                    twice[use.users] = min(common)
                names[use.users].update(tensors)
    return twice


def _odd_blobs(checks: BlobChecks) -> Iterator[OddFile]:
    """Yield the blobs whose metadata or modes are odd."""
    for digest, odd in sorted(checks.odd.items()):
        yield OddFile(checks.store.blobs.path / Digest(digest).file_name, odd)
    for digest in sorted(checks.listing.named.keys() - checks.damaged.keys()):
        entry = checks.listing.named[digest]
        with suppress(OSError):  # it was removed
            if (reason := odd_mode(entry.stat(follow_symlinks=False))) is not None:
                yield OddFile(Path(entry.path), reason)
