"""Verify: whether every blob, manifest and document of a store is what it has to be. Nothing is written.

No lock is taken: it may take hours, and others go on meanwhile. So what is found is checked again at the end, and
forgotten when its model was removed or replaced, or its blob made again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.care.blob_check import Users
from blobstore.care.checks import NOTHING, BlobChecks, silent
from blobstore.care.manifests import CurrentNeeds, ManifestReader
from blobstore.care.oddities import OddFile, odd_mode, oddities
from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE
from blobstore.errors import UsageError
from blobstore.importer import Progress, threads
from blobstore.names import ModelName
from blobstore.store import Store

Bar = Callable[[int], AbstractContextManager[Progress | None]]

_PART = re.compile(r"(?P<number>[0-9]{1,9})/(?P<count>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class DamagedBlob:
    """A blob that is not what it has to be, why, and which models and tensors that hits.

    ``tensors``: those of its header where that can be read, else the names that the manifests give the blob.
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
    """What was found: ``checked`` blobs, ``nbytes`` of which were hashed; damage by digest and by name; what is odd."""

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
            raise UsageError(f"invalid part {text!r}", hint="Write it as n/t, such as 1/7: the first of seven parts.")
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
    bar: Bar | None = None,
) -> VerifyResult:
    """Return what is damaged in a store, or in the models ``names`` only; by ``jobs`` threads (None: one a core).

    Every blob is hashed, the headers and companions of tensor blobs are checked, and the documents that are read here; so
    are blobs that no model needs, when no names are given. ``quick``: of tensor blobs presence, size and header only.
    ``sample``: only a part of the blobs. ``bar``, given their bytes, returns a context manager that gives what is told of
    progress.

    Raises: NotFoundError for a store or a name that there is not; InvalidNameError; UsageError; StorageError when folders
    can't be listed, or there are too many open files. Damage is a result, not an error.
    """
    workers = threads(jobs)
    store.require()  # of a disk that is not mounted, or a misspelt path, nothing would be checked
    wanted = [store.find(name) for name in names]
    checks = BlobChecks(store, NOTHING if wanted else store.blobs.listing(), quick)
    manifests = ManifestReader(store)
    for users, manifest in manifests.read(wanted or store.manifests.names()):
        checks.add(users, manifest)
    chosen = checks.chosen(lambda digest: sample is None or sample.has(Digest(digest)))
    with bar(sum(map(checks.size, chosen))) if bar is not None else nullcontext() as progress:
        checks.run(chosen, workers, progress or silent)
    odd = () if wanted else (*oddities(store, checks.listing), *_odd_blobs(checks))
    return VerifyResult(len(chosen), checks.hashed, tuple(_damaged(checks)), tuple(_broken(checks, manifests)), odd)


def _damaged(checks: BlobChecks) -> Iterator[DamagedBlob]:
    """Yield the damaged blobs that are still so, and still needed."""
    needs = CurrentNeeds(checks.store)
    sets = _ModelSets()
    for digest, check in sorted(checks.damaged.items()):
        found = {use: models for use in checks.uses.get(digest, ()) if (models := needs.models(use.users, digest))}
        if (reason := checks.again(digest, list(found))) is not None:
            names = check.tensors or tuple(dict.fromkeys(use.name for use in found if use.name is not None))
            yield DamagedBlob(Digest(digest), reason, sets.union(found.values()), names)


class _ModelSets:
    """Unions of sorted tuples of models; equal ones are one tuple, because thousands of blobs may be of the same models."""

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
