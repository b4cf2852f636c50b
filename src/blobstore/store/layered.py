"""A layered store: one store over others that are only read.

Many users can share a model folder without copying it: the models and blobs of a lower store are
found and opened there. Writes, removals and clean-ups change the upper store only. A model of the
upper store hides one of the same name below, and an upper store's blob is opened before the same
blob below. The lower stores are searched in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from blobstore.errors import BlobStoreError, NotFoundError, UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.oci import Signature
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Blobs,
    Expected,
    Home,
    How,
    Manifests,
    Readable,
    Removal,
    Session,
    Signatures,
    unique,
)

_T = TypeVar("_T")


@dataclass(eq=False)
class _Blobs(Blobs):
    """The blobs of several homes, each found in the first that has it. See `Blobs`.

    ``counted``: the homes whose blobs are not missing (None: all).
    """

    _homes: Sequence[Readable]
    _counted: Sequence[Readable] | None = None

    def open(self, descriptor: Descriptor) -> OpenReader:
        return _first([home.blobs.open for home in self._homes], descriptor)

    def read(self, descriptor: Descriptor) -> bytes:
        return _first([home.blobs.read for home in self._homes], descriptor)

    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> Sequence[Header | None]:
        # Those of the first home that has one of the blobs.
        *others, last = (home.blobs for home in self._homes)
        for blobs in others:
            first = descriptors[:1]
            if not blobs.missing(first) or len(blobs.missing(descriptors)) < len(set(descriptors)):
                return blobs.headers(descriptors, budget)
        return last.headers(descriptors, budget)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        left = unique(descriptors)
        for home in self._homes if self._counted is None else self._counted:
            left = home.blobs.missing(left)
        return left

    def digests(self) -> set[str]:
        return set().union(*(home.blobs.digests() for home in self._homes))


@dataclass(eq=False)
class _Manifests(Manifests):
    _homes: Sequence[Readable]

    def names(self) -> list[ModelName]:
        # A name hides those below that differ from it only in case.
        seen: dict[tuple[str, ...], ModelName] = {}
        for home in self._homes:
            added = [name for name in home.manifests.names() if name.folded not in seen]
            seen |= {name.folded: name for name in added}
        return sorted(seen.values())

    def home_of(self, name: ModelName) -> Readable:
        """Return the first home that has a model of the name; the first of all if none has."""
        for home in self._homes:
            with suppress(NotFoundError):
                home.find(name)
                return home
        return self._homes[0]

    def stored_name(self, name: ModelName) -> ModelName:
        return self.home_of(name).manifests.stored_name(name)

    def text(self, name: ModelName) -> bytes:
        return self.home_of(name).manifests.text(name)

    def modified_at(self, name: ModelName) -> datetime | None:
        return self.home_of(name).manifests.modified_at(name)


class _Signatures:
    def __init__(self, upper: Signatures, homes: Sequence[Readable]) -> None:
        self._homes = homes
        self.add = upper.add

    def read(self, name: ModelName, digest: Digest) -> list[Signature]:
        signatures: list[Signature] = []
        for home in self._homes:
            if home.signatures is not None:
                signatures += (
                    one for one in home.signatures.read(name, digest) if one not in signatures
                )
        return signatures


@dataclass(eq=False)
class _Session:
    """Writes to the upper home; blobs of the lower homes count as present. See `Session`."""

    _upper: Session
    _lower: _Blobs
    _copies_up: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upper, name)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        missing = self._upper.missing(descriptors)
        return missing if self._copies_up else self._lower.missing(missing)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if not self._copies_up and not self._lower.missing([descriptor]):
            return How.THERE
        return self._upper.add(descriptor, reader)

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        # A blob that a lower home has is not written, or is copied up.
        missing = {blob.digest for blob in self._lower.missing(manifest.descriptors)}
        there = [blob for blob in unique(manifest.descriptors) if blob.digest not in missing]
        if not self._copies_up:
            below = {*below, *(blob.digest for blob in there)}
        for descriptor in there if self._copies_up else ():
            with self._lower.open(descriptor) as reader:
                self._upper.add(descriptor, reader)
        return self._upper.publish(name, manifest, expected=expected, below=below)


class LayeredStore(Home):
    """An upper home over lower ones, which are only read. See `Home`.

    A model that only a lower home has can be copied, but not removed or moved (UsageError).

    ``copies_up``: the upper home gets all blobs of a model that is written, also those that a lower
    one has.

    Raises: UsageError if one store is given twice.
    """

    def __init__(self, upper: Home, lower: Sequence[Readable], *, copies_up: bool = False) -> None:
        self._upper = upper
        self.lower = tuple(lower)
        self.address = upper.address
        self.root, self.shares, self.newer = upper.root, upper.shares, upper.newer
        self.packed = upper.packed  # those of lower stores are not read
        self.summaries = upper.summaries  # keyed by manifests, in whichever home these are
        homes = (upper, *self.lower)
        addresses = [home.address for home in homes]
        if len(set(addresses)) < len(homes) and "memory" not in addresses:
            raise UsageError(f"a store is given twice: {', '.join(addresses)}")
        self.blobs = _Blobs(homes, [upper] if copies_up else None)
        self.manifests: _Manifests = _Manifests(homes)
        kept = upper.signatures
        self.signatures = None if kept is None else _Signatures(kept, homes)
        self._copies_up = copies_up

    @property
    def upper(self) -> Home:
        return self._upper

    def home_of(self, name: str | ModelName) -> Readable:
        return self.manifests.home_of(self.find(name))

    def find(self, name: str | ModelName) -> ModelName:
        # The upper home's error is raised if no home has the model.
        parsed = ModelName.of(name)
        return self.manifests.home_of(parsed).find(parsed)

    def whole(self, name: str | ModelName) -> ModelName:
        return self.find(name) if self.holder(name) is self else self.upper.whole(name)

    def target(self, name: str | ModelName) -> ModelName:
        # In the spelling of the model that it replaces or hides.
        return self.upper.target(self.manifests.stored_name(ModelName.of(name)))

    @contextmanager
    def session(self, *, name: ModelName | None = None) -> Iterator[Any]:
        with ExitStack() as stack:
            for home in self.lower:
                stack.enter_context(home.lease())
            session = stack.enter_context(self.upper.session(name=name))
            yield _Session(session, _Blobs(self.lower), self._copies_up)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        with ExitStack() as stack:
            held = [stack.enter_context(home.lease()) for home in (self.upper, *self.lower)]
            yield all(held)

    def prefetch(self, descriptors: Iterable[Descriptor]) -> None:
        homes = (self.upper, *self.lower)
        left = unique(descriptors)
        for home in homes if any(home.has_cache for home in homes) else ():
            missing = home.blobs.missing(left)
            gone = {blob.digest for blob in missing}
            home.prefetch([blob for blob in left if blob.digest not in gone])
            left = missing

    def remove(self, name: str | ModelName) -> Removal:
        return self.upper.remove(name if self._is_packed(name) else self._own(name))

    def _give_name(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool, moves: bool
    ) -> ModelName:
        if self._is_packed(source):
            return (self.upper.move if moves else self.upper.copy)(source, target)
        return super()._give_name(
            self._own(source) if moves else source, target, replace=replace, moves=moves
        )

    def _is_packed(self, name: str | ModelName) -> bool:
        with suppress(NotFoundError):
            return self.upper.holder(name) is not self.upper
        return False

    def _own(self, name: str | ModelName) -> ModelName:
        stored = self.find(name)
        if (home := self.manifests.home_of(stored)) is not self.upper:
            message = f"{stored} is in {home.address}, a lower store, which is read-only"
            raise UsageError(message, model=str(stored), hint="Change it there.")
        return stored


def _first(ask: Iterable[Callable[[Descriptor], _T]], descriptor: Descriptor) -> _T:
    """Return the first answer that is not an error.

    Raises: the first error that is not a NotFoundError, else the first of all.
    """
    failures: list[BlobStoreError] = []
    for answer in ask:
        try:
            return answer(descriptor)
        except BlobStoreError as error:
            failures.append(error)
    others = (error for error in failures if not isinstance(error, NotFoundError))
    raise next(others, failures[0])
