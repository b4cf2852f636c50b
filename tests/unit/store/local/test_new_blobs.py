"""Blobs that come from a server: what an earlier session has of one is not asked for again."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import RemoteError
from blobstore.io.ranges import BytesReader
from blobstore.store.local.store import Store
from blobstore.testing.blobs import M, descriptor_of, manifest_of


class FromAfar(BytesReader):
    """A reader as of a server: it breaks at a byte, and notes where reading began."""

    is_remote = True

    def __init__(self, data: bytes, breaks_at: int = sys.maxsize) -> None:
        super().__init__(data)
        self.breaks_at = breaks_at
        self.begun: list[int] = []

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        self.begun.append(begin)
        for piece in super().pieces(buffer, begin):
            begin += len(piece)
            if begin > self.breaks_at:
                raise RemoteError("the line is cut")
            yield piece


FAR = random.Random(7).randbytes(5 * 2**20 + 11)


def fetch(store: Store, data: bytes, reader: FromAfar) -> None:
    with store.session("afar") as session:
        try:
            session.add(descriptor_of(data), reader)
        except RemoteError:
            session.keep()
            raise
        session.publish(M, manifest_of(data))


def test_the_beginning_of_a_blob_is_not_asked_for_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(RemoteError):
        fetch(store, FAR, FromAfar(FAR, 3 * 2**20))
    again = FromAfar(FAR)
    fetch(store, FAR, again)
    assert again.begun == [3 * 2**20]
    with store.blobs.open(descriptor_of(FAR)) as reader:
        assert reader.read(0, len(FAR)) == FAR


@pytest.mark.parametrize("wrong", [b"x" * 3 * 2**20, FAR + b"x", b""])
def test_a_wrong_beginning_costs_one_more_time(tmp_path: Path, wrong: bytes) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(RemoteError):
        fetch(store, FAR, FromAfar(FAR, 3 * 2**20))
    (partial,) = (tmp_path / "store" / ".blobstore" / "tmp").rglob("partial-*")
    partial.write_bytes(wrong)
    again = FromAfar(FAR)
    fetch(store, FAR, again)
    assert again.begun[-1] == 0
    with store.blobs.open(descriptor_of(FAR)) as reader:
        assert reader.read(0, len(FAR)) == FAR


def test_a_whole_blob_that_was_not_published_is_only_hashed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(RemoteError):
        fetch(store, FAR, FromAfar(FAR, 3 * 2**20))
    (partial,) = (tmp_path / "store" / ".blobstore" / "tmp").rglob("partial-*")
    partial.write_bytes(FAR)
    again = FromAfar(FAR)
    fetch(store, FAR, again)
    assert again.begun == [len(FAR)]


def test_a_day_old_beginning_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(RemoteError):
        fetch(store, FAR, FromAfar(FAR, 3 * 2**20))
    (partial,) = (tmp_path / "store" / ".blobstore" / "tmp").rglob("partial-*")
    os.utime(partial.parent, (0, 0))
    with store.session():
        pass
    assert not partial.exists()


@pytest.mark.parametrize("data", [FAR, b"a small one"])
def test_a_whole_blob_that_no_journal_has_is_only_hashed(tmp_path: Path, data: bytes) -> None:
    store = Store(tmp_path / "store")
    left = tmp_path / "store" / ".blobstore" / "tmp" / f"1-{'0' * 16}"
    left.mkdir(parents=True)
    (left / descriptor_of(data).digest.file_name).write_bytes(data)
    again = FromAfar(data)
    fetch(store, data, again)
    assert again.begun == [len(data)]
    assert not left.exists()
    with store.blobs.open(descriptor_of(data)) as reader:
        assert reader.read(0, len(data)) == data


def test_a_wrong_whole_blob_is_fetched(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    left = tmp_path / "store" / ".blobstore" / "tmp" / f"1-{'0' * 16}"
    left.mkdir(parents=True)
    (left / descriptor_of(b"one").digest.file_name).write_bytes(b"two")
    fetch(store, b"one", FromAfar(b"one"))
    with store.blobs.open(descriptor_of(b"one")) as reader:
        assert reader.read(0, 3) == b"one"
