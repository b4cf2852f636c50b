"""Stores in memory, each with one mistake.

test_mistaken_homes.py runs `StoreTests` on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import HeaderError, InvalidNameError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.safetensors.header import header_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store import memory
from blobstore.store.memory import MemoryStore, _Blobs, _Manifests, _Session
from blobstore.store.ports import Expected, How, Removal
from blobstore.testing import StoreTests


class ReadsHeadersOfOtherSizes(_Blobs):
    def headers(self, descriptors: Sequence[Descriptor], budget: Budget) -> list[Any]:
        headers: list[Any] = []
        for descriptor in descriptors:
            data = self.all.get(descriptor.digest, b"")
            try:
                headers.append(header_of(BytesReader(data), budget))
            except HeaderError:
                headers.append(None)
        return headers


class Mistaken(MemoryStore):
    """A home whose session is another one."""

    session_class: type[_Session] = _Session

    @contextmanager
    def session(self, *, name: ModelName | None = None) -> Iterator[_Session]:
        yield self.session_class(self)


class ManifestFirst(_Session):
    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        if expected is None:
            self._store.manifests.all[name] = manifest.raw
        return super().publish(name, manifest, expected=expected, below=below)


class NoSizeCheck(_Session):
    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "check_blob_size", lambda *_: None)
            return super().publish(name, manifest, expected=expected, below=below)


class BelievesDigests(_Session):
    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if not self.missing([descriptor]):
            return How.THERE
        self._made[descriptor.digest] = reader.read(0, reader.size)
        return How.COPIED


class LosesUpdates(_Session):
    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        return super().publish(name, manifest, below=below)


class EncodesAgain(_Session):
    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        return super().publish(
            name,
            Manifest(config=manifest.config, layers=manifest.layers),
            expected=expected,
            below=below,
        )


class VisibleAtOnce(_Session):
    def _add(self, data: bytes) -> Descriptor:
        descriptor = super()._add(data)
        self._store.blobs.all[descriptor.digest] = data
        return descriptor


class PublishesAll(_Session):
    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        created = super().publish(name, manifest, expected=expected, below=below)
        self._store.blobs.all |= self._made
        return created


class TellsCase(_Manifests):
    def spelled(self, name: ModelName) -> ModelName:
        return name


class ForgetsEmptyBlobs(_Blobs):
    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        by_digest = {descriptor.digest: descriptor for descriptor in descriptors}
        return [blob for digest, blob in by_digest.items() if not self.all.get(digest)]


class AnswersShort(_Blobs):
    def open(self, descriptor: Descriptor) -> BytesReader:
        reader = super().open(descriptor)
        reader.read = lambda offset, length: bytes(reader._data[offset : offset + length])  # type: ignore[method-assign]  # a mistake
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


def _with_session(session: type[_Session]) -> MemoryStore:
    home = Mistaken()
    home.session_class = session
    return home


def _with(**parts: object) -> MemoryStore:
    home = MemoryStore()
    for name, part in parts.items():
        setattr(home, name, part)
    return home


def _names_are_files(folder: Path) -> MemoryStore:
    home = NamesAreFiles()
    home.folder = folder
    return home


MISTAKES = {
    "a manifest before its blobs": lambda _: _with_session(ManifestFirst),
    "no size check": lambda _: _with_session(NoSizeCheck),
    "bytes from elsewhere are believed": lambda _: _with_session(BelievesDigests),
    "a lost update": lambda _: _with_session(LosesUpdates),
    "a manifest is encoded again": lambda _: _with_session(EncodesAgain),
    "blobs are visible at once": lambda _: _with_session(VisibleAtOnce),
    "what no manifest names becomes visible": lambda _: _with_session(PublishesAll),
    "names differ in case": lambda _: _with(manifests=TellsCase()),
    "an empty blob is never there": lambda _: _with(blobs=ForgetsEmptyBlobs()),
    "the header of a blob of another size": lambda _: _with(blobs=ReadsHeadersOfOtherSizes()),
    "a read answers short": lambda _: _with(blobs=AnswersShort()),
    "removal takes shared blobs": lambda _: RemovesShared(),
    "a name escapes": _names_are_files,
}


def _class_of(mistake: str) -> type[StoreTests]:
    def new_home(self: StoreTests, folder: Path) -> MemoryStore:
        return MISTAKES[mistake](folder)

    return type(
        "Test" + mistake.title().replace(" ", ""),
        (StoreTests,),
        {"new_home": new_home, "__doc__": mistake},
    )


for _number, _mistake in enumerate(MISTAKES):
    globals()[f"TestMistake{_number}"] = _class_of(_mistake)
