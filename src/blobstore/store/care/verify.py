"""Verify: whether every blob, manifest and document of a store is what it has to be.

Nothing is written.

No lock is taken: it may take hours, and others go on meanwhile. So what is found is checked again
at the end, and forgotten when its model was removed or replaced, or its blob made again.

The manifests of a store as verify and repair read them: which bytes they are, and whether they are
what was written.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.io.workers import Progress, begun, threads
from blobstore.names import Digest, ModelName
from blobstore.store.care.checks import NOTHING, BlobChecks, Users
from blobstore.store.care.usage import OddFile, odd_mode, oddities
from blobstore.store.local.references import needs_of
from blobstore.store.local.store import Store
from blobstore.store.ports import Home

_FEW_BYTES = 16
"""A manifest that differs from its copy in so few bytes was not replaced by another program: digests alone have 64."""


def manifest_bytes(store: Store, name: ModelName) -> bytes:
    """Return the bytes of a manifest; none when it is gone or can't be read."""
    try:
        return store.manifests.read_bytes(name)
    except BlobStoreError:
        return b""


def read_manifest(store: Store, name: ModelName) -> tuple[Manifest | None, str | None]:
    """Return a model's manifest, where it can be read, and what is wrong with it.

    Neither when it is missing.
    """
    try:
        raw = store.manifests.text(name)
        manifest = Manifest.parse(raw, f"the manifest of {name}")
    except NotFoundError:
        return None, None
    except BlobStoreError as error:
        return None, error.message
    return manifest, changed(raw, store.copies.of(name))


def changed(raw: bytes, copies: Sequence[bytes]) -> str | None:
    """Say that a manifest is not what was written, when it differs from a copy in a few bytes only."""
    if not copies or raw in copies:
        return None
    for copy in copies:
        if count := _differing(raw, copy):
            return f"it differs in {count} byte{'s' if count > 1 else ''} from what was written"
    return None  # another program has written another model there


def _differing(raw: bytes, copy: bytes) -> int | None:
    """Return in how many bytes a manifest differs from a copy; None when in so many that it is another model's."""
    if len(raw) != len(copy):
        return None
    count = sum(a != b for a, b in zip(raw, copy, strict=True))
    return count if count <= _FEW_BYTES else None


class ManifestReader:
    """Reads the manifests of many models.

    Bytes that many names share are parsed once, whatever they are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[bytes, Users] = {}
        self._wrong: dict[bytes, str] = {}
        self._suspects: list[ModelName] = []

    def read(self, names: Iterable[ModelName]) -> Iterator[tuple[Users, Manifest]]:
        """Yield each different manifest once, with the models that have it; ``Users.names`` is complete at the end."""
        for name in names:
            try:
                raw = self._store.manifests.text(name)
            except NotFoundError:
                continue  # it has been removed since the names were read
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
        """Yield the models whose manifests were wrong and still are, and what is wrong with them."""
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
        return self._wrong.get(key) or changed(raw, self._store.copies.of(name))

    def _parsed(self, key: bytes, raw: bytes) -> Manifest | None:
        """Return the manifest in ``raw`` when these bytes are new and valid.

        Remember what they are.
        """
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
    """Which models still need a blob: they may have been removed or replaced since their manifests were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._needs: dict[bytes, set[str]] = {}
        self._replaced: dict[bytes, list[tuple[ModelName, bytes]]] = {}
        self._kept: dict[bytes, tuple[ModelName, ...]] = {}

    def models(self, users: Users, digest: str) -> tuple[ModelName, ...]:
        """Return those of ``users`` that need the blob of these hex digits now.

        The same tuple wherever all of them do.
        """
        if users.key not in self._kept:
            self._compare(users)
        found = [name for name, key in self._replaced[users.key] if digest in self._needs[key]]
        return tuple(sorted((*self._kept[users.key], *found))) if found else self._kept[users.key]

    def _compare(self, users: Users) -> None:
        kept: list[ModelName] = []
        replaced: list[tuple[ModelName, bytes]] = []
        for name in dict.fromkeys(users.names):  # a user may have asked for one twice
            raw = manifest_bytes(self._store, name)
            key = _key(raw)
            if key == users.key:
                kept.append(name)
                continue
            replaced.append((name, key))
            if key not in self._needs:
                self._needs[key] = _needs(raw)
        self._kept[users.key] = tuple(sorted(kept))
        self._replaced[users.key] = replaced


def _needs(raw: bytes) -> set[str]:
    """Return the hex digits of the blobs that a manifest's bytes name.

    None when they are not a manifest.
    """
    try:
        return set(needs_of(raw, "the manifest"))
    except BlobStoreError:
        return set()


def _key(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


_PART = re.compile(r"(?P<number>[0-9]{1,9})/(?P<count>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class DamagedBlob:
    """A blob that is not what it has to be, why, and which models and tensors that hits.

    ``tensors``: those of its header where that can be read, else the names that the manifests give
    the blob.
    """

    digest: Digest
    reason: str
    models: tuple[ModelName, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrokenManifest:
    """A model whose manifest is not what it has to be, or not what was written, and why."""

    name: ModelName
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was found: ``checked`` blobs, ``nbytes`` of which were hashed.

    Damage by digest and by name; what is odd.
    """

    checked: int
    nbytes: int
    damaged: tuple[DamagedBlob, ...]
    broken: tuple[BrokenManifest, ...]
    odd: tuple[OddFile, ...]

    @property
    def is_sound(self) -> bool:
        """True when nothing is damaged; oddities do not count."""
        return not (self.damaged or self.broken)


@dataclass(frozen=True, slots=True)
class Sample:
    """The ``number``-th of ``count`` parts of all blobs, by digest: all numbers together are all blobs."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Return the sample that ``n/t`` names. Raises: UsageError unless 1 <= n <= t."""
        match = _PART.fullmatch(text)
        if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
            raise UsageError(
                f"invalid part {text!r}",
                hint="Write it as n/t, such as 1/7: the first of seven parts.",
            )
        return cls(int(match["number"]), int(match["count"]))

    def has(self, digest: Digest) -> bool:
        """Return True when a blob belongs to the part."""
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
    """Return what is damaged in a store, or in the models ``names`` only.

    By ``jobs`` threads (None: one a core).

    Every blob is hashed, the headers and companions of tensor blobs are checked, and the documents
    that are read here; so are blobs that no model needs, when no names are given. ``quick``: of
    tensor blobs presence, size and header only. ``sample``: only a part of the blobs. ``lower``:
    homes below this one (layered.py); what lies there alone is not damage, and is not read.
    ``progress`` is told of their bytes.

    Raises: NotFoundError for a store or a name that there is not; InvalidNameError; UsageError;
    StorageError when folders can't be listed, or there are too many open files. Damage is a result,
    not an error.
    """
    workers = threads(jobs)
    store.require()  # of a disk that is not mounted, or a misspelt path, nothing would be checked
    wanted = [store.find(name) for name in names]
    checks = BlobChecks(store, NOTHING if wanted else store.blobs.listing(), quick)
    manifests = ManifestReader(store)
    for users, manifest in manifests.read(wanted or store.manifests.names()):
        checks.add(users, manifest, lower)
    chosen = checks.chosen(lambda digest: sample is None or sample.has(Digest(digest)))
    checks.run(chosen, workers, begun(progress, sum(map(checks.size, chosen))))
    odd = () if wanted else (*oddities(store, checks.listing), *_odd_blobs(checks))
    return VerifyResult(
        len(chosen), checks.hashed, tuple(_damaged(checks)), tuple(_broken(checks, manifests)), odd
    )


def _damaged(checks: BlobChecks) -> Iterator[DamagedBlob]:
    """Yield the damaged blobs that are still so, and still needed."""
    needs = CurrentNeeds(checks.store)
    sets = _ModelSets()
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
            yield DamagedBlob(Digest(digest), reason, sets.union(found.values()), names)


class _ModelSets:
    """Unions of sorted tuples of models.

    Equal ones are one tuple, because thousands of blobs may be of the same models.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[ModelName, ...], ...], tuple[ModelName, ...]] = {}

    def union(self, parts: Iterable[tuple[ModelName, ...]]) -> tuple[ModelName, ...]:
        """Return all models of ``parts``, sorted."""
        key = tuple(dict.fromkeys(parts))
        if len(key) == 1:
            return key[0]
        if key not in self._known:
            self._known[key] = tuple(sorted({name for part in key for name in part}))
        return self._known[key]


def _broken(checks: BlobChecks, manifests: ManifestReader) -> Iterator[BrokenManifest]:
    """Yield the models that are still broken, and those in which two blobs hold tensors of one name."""
    reasons = dict(manifests.broken())
    for users, tensor in _twice(checks).items():
        for name in users.names:
            reasons.setdefault(name, f"two of its blobs hold the tensor {tensor!r}")
    for name, reason in sorted(reasons.items()):
        yield BrokenManifest(name, reason)


def _twice(checks: BlobChecks) -> dict[Users, str]:
    names: dict[Users, set[str]] = defaultdict(set)
    twice: dict[Users, str] = {}
    for digest, tensors in checks.tensors.items():
        for use in checks.uses.get(digest, ()) if tensors else ():
            if use.media_type == TENSOR_MEDIA_TYPE and use.users not in twice:
                if common := names[use.users].intersection(tensors):
                    twice[use.users] = min(common)
                names[use.users].update(tensors)
    return twice


def _odd_blobs(checks: BlobChecks) -> Iterator[OddFile]:
    for digest in sorted(checks.listing.named.keys() - checks.damaged.keys()):
        entry = checks.listing.named[digest]
        with suppress(OSError):  # it has been removed
            if (reason := odd_mode(entry.stat(follow_symlinks=False))) is not None:
                yield OddFile(Path(entry.path), reason)
