"""What the tests of homes share: a home for each test, and models of a few bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Home, Session

SIZES = (0, 1, 511, 4095, 4096, 4097, 65_537, 2**20, 2**20 + 1)
"""Of blobs: around pages, sectors and buffers."""
HOSTILE = (
    "",
    ".",
    "..",
    "../m",
    "/etc/passwd",
    "a/b/c/d/e",
    "m:",
    "m:..",
    "m\\n",
    "m\0",
    "a//b",
    "\u212a",
)
"""Names that are none, or that would lead elsewhere."""
NAMES = ("m", "m:tag", "ns/m:tag", "host.example/ns/m:tag", "host.example:5000/ns/m:tag")
M, N = ModelName.parse("m"), ModelName.parse("n")


def data_of(size: int, seed: int = 0) -> bytes:
    """Return ``size`` bytes, the same for every call."""
    return random.Random(f"{size} {seed}").randbytes(size)


def descriptor_of(data: bytes, name: str | None = None) -> Descriptor:
    """Return what a manifest says of a blob."""
    return Descriptor(
        media_type="application/octet-stream", digest=Digest.of(data), size=len(data), name=name
    )


def manifest_of(*blobs: bytes) -> Manifest:
    """Return a manifest with a layer for each blob."""
    return Manifest(
        layers=tuple(descriptor_of(data, f"layer{number}") for number, data in enumerate(blobs))
    )


def commit(home: Home, name: str, *blobs: bytes, expected: Any = None) -> set[Digest]:
    """Write a model of ``blobs`` and publish it; return the digests that are new."""
    with home.session() as session:
        for data in blobs:
            session.put(data)
        return session.publish(home.target(name), manifest_of(*blobs), expected=expected)


def blobs_of(home: Home, name: str) -> list[bytes]:
    """Return the bytes of a model's blobs, checked against their digests."""
    return [home.blobs.read(layer) for layer in home.manifests.read(home.find(name)).layers]


class HomeTests:
    """Tests of one home each."""

    def new_home(self, folder: Path) -> Home:
        """Return a new, empty home; ``folder`` is an empty folder for it."""
        raise NotImplementedError

    def other_reader(self, home: Home) -> Home:
        """Return the same home as another process would see it; by default the home itself."""
        return home

    @pytest.fixture
    def home(self, tmp_path: Path) -> Home:
        """The home under test."""
        return self.new_home(tmp_path)

    @pytest.fixture
    def session(self, home: Home) -> Iterator[Session]:
        """A session of it."""
        with home.session() as session:
            yield session
