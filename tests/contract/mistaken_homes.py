"""Stores in memory, each with one mistake: `StoreTests` must fail on each (test_homes.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blobstore.errors import InvalidNameError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore, _Blobs, _Manifests, _Session
from blobstore.store.ports import How, Removal
from blobstore.testing import StoreTests


class ManifestFirst(_Session):
    def publish(self, name: ModelName, manifest: Manifest, **options: Any) -> set[Digest]:
        if options.get("expected") is None:
            self._store.manifests.all[name] = manifest.raw
        return super().publish(name, manifest, **options)


class BelievesDigests(_Session):
    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if not self.missing([descriptor]):
            return How.THERE
        self._made[descriptor.digest] = reader.read(0, reader.size)
        return How.COPIED


class LosesUpdates(_Session):
    def publish(self, name: ModelName, manifest: Manifest, **options: Any) -> set[Digest]:
        return super().publish(name, manifest, **options | {"expected": None})


class EncodesAgain(_Session):
    def publish(self, name: ModelName, manifest: Manifest, **options: Any) -> set[Digest]:
        again = Manifest(config=manifest.config, layers=manifest.layers)
        return super().publish(name, again, **options)


class VisibleAtOnce(_Session):
    def _add(self, data: bytes) -> Descriptor:
        descriptor = super()._add(data)
        self._store.blobs.all[descriptor.digest] = data
        return descriptor


class TellsCase(_Manifests):
    def stored_name(self, name: ModelName) -> ModelName:
        return name


class AnswersShort(_Blobs):
    def open(self, descriptor: Descriptor) -> BytesReader:
        reader = super().open(descriptor)
        vars(reader)["read"] = lambda offset, length: reader._data[offset : offset + length]
        return reader


class RemovesShared(MemoryStore):
    def remove(self, name: str | ModelName) -> Removal:
        found = self.find(name)
        removed = self.manifests.read(found).descriptors
        del self.manifests.all[found]
        for blob in removed:
            self.blobs.all.pop(blob.digest, None)
        return Removal(removed)


class NamesAreFiles(MemoryStore):
    """It writes names to a folder, before they are checked."""

    folder: Path

    def find(self, name: str | ModelName) -> ModelName:
        if isinstance(name, str):
            try:
                ModelName.parse(name)
            except InvalidNameError:
                (self.folder / "escaped").write_text(name)
        return super().find(name)


class _Mistaken(StoreTests):
    mistake: type

    def new_home(self, folder: Path) -> MemoryStore:
        mistake = self.mistake
        home = mistake() if issubclass(mistake, MemoryStore) else MemoryStore()
        if issubclass(mistake, _Session):

            @contextmanager
            def session(*, name: ModelName | None = None) -> Iterator[_Session]:
                yield mistake(home)

            vars(home)["session"] = session
        elif issubclass(mistake, _Blobs):
            home.blobs = mistake()
        elif issubclass(mistake, _Manifests):
            home.manifests = mistake()
        vars(home)["folder"] = folder
        return home


MISTAKES = (
    ManifestFirst,
    BelievesDigests,
    LosesUpdates,
    EncodesAgain,
    VisibleAtOnce,
    TellsCase,
    AnswersShort,
    RemovesShared,
    NamesAreFiles,
)
for _mistake in MISTAKES:
    globals()[f"Test{_mistake.__name__}"] = type(
        f"Test{_mistake.__name__}", (_Mistaken,), {"mistake": _mistake}
    )
