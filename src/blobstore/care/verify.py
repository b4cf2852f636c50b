"""Verify: whether every blob, manifest and document of a store is what it has to be. Nothing is written.

No lock is taken: it may take hours, and others go on meanwhile. So what is found is looked at again at the end, and
forgotten when its model was removed or replaced, or its blob made again.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.care.blob_check import MISSING, BlobCheck, BlobChecker, Use
from blobstore.care.oddities import OddFile, odd_mode, oddities
from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.importer import Progress, threads
from blobstore.names import ModelName
from blobstore.ranges import FileIdentity
from blobstore.store import BlobListing, Store

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
        """True when nothing is damaged; what is only odd is no damage."""
        return not (self.damaged or self.broken)


@dataclass(frozen=True, slots=True)
class Sample:
    """The ``number``-th of ``count`` parts of all blobs, by digest: all numbers together are all blobs."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Return the sample that ``n/t`` names. Raises: UsageError unless 1 <= n <= t."""
        number, slash, count = text.partition("/")
        digits = slash and all(
            part.isascii() and part.isdigit() and len(part) < len("1000000000") for part in (number, count)
        )
        if not digits or not 1 <= int(number) <= int(count):
            raise UsageError(f"no part: {text!r}", hint="Write it as n/t, such as 1/7: the first of seven parts.")
        return cls(int(number), int(count))

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

    Raises: NotFoundError for a name that there is not; InvalidNameError; UsageError; StorageError when folders can't be
    listed, or there are too many open files. Damage is no error here.
    """
    wanted = [ModelName.parse(name) if isinstance(name, str) else name for name in names]
    workers = threads(jobs)
    for name in wanted:
        store.manifests.require(name)
    listing = BlobListing({}, ()) if wanted else store.blobs.listing()
    work = _Work(store, listing, quick=quick)
    for name in wanted or store.manifests.names():
        work.add(name)
    work.choose(sample)
    with bar(work.nbytes) if bar is not None else nullcontext() as progress:
        work.run(workers, progress or _silent)
    work.compare_names()
    return work.result(() if wanted else tuple(oddities(store, listing)))


@dataclass(slots=True)
class _Work:
    """What is checked, and what was found so far."""

    store: Store
    listing: BlobListing
    quick: bool
    uses: dict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))
    digests: list[str] = field(default_factory=list)
    found: dict[str, BlobCheck] = field(default_factory=dict)
    broken: dict[ModelName, str | None] = field(default_factory=dict)
    twice: dict[ModelName, str] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    checked: int = 0
    hashed: int = 0

    def add(self, name: ModelName) -> None:
        """Take in a model's manifest and the blobs that it names."""
        manifest, self.broken[name] = self._read(name)
        if manifest is None:
            return
        for blob in manifest.descriptors:
            use = Use(name, blob.media_type, blob.size, blob.name, blob is manifest.config)
            self.uses[blob.digest.hex].append(use)

    def _read(self, name: ModelName) -> tuple[Manifest | None, str | None]:
        """Return a manifest, where it can be read, and what is wrong with it."""
        try:
            raw = self.store.manifests.read_bytes(name)
            manifest = Manifest.parse(raw, f"the manifest of {name}")
        except NotFoundError:
            return None, None  # it has been removed since the names were read
        except BlobStoreError as error:
            return None, error.message
        return manifest, _changed(raw, self.store.copies.of(name))

    def choose(self, sample: Sample | None) -> None:
        """Decide which blobs are checked and in which order: the largest first, so that all threads end together."""
        chosen = self.uses.keys() | self.listing.named.keys()
        if sample is not None:
            chosen = {digest for digest in chosen if sample.has(Digest(digest))}
        self.digests = sorted(chosen, key=lambda digest: (-self._size(digest), digest))

    def _size(self, digest: str) -> int:
        uses = self.uses.get(digest)
        if uses:
            return uses[0].size
        try:
            return self.listing.named[digest].stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs that are checked."""
        return sum(map(self._size, self.digests))

    def run(self, jobs: int, progress: Progress) -> None:
        """Check the blobs with so many threads. Raises: the error of one that could not go on."""
        waiting = iter(self.digests)
        mutex = threading.Lock()
        stop = threading.Event()

        def take() -> str | None:
            with mutex:
                return None if stop.is_set() else next(waiting, None)

        def work() -> None:
            checker = BlobChecker(self.store, quick=self.quick, progress=progress)
            while (digest := take()) is not None:
                check = checker.check(Digest(digest), self.uses.get(digest, ()))
                with mutex:
                    self._note(digest, check)

        with ThreadPoolExecutor(jobs, thread_name_prefix="verify") as pool:
            try:
                for future in [pool.submit(work) for _ in range(jobs)]:
                    future.result()
            finally:
                stop.set()

    def _note(self, digest: str, check: BlobCheck) -> None:
        self.checked += 1
        self.hashed += check.hashed
        self.tensors[digest] = check.tensors
        if check.reason is not None:
            self.found[digest] = check

    def compare_names(self) -> None:
        """Find models in which two blobs hold tensors of one name."""
        names: dict[ModelName, set[str]] = defaultdict(set)
        for digest in self.digests:
            for use in self.uses.get(digest, ()):
                if use.media_type == TENSOR_MEDIA_TYPE:
                    twice = names[use.model].intersection(self.tensors.get(digest, ()))
                    if twice:
                        self.twice[use.model] = f"two of its blobs hold the tensor {min(twice)!r}"
                    names[use.model].update(self.tensors.get(digest, ()))

    def result(self, odd: tuple[OddFile, ...]) -> VerifyResult:
        """Return what is damaged, looked at for a second time."""
        checker = BlobChecker(self.store, quick=self.quick, progress=_silent)
        now: dict[ModelName, bytes] = {}
        damaged = []
        for digest, check in sorted(self.found.items()):
            uses = [use for use in self.uses.get(digest, ()) if digest.encode() in self._manifest(use.model, now)]
            if (reason := self._again(checker, digest, uses, check)) is not None:
                damaged.append(_damaged(digest, reason, uses, check))
        reasons = {name: self._read(name)[1] for name, reason in self.broken.items() if reason is not None}
        reasons |= {name: reason for name, reason in self.twice.items() if self._manifest(name, now)}
        broken = (BrokenManifest(name, reason) for name, reason in sorted(reasons.items()) if reason is not None)
        return VerifyResult(self.checked, self.hashed, tuple(damaged), tuple(broken), (*odd, *self._odd_blobs()))

    def _manifest(self, name: ModelName, known: dict[ModelName, bytes]) -> bytes:
        """Return the bytes of a manifest as it is now; none when it is gone or can't be read."""
        if name not in known:
            try:
                known[name] = self.store.manifests.read_bytes(name)
            except BlobStoreError:
                known[name] = b""
        return known[name]

    def _again(self, checker: BlobChecker, digest: str, uses: Sequence[Use], first: BlobCheck) -> str | None:
        """Return what is still wrong with a blob, or None: nobody needs it any more, or it was made again."""
        if not uses and digest not in self.listing.named:
            return None
        if first.identity is not None and first.identity == self._identity(digest):
            return first.reason
        check = checker.check(Digest(digest), uses)
        return None if check.reason == MISSING and not uses else check.reason

    def _identity(self, digest: str) -> FileIdentity | None:
        try:
            with self.store.blobs.reader(Digest(digest)) as reader:
                return reader.identity
        except BlobStoreError:
            return None

    def _odd_blobs(self) -> Iterator[OddFile]:
        for digest in sorted(self.listing.named.keys() - self.found.keys()):
            entry = self.listing.named[digest]
            with suppress(OSError):  # it has been removed
                if (reason := odd_mode(entry.stat(follow_symlinks=False))) is not None:
                    yield OddFile(Path(entry.path), reason)


def _changed(raw: bytes, copies: Sequence[bytes]) -> str | None:
    """Say that a manifest is not what was written, when it differs from a copy in a few bytes only."""
    if not copies or raw in copies:
        return None
    for copy in copies:
        if len(copy) == len(raw) and (count := sum(a != b for a, b in zip(raw, copy, strict=True))) <= _FEW_BYTES:
            return f"it differs in {count} byte{'s' if count > 1 else ''} from what was written"
    return None  # another program has written another model there


def _damaged(digest: str, reason: str, uses: Sequence[Use], check: BlobCheck) -> DamagedBlob:
    names = check.tensors or tuple(dict.fromkeys(use.name for use in uses if use.name is not None))
    models = tuple(sorted({use.model for use in uses}))
    return DamagedBlob(Digest(digest), reason, models, names)


def _silent(nbytes: int, blob: str) -> None:
    """Progress for nobody."""
