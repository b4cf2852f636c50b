"""Stores in memory, each with one mistake: `StoreTests` must fail on each (test_homes.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import OpenReader
from blobstore.names import ModelName
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import How, Removal
from blobstore.testing import StoreTests


class _Home(MemoryStore):
    def session(self, *, name: ModelName | None = None) -> AbstractContextManager[Any]:
        with super().session(name=name) as session:
            self.mistake(session)
        return nullcontext(session)

    def mistake(self, session: Any) -> None:
        """Replace a method of a session."""


class ManifestFirst(_Home):
    def mistake(self, session: Any) -> None:
        real = session.publish

        def publish(name: ModelName, manifest: Manifest, **options: Any) -> Any:
            if options.get("expected") is None:
                self.manifests.all[name] = manifest.raw
            return real(name, manifest, **options)

        session.publish = publish


class BelievesDigests(_Home):
    def mistake(self, session: Any) -> None:
        real = session.add

        def add(descriptor: Descriptor, reader: OpenReader) -> How:
            how: How = real(session.copy(reader), reader)
            self.blobs.all[descriptor.digest] = reader.read(0, reader.size)
            return how

        session.add = add


class LosesUpdates(_Home):
    def mistake(self, session: Any) -> None:
        real = session.publish
        session.publish = lambda name, manifest, **_expected: real(name, manifest)


class EncodesAgain(_Home):
    def mistake(self, session: Any) -> None:
        real = session.publish

        def publish(name: ModelName, manifest: Manifest, **options: Any) -> Any:
            again = Manifest(config=manifest.config, layers=manifest.layers)
            return real(name, again, **options)

        session.publish = publish


class TellsCase(_Home):
    def find(self, name: str | ModelName) -> ModelName:
        wanted = ModelName.of(name)
        self.manifests.text(wanted)
        return wanted


class RemovesShared(_Home):
    def remove(self, name: str | ModelName) -> Removal:
        found = self.find(name)
        removed = self.manifests.read(found).descriptors
        del self.manifests.all[found]
        for blob in removed:
            self.blobs.all.pop(blob.digest, None)
        return Removal(removed)


MISTAKES = (
    ManifestFirst,
    BelievesDigests,
    LosesUpdates,
    EncodesAgain,
    TellsCase,
    RemovesShared,
)
for _mistake in MISTAKES:
    globals()[f"Test{_mistake.__name__}"] = type(
        f"Test{_mistake.__name__}",
        (StoreTests,),
        {"new_home": lambda _self, _folder, mistake=_mistake: mistake()},
    )
