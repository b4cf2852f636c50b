"""BlobChecks: many blobs, checked by several threads.

The largest come first, so that all threads end together; the small ones are for one thread.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from blobstore.care.blob_check import MISSING, BlobCheck, BlobChecker, Use, Users
from blobstore.digest import Digest
from blobstore.documents import Manifest
from blobstore.errors import BlobStoreError
from blobstore.importer import Progress
from blobstore.ranges import FileIdentity
from blobstore.store import BlobListing, Store

NOTHING = BlobListing({}, ())
_SMALL = 2**17
"""Blobs of at most so many bytes are one thread's: most of their time is Python's, and two threads take turns at that."""


@dataclass(slots=True)
class BlobChecks:
    """The blobs that models need and those of ``listing``, and what was found about them; by the hex digits of digests.

    ``damaged``: checks that found something; ``tensors``: the names in each blob. ``quick``: as in `BlobChecker`.
    """

    store: Store
    listing: BlobListing = NOTHING
    quick: bool = False
    uses: dict[str, list[Use]] = field(default_factory=lambda: defaultdict(list))
    damaged: dict[str, BlobCheck] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hashed: int = 0
    _second: BlobChecker = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._second = BlobChecker(self.store, quick=self.quick, progress=silent)

    def add(self, users: Users, manifest: Manifest) -> None:
        """Take in the blobs that models with this manifest need."""
        for blob in manifest.descriptors:
            use = Use(users, blob.media_type, blob.size, blob.name, blob is manifest.config)
            self.uses[blob.digest.hex].append(use)

    def chosen(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return the blobs to check, of all those that are ``wanted``, the largest first."""
        digests = filter(wanted, self.uses.keys() | self.listing.named.keys())
        return sorted(digests, key=lambda digest: (-self.size(digest), digest))

    def size(self, digest: str) -> int:
        """Return the bytes that a blob should have, or has when no model needs it."""
        uses = self.uses.get(digest)
        if uses:
            return uses[0].size
        try:
            return self.listing.named[digest].stat(follow_symlinks=False).st_size
        except OSError:
            return 0

    def run(self, digests: Iterable[str], jobs: int, progress: Progress) -> None:
        """Check blobs with so many threads. Raises: StorageError when no more files can be opened."""
        queues: tuple[list[str], list[str]] = ([], [])
        for digest in digests:
            queues[self.quick or self.size(digest) <= _SMALL].append(digest)
        large, small = map(iter, queues)
        mutex = threading.Lock()
        stop = threading.Event()

        def work(*sources: Iterator[str]) -> None:
            checker = BlobChecker(self.store, quick=self.quick, progress=progress, stop=stop)
            while (digest := take(sources)) is not None:
                check = self._checked(checker, digest, self.uses.get(digest, ()))
                with mutex:
                    self._note(digest, check)

        def take(sources: tuple[Iterator[str], ...]) -> str | None:
            with mutex:
                return None if stop.is_set() else next((digest for source in sources for digest in source), None)

        others = min(jobs - 1, len(queues[0]))  # more would find nothing to do
        with ThreadPoolExecutor(1 + others, thread_name_prefix="verify") as pool:
            try:
                tasks = [pool.submit(work, small, large), *(pool.submit(work, large) for _ in range(others))]
                for task in tasks:
                    task.result()
            finally:
                stop.set()

    def _checked(self, checker: BlobChecker, digest: str, uses: Sequence[Use]) -> BlobCheck:
        if self.store.blobs.is_missing(digest):  # a hundred thousand may be
            return BlobCheck(MISSING)
        return checker.check(Digest(digest), uses)

    def _note(self, digest: str, check: BlobCheck) -> None:
        self.hashed += check.hashed
        self.tensors[digest] = check.tensors
        if check.reason is not None:
            self.damaged[digest] = check

    def again(self, digest: str, uses: Sequence[Use]) -> str | None:
        """Return what is still wrong with a damaged blob that ``uses`` need now; None when it was made again, or is gone."""
        first = self.damaged[digest]
        if not uses and digest not in self.listing.named:
            return None
        if first.identity is not None and first.identity == self._identity(digest):
            return first.reason
        check = self._checked(self._second, digest, uses)
        return None if check.reason == MISSING and not uses else check.reason

    def _identity(self, digest: str) -> FileIdentity | None:
        try:
            with self.store.blobs.reader(Digest(digest)) as reader:
                return reader.identity
        except BlobStoreError:
            return None


def silent(nbytes: int, blob: str) -> None:
    """Progress that is not shown."""
