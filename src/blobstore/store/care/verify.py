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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.io.workers import Progress, start_progress, threads
from blobstore.names import Digest, ModelName
from blobstore.store.care.checks import BlobChecks, Users
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Care, OddFile, Readable, id_of
from blobstore.store.references import ReadOnce

# A manifest that differs in so few bytes was not replaced: a digest alone has 64 hex digits.
_FEW_BYTES = 16


def read_manifest(care: Care, name: ModelName) -> tuple[Manifest | None, str | None]:
    """Return a model's manifest if it can be read, and its fault; twice None if it is missing."""
    try:
        raw = care.home.manifests.text(name)
        manifest = Manifest.parse(raw, "the manifest")
    except NotFoundError:
        return None, None
    except BlobStoreError as error:
        return None, error.message
    return manifest, difference(raw, care.copies(name))


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


def _key(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


_MOST_NAMES = 100
_PART = re.compile(r"(?P<number>[0-9]{1,9})/(?P<count>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class DamagedBlob:
    """A damaged blob, the reason, and the models and tensors that are affected.

    ``tensors``: those of its header if that can be read, else the names that the manifests give the
    blob. JSON has at most 100 models and tensors: a blob may belong to thousands.
    """

    KEYS = (
        "digest",
        "reason",
        "models=first_models",
        "model_count=len(models)",
        "tensors=first_tensors",
        "tensor_count=len(tensors)",
    )

    digest: Digest
    reason: str
    models: tuple[ModelName, ...]
    tensors: tuple[str, ...]

    @property
    def first_models(self) -> tuple[ModelName, ...]:
        return self.models[:_MOST_NAMES]

    @property
    def first_tensors(self) -> tuple[str, ...]:
        return self.tensors[:_MOST_NAMES]


@dataclass(frozen=True, slots=True)
class BrokenManifest:
    """A model whose manifest is invalid, or not what was written, and why."""

    name: ModelName
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What is damaged: blobs, sorted by digest, and manifests, by name; and odd files."""

    KEYS = ("checked", "bytes=nbytes", "damaged", "broken", "odd")

    checked: Annotated[int, "blobs"]
    nbytes: Annotated[int, "bytes that were hashed"]
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
        return int(digest.hex[:16], 16) % self.count == self.number - 1


def verify(
    store: Readable | StorePlace,
    names: Sequence[str | ModelName] = (),
    *,
    quick: bool = False,
    sample: Sample | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    lower: Sequence[Readable] = (),
) -> VerifyResult:
    """Return the damage in a store of any kind, or in the models ``names`` only.

    Every blob is hashed, and the headers and companions of tensor blobs and the documents that
    blobstore reads are checked; without ``names``, blobs that no model needs as well. Packed models
    are decoded. ``quick``: of tensor blobs presence, size and header only. ``sample``: only a part
    of the blobs. ``jobs``: blobs that are read at once (None: one per core, of a bucket 16).
    ``lower``: homes below this one (none given: those of a layered store); a blob that only
    they have is not damage, and is not read. ``progress`` is called with the bytes of blobs.

    Raises: NotFoundError for a missing store or model; InvalidNameError; UsageError; StorageError
    if folders can't be listed, or there are too many open files; RemoteError. Damage is a result,
    not an error.
    """
    store = opened_store(store)
    lower, home = lower or store.lower, store.upper
    care = home.care()
    care.require()  # else nothing of an unmounted disk, or of a misspelt path, would be checked
    holders = [(home.holder(name), name) for name in names]
    runs = []
    for one in filter(None, (care, care.packed)):
        is_own = one is care
        chosen = [holder.find(name) for holder, name in holders if (holder is home) == is_own]
        if chosen or not names:
            below = lower if is_own else ()
            runs.append(_Run(one, chosen if names else None, below, sample, quick=quick))
    report = start_progress(progress, sum(sum(map(run.checks.size, run.chosen)) for run in runs))
    for run in filter(lambda run: run.chosen, runs):
        usual = run.care.at_once if jobs is None else None
        run.checks.run(run.chosen, usual or threads(jobs), report)
    return VerifyResult(
        sum(len(run.chosen) for run in runs),
        sum(run.checks.hashed for run in runs),
        tuple(blob for run in runs for blob in _damaged_blobs(run.checks)),
        tuple(model for run in runs for model in run.broken()),
        tuple(odd for run in runs for odd in run.odd()),
    )


class _Run:
    """The checks of the models ``names`` of one home, or of all that it has (None)."""

    def __init__(
        self,
        care: Care,
        names: Sequence[ModelName] | None,
        lower: Sequence[Readable],
        sample: Sample | None,
        *,
        quick: bool,
    ) -> None:
        self.care = care
        self._is_whole = names is None
        self._suspects: list[ModelName] = []
        self._known = ReadOnce(self._users)
        self._parsed: list[tuple[Users, Manifest]] = []
        listed = care.digests_in_folder() if names is None or lower else frozenset[str]()
        self.checks = BlobChecks(care, listed if names is None else frozenset(), quick)
        for name in care.home.manifests.names() if names is None else names:
            users, fault = self._read(name)
            if users is not None:
                users.names.append(name)
            if fault is not None:
                self._suspects.append(name)
        for users, manifest in self._parsed:
            gone = [blob for blob in manifest.descriptors if blob.digest.hex not in listed]
            nowhere = gone
            for home in lower:
                nowhere = home.blobs.missing(nowhere)
            below = {blob.digest for blob in gone} - {blob.digest for blob in nowhere}
            self.checks.add(users, manifest, below)
        self.chosen = self.checks.largest_first(
            lambda one: sample is None or sample.has(Digest(one))
        )

    def _read(self, name: ModelName) -> tuple[Users | None, str | None]:
        """Return the users of a model's manifest, and its fault; twice None if it is missing."""
        raw = self.care.home.manifests.text_or_error(name)
        if not isinstance(raw, bytes):
            return None, None if raw is None else raw.message
        users = self._known.of(raw)
        if isinstance(users, BlobStoreError):
            return None, users.message
        return users, difference(raw, self.care.copies(name))

    def _users(self, raw: bytes, what: str) -> Users:
        manifest = Manifest.parse(raw, what)
        users = Users(_key(raw), settings_of(self.care.home.blobs.read, manifest))
        self._parsed.append((users, manifest))
        return users

    def broken(self) -> Iterator[BrokenManifest]:
        """Yield the models that are still broken, and those with two tensors of one name."""
        reasons: dict[ModelName, str] = {}
        for name in self._suspects:
            if (reason := self._read(name)[1]) is not None:
                reasons[name] = reason
        for users, tensor in _held_twice(self.checks).items():
            for name in users.names:
                reasons.setdefault(name, f"two of its blobs hold the tensor {tensor!r}")
        for name, reason in sorted(reasons.items()):
            yield BrokenManifest(name, reason)

    def odd(self) -> Iterator[OddFile]:
        yield from self.care.oddities() if self._is_whole else ()
        for digest, reason in sorted(self.checks.odd.items()):
            yield OddFile(self.care.place(digest), reason)


def _damaged_blobs(checks: BlobChecks) -> Iterator[DamagedBlob]:
    """Yield the blobs that are still damaged, and still needed."""

    @cache
    def current(users: Users) -> tuple[ModelName, ...]:
        names = dict.fromkeys(users.names)  # a user may have asked for one twice
        digest, home = Digest(users.key.hex()), checks.care.home
        return tuple(sorted(name for name in names if id_of(home, name) == digest))

    @cache  # thousands of blobs may be of the same models: equal unions are one tuple
    def union(parts: tuple[tuple[ModelName, ...], ...]) -> tuple[ModelName, ...]:
        return parts[0] if len(parts) == 1 else tuple(sorted(set().union(*parts)))

    for digest, check in sorted(checks.damaged.items()):
        uses = {
            use: models for use in checks.uses.get(digest, ()) if (models := current(use.users))
        }
        if (reason := checks.again(digest, list(uses))) is not None:
            names = check.tensors or tuple(
                dict.fromkeys(use.blob.name for use in uses if use.blob.name is not None)
            )
            yield DamagedBlob(
                Digest(digest), reason, union(tuple(dict.fromkeys(uses.values()))), names
            )


def _held_twice(checks: BlobChecks) -> dict[Users, str]:
    """Return the manifests of which two blobs hold a tensor, with the first such tensor."""
    names: dict[Users, set[str]] = defaultdict(set)
    twice: dict[Users, str] = {}
    for digest, tensors in checks.tensors.items():
        for use in checks.uses.get(digest, ()) if tensors else ():
            if use.blob.media_type == TENSOR_MEDIA_TYPE and use.users not in twice:
                if common := names[use.users].intersection(tensors):
                    twice[use.users] = min(common)
                names[use.users].update(tensors)
    return twice
