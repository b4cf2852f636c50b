"""Tests of what a home does with models that come from elsewhere, and of transfers that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    NotFoundError,
)
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home, How
from blobstore.store.transfer import transfer
from blobstore.testing.homes import (
    HomeTests,
    M,
    blobs_of,
    commit,
    data_of,
    descriptor_of,
    manifest_of,
)


class TransferTests(HomeTests):
    """Models from another home, and to it."""

    # Faults

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_reader_that_fails(self, home: Home, at: int) -> None:
        blobs = [data_of(3000, number) for number in range(3)]
        with suppress(BlobStoreError), home.session() as session:
            for number, data in enumerate(blobs):
                reader = _Failing(data) if number == at else BytesReader(data)
                session.add(descriptor_of(data), reader)
            session.publish(M, manifest_of(*blobs))
        assert home.manifests.names() == []
        commit(home, "m", *blobs)
        assert blobs_of(home, "m") == blobs

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_transfer_that_fails_goes_on(self, home: Home, at: int) -> None:
        blobs = [data_of(3000, number) for number in range(3)]
        source = MemoryStore()
        commit(source, "m", *blobs)
        lost = source.blobs.open(descriptor_of(blobs[at])).read(0, 3000)
        source.blobs.drop(Digest.of(blobs[at]))
        with pytest.raises(NotFoundError):
            transfer(["m"], source, home, jobs=1)
        assert home.manifests.names() == []
        source.blobs.keep({Digest.of(lost): lost})
        transfer(["m"], source, home)
        assert blobs_of(home, "m") == blobs

    # Transfer

    def test_transfer_brings_what_is_missing(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one", data_of(100_000), b"one")
        commit(home, "n", b"one")
        told: list[int] = []
        (done,) = transfer(["m"], source, home, progress=lambda nbytes, _: told.append(nbytes))
        assert (done.name, dict(done.blobs)) == (M, {How.THERE: 1, How.COPIED: 1})
        assert sum(told) == 100_000
        assert home.manifests.read(M).raw == source.manifests.read(M).raw
        (again,) = transfer(["m"], source, home)
        assert dict(again.blobs) == {How.THERE: 2}

    def test_transfer_out_and_back(self, home: Home) -> None:
        commit(home, "m", data_of(4097), b"two")
        other = MemoryStore()
        transfer({"m": "elsewhere/n:tag"}, home, other)
        assert blobs_of(other, "elsewhere/n:tag") == [data_of(4097), b"two"]
        home.remove("m")
        transfer({"elsewhere/n:tag": "m"}, other, home)
        assert blobs_of(home, "m") == [data_of(4097), b"two"]

    def test_transfer_refuses_damage(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one", b"two")
        source.blobs.keep({Digest.of(b"two"): b"owt"})
        with pytest.raises(DigestMismatchError):
            transfer(["m"], source, home)
        assert home.manifests.names() == []

    def test_transfer_of_what_is_not_there(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one")
        with pytest.raises(NotFoundError):
            transfer(["m", "n"], source, home)
        assert home.manifests.names() == []


class _Failing(BytesReader):
    """A reader whose bytes can't be read."""

    def read(self, offset: int, length: int) -> bytes:
        """Fail."""
        raise CorruptDataError(f"{self.name}: an I/O error at {offset}, {length}")

    def pieces(self, buffer: memoryview) -> Iterator[memoryview]:
        """Give a part, and fail."""
        yield from list(super().pieces(buffer[:1]))[:1]
        raise CorruptDataError(f"{self.name}: an I/O error")
