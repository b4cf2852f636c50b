"""A layered store: a store of one's own over others that are only read.

A model folder that many share is used where it lies, and never copied: what a lower store has is
found and opened there. Everything that is written, removed or cleaned up concerns the upper store
only. A model of the upper store hides one of the same name below, and an upper store's blob is
opened before the same blob below. The order of the lower stores counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from typing import TypeVar

from blobstore.errors import BlobStoreError, ConflictError, NotFoundError, UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Earlier,
    Expected,
    Finished,
    Home,
    How,
    Removal,
    Session,
    Summaries,
    Writer,
)

_T = TypeVar("_T")


class LayeredBlobs:
    """The blobs of several homes, each found in the first that has it. See `Blobs`.

    ``counted``: the homes whose blobs are not missing (None: all).
    """

    def __init__(self, homes: Sequence[Home], counted: Sequence[Home] | None = None) -> None:
        self._homes = homes
        self._counted = homes if counted is None else counted

    def open(self, descriptor: Descriptor) -> OpenReader:
        """See `Blobs`: the first home that has the blob whole."""
        return _first([(home.blobs.open, descriptor) for home in self._homes])

    def read(self, descriptor: Descriptor) -> bytes:
        """See `Blobs`."""
        return _first([(home.blobs.read, descriptor) for home in self._homes])

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`: what no home has that counts."""
        left = list({descriptor.digest: descriptor for descriptor in descriptors}.values())
        for home in self._counted:
            left = home.blobs.missing(left)
        return left

    def digests(self) -> set[str]:
        """See `Blobs`."""
        return set().union(*(home.blobs.digests() for home in self._homes))


class LayeredManifests:
    """The manifests of several homes. See `Manifests`."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self._homes = homes

    def names(self) -> list[ModelName]:
        """See `Manifests`: a name that differs from one above only in case is hidden."""
        seen: dict[tuple[str, ...], ModelName] = {}
        for home in self._homes:
            above = set(seen)
            seen |= {
                name.folded: name for name in home.manifests.names() if name.folded not in above
            }
        return sorted(seen.values())

    def home_of(self, name: ModelName) -> Home:
        """Return the first home that has a model of the name; the first of all where none has."""
        for home in self._homes:
            try:
                home.find(name)
            except NotFoundError:
                continue
            return home
        return self._homes[0]

    def spelled(self, name: ModelName) -> ModelName:
        """See `Manifests`."""
        return self.home_of(name).manifests.spelled(name)

    def read(self, name: ModelName) -> Manifest:
        """See `Manifests`."""
        return self.home_of(name).manifests.read(name)

    def text(self, name: ModelName) -> bytes:
        """See `Manifests`."""
        return self.home_of(name).manifests.text(name)

    def modified(self, name: ModelName) -> datetime | None:
        """See `Manifests`."""
        return self.home_of(name).manifests.modified(name)


class LayeredSession:
    """What is written to the upper home; blobs of the lower ones count as there. See `Session`."""

    def __init__(self, upper: Session, lower: LayeredBlobs, *, copies_up: bool) -> None:
        self._upper = upper
        self._lower = lower
        self._copies_up = copies_up

    @property
    def earlier(self) -> Earlier | None:
        """See `Session`."""
        return self._upper.earlier

    def writer(self, size: int) -> Writer:
        """See `Session`."""
        return self._upper.writer(size)

    def put(self, data: bytes) -> Finished:
        """See `Session`."""
        return self._upper.put(data)

    def copy(self, reader: OpenReader) -> Finished:
        """See `Session`."""
        return self._upper.copy(reader)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """See `Session`: a blob that a lower home has is not copied."""
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
        """See `Session`: a blob that a lower home has is not written, or is copied up."""
        missing = {blob.digest for blob in self._lower.missing(manifest.descriptors)}
        there = {blob.digest: blob for blob in manifest.descriptors if blob.digest not in missing}
        if self._copies_up:
            for descriptor in there.values():
                with self._lower.open(descriptor) as reader:
                    self._upper.add(descriptor, reader)
            there = {}
        return self._upper.publish(name, manifest, expected=expected, below={*there, *below})


class LayeredStore:
    """An upper home over lower ones, which are only read. See `Home`.

    ``copies_up``: a model that is written gets all of its blobs in the upper home, also those that
    a lower one has.
    """

    def __init__(self, upper: Home, lower: Sequence[Home], *, copies_up: bool = False) -> None:
        """Raises: UsageError when one store is given twice."""
        self.upper = upper
        self.lower = tuple(lower)
        homes = (upper, *self.lower)
        if len({home.address for home in homes}) < len(homes) and not any(
            home.address == "memory" for home in homes
        ):
            raise UsageError(f"a store is given twice: {', '.join(home.address for home in homes)}")
        self.blobs = LayeredBlobs(homes, [upper] if copies_up else None)
        self.manifests = LayeredManifests(homes)
        self._copies_up = copies_up

    @property
    def address(self) -> str:
        """The upper home's."""
        return self.upper.address

    @property
    def summaries(self) -> Summaries | None:
        """The upper home's: they are known by manifests, wherever these lie."""
        return self.upper.summaries

    def home_of(self, name: str | ModelName) -> Home:
        """Return the home that a model is read from. Raises: as `find`."""
        return self.manifests.home_of(self.find(name))

    def find(self, name: str | ModelName) -> ModelName:
        """See `Home`. Raises the upper home's error when no home has the model."""
        parsed = ModelName.of(name)
        return self.manifests.home_of(parsed).find(parsed)

    def target(self, name: str | ModelName) -> ModelName:
        """See `Home`: spelled as the model is that it replaces or hides."""
        return self.upper.target(self.manifests.spelled(ModelName.of(name)))

    @contextmanager
    def session(self, source: str = "") -> Iterator[LayeredSession]:
        """See `Home`."""
        with ExitStack() as stack:
            for home in self.lower:
                stack.enter_context(home.lease())
            session = stack.enter_context(self.upper.session(source))
            yield LayeredSession(session, LayeredBlobs(self.lower), copies_up=self._copies_up)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """See `Home`: one of all homes."""
        leases: list[AbstractContextManager[bool]] = [
            home.lease() for home in (self.upper, *self.lower)
        ]
        with ExitStack() as stack:
            held = [stack.enter_context(lease) for lease in leases]
            yield all(held)

    def remove(self, name: str | ModelName) -> Removal:
        """See `Home`. Raises: UsageError for a model that only a lower home has."""
        return self.upper.remove(self._own(name))

    def copy(self, source: str | ModelName, target: str | ModelName) -> ModelName:
        """Give a model, wherever it lies, a name in the upper home.

        Raises: as `find`; UsageError when that is its own.
        """
        old, new = self.find(source), self.target(target)
        if old == new and self.manifests.home_of(old) is self.upper:
            raise UsageError(f"{old} is its own copy", model=str(old))
        with self.session() as session:
            session.publish(new, self.manifests.read(old))
        return new

    def move(
        self, source: str | ModelName, target: str | ModelName, *, replace: bool = False
    ) -> ModelName:
        """Rename a model of the upper home: the new name comes first, then the old one goes.

        Raises: as `copy`; UsageError for a model that only a lower home has, and when there is
        another model of that name and not ``replace``.
        """
        old, new = self._own(source), self.target(target)
        manifest = self.manifests.read(old)
        with self.session() as session:
            try:
                session.publish(new, manifest, expected=None if replace else (None, manifest.raw))
            except ConflictError as error:
                hint = "Remove it first, or replace it: replace=True."
                raise UsageError(
                    f"model {new} already exists", model=str(new), hint=hint
                ) from error
        if old != new:
            self.upper.remove(old)
        return new

    def _own(self, name: str | ModelName) -> ModelName:
        found = self.find(name)
        if (home := self.manifests.home_of(found)) is not self.upper:
            message = f"{found} lies in {home.address}, which is only read"
            raise UsageError(message, model=str(found), hint="Change it there.")
        return found


def _first(asked: list[tuple[Callable[[Descriptor], _T], Descriptor]]) -> _T:
    """Return the first answer that is no error.

    Else raise an error that says more than that a blob is missing.
    """
    failure: BlobStoreError | None = None
    for ask, descriptor in asked:
        try:
            return ask(descriptor)
        except BlobStoreError as error:
            if failure is None or isinstance(failure, NotFoundError):
                failure = error
    raise failure or NotFoundError("there is no home")
