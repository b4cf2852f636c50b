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

from blobstore.care.checks import NOTHING, BlobChecks, silent
from blobstore.care.oddities import OddFile, odd_mode, oddities
from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.importer import Progress, threads
from blobstore.names import ModelName
from blobstore.store import Store
from blobstore.store.references import needs_of

Bar = Callable[[int], AbstractContextManager[Progress | None]]

_PART = re.compile(r"(?P<number>[0-9]{1,9})/(?P<count>[0-9]{1,9})", re.ASCII)
_FEW_BYTES = 16
"""A manifest that differs from its copy in so few bytes was not replaced by another program: digests alone have 64."""


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
    broken = _read_manifests(checks, wanted or store.manifests.names())
    chosen = checks.chosen(lambda digest: sample is None or sample.has(Digest(digest)))
    with bar(sum(map(checks.size, chosen))) if bar is not None else nullcontext() as progress:
        checks.run(chosen, workers, progress or silent)
    odd = () if wanted else (*oddities(store, checks.listing), *_odd_blobs(checks))
    return VerifyResult(len(chosen), checks.hashed, tuple(_damaged(checks)), tuple(_broken(checks, broken)), odd)


def read_manifest(store: Store, name: ModelName) -> tuple[Manifest | None, str | None]:
    """Return a model's manifest, where it can be read, and what is wrong with it; neither when it is missing."""
    try:
        raw = store.manifests.text(name)
        manifest = Manifest.parse(raw, f"the manifest of {name}")
    except NotFoundError:
        return None, None
    except BlobStoreError as error:
        return None, error.message
    return manifest, _changed(raw, store.copies.of(name))


def _read_manifests(checks: BlobChecks, names: Iterable[ModelName]) -> list[ModelName]:
    """Take in the blobs of models; return those whose manifests are not what they should be."""
    broken = []
    for name in names:
        manifest, reason = read_manifest(checks.store, name)
        if manifest is not None:
            checks.add(name, manifest)
        if reason is not None:
            broken.append(name)
    return broken


def _damaged(checks: BlobChecks) -> Iterator[DamagedBlob]:
    """Yield the damaged blobs that are still so, and still needed."""
    now: dict[ModelName, set[str]] = {}
    for digest, check in sorted(checks.damaged.items()):
        uses = checks.uses.get(digest, ())
        for use in uses:
            if use.model not in now:
                now[use.model] = _needs_of(checks.store, use.model)
        current = [use for use in uses if digest in now[use.model]]
        if (reason := checks.again(digest, current)) is not None:
            names = check.tensors or tuple(dict.fromkeys(use.name for use in current if use.name is not None))
            yield DamagedBlob(Digest(digest), reason, tuple(sorted({use.model for use in current})), names)


def manifest_bytes(store: Store, name: ModelName) -> bytes:
    """Return the bytes of a manifest; none when it is gone or can't be read."""
    try:
        return store.manifests.read_bytes(name)
    except BlobStoreError:
        return b""


def _needs_of(store: Store, name: ModelName) -> set[str]:
    """Return the hex digits of the blobs that a model needs now; none when its manifest is gone or can't be read."""
    try:
        return set(needs_of(manifest_bytes(store, name), f"the manifest of {name}"))
    except BlobStoreError:
        return set()


def _broken(checks: BlobChecks, names: Iterable[ModelName]) -> Iterator[BrokenManifest]:
    """Yield the models that are still broken, and those in which two blobs hold tensors of one name."""
    reasons = {name: read_manifest(checks.store, name)[1] for name in names}
    for name, tensor in _twice(checks).items():
        reasons[name] = reasons.get(name) or f"two of its blobs hold the tensor {tensor!r}"
    for name, reason in sorted(reasons.items()):
        if reason is not None:
            yield BrokenManifest(name, reason)


def _twice(checks: BlobChecks) -> dict[ModelName, str]:
    names: dict[ModelName, set[str]] = defaultdict(set)
    twice: dict[ModelName, str] = {}
    for digest, tensors in checks.tensors.items():
        for use in checks.uses.get(digest, ()) if tensors else ():
            if use.media_type == TENSOR_MEDIA_TYPE and use.model not in twice:
                if common := names[use.model].intersection(tensors):
                    twice[use.model] = min(common)
                names[use.model].update(tensors)
    return twice


def _odd_blobs(checks: BlobChecks) -> Iterator[OddFile]:
    for digest in sorted(checks.listing.named.keys() - checks.damaged.keys()):
        entry = checks.listing.named[digest]
        with suppress(OSError):  # it has been removed
            if (reason := odd_mode(entry.stat(follow_symlinks=False))) is not None:
                yield OddFile(Path(entry.path), reason)


def _changed(raw: bytes, copies: Sequence[bytes]) -> str | None:
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
