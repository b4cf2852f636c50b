"""Removing trees, and never what links lead to; readers that are made of others, and digests."""

import hashlib
import mmap
import os
import random
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import CorruptDataError, ShortReadError
from blobstore.io import durable
from blobstore.io.copying import clone, copy_around, link, remove_tree
from blobstore.io.durable import PAGE, open_direct
from blobstore.io.ranges import BytesReader, FileReader, JoinedReader, Segment, digests_of
from blobstore.names import Digest

DATA = random.Random(15).randbytes(40_000)


def test_what_is_not_a_folder_is_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    for folder in (tmp_path / "tree", tmp_path / "tree" / "in"):
        folder.mkdir()
        (folder / "link").symlink_to(outside)
        (folder / "dangling").symlink_to("nowhere")
        os.mkfifo(folder / "pipe")
    (tmp_path / "link").symlink_to("outside")
    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "link")
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "missing")
    assert {path.name for path in tmp_path.rglob("*")} == {"outside", "file", "link"}


def test_a_file_that_was_replaced_is_not_linked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    with FileReader(tmp_path / "a") as reader:
        assert link(reader, tmp_path / "b")
        (tmp_path / "b").unlink()
        (tmp_path / "c").write_bytes(b"two")
        (tmp_path / "c").rename(tmp_path / "a")
        assert not link(reader, tmp_path / "b")
    with BytesReader(b"one", str(tmp_path / "a")) as memory:
        assert not link(memory, tmp_path / "b")
        assert not clone(memory, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def copied_around(folder: Path, start: int, at: int, length: int, *, has_direct: bool) -> bytes:
    """Return a file of 40,000 "x" into which bytes of another file were copied."""
    source, target = folder / "source", folder / "target"
    source.write_bytes(DATA)
    target.write_bytes(b"x" * 40_000)
    fd = os.open(target, os.O_RDWR)
    direct = open_direct(target) if has_direct else -1
    buffer = memoryview(mmap.mmap(-1, 2 * PAGE))
    try:
        with FileReader(source) as reader:
            copy_around(reader, start, (fd, direct), target, at, length, buffer)
    finally:
        for each in {fd, direct} - {-1}:
            os.close(each)
    return target.read_bytes()


@pytest.mark.parametrize("has_direct", [True, False])
def test_bytes_are_copied_around_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_direct: bool
) -> None:
    monkeypatch.setattr(durable, "DIRECT_FROM", 1)
    for start, at, length in ((0, 0, 8192), (0, 1, 8193), (136, 5003, 30_000)):
        found = copied_around(tmp_path, start, at, length, has_direct=has_direct)
        rest = b"x" * (40_000 - at - length)
        assert found == b"x" * at + DATA[start : start + length] + rest


def test_a_source_that_ends_before_the_copy_does_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShortReadError, match=r"target.*40,001"):
        copied_around(tmp_path, 30_000, 0, 10_001, has_direct=False)


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 40), st.integers(0, 40))
def test_a_joined_reader_reads_parts_as_one(parts: list[bytes], begin: int, length: int) -> None:
    whole = b"".join(data[len(data) // 2 :] for data in parts)
    segments = [
        Segment(len(data) - len(data) // 2, partial(BytesReader, data), len(data) // 2)
        for data in parts
    ]
    reader = JoinedReader("joined", segments)
    assert reader.size == len(whole)
    if begin + length <= len(whole):
        assert reader.read(begin, length) == whole[begin : begin + length]
    else:
        with pytest.raises(ShortReadError):
            reader.read(begin, length)
    assert reader.digest() == Digest.of(whole)


# Digests

DATA_RANGES = random.Random(5).randbytes(3_000_001)


def test_digests_of_files_of_any_size_are_those_of_hashlib() -> None:
    sizes = (0, 1, 64, 2**18 + 1, len(DATA_RANGES))
    names = [f"blob {size}" for size in sizes]
    seen: list[tuple[int, str]] = []
    found = digests_of(
        [BytesReader(DATA_RANGES[:size]) for size in sizes],
        names,
        progress=lambda nbytes, name: seen.append((nbytes, name)),
    )
    assert found == [Digest(hashlib.sha256(DATA_RANGES[:size]).hexdigest()) for size in sizes]
    for name, size in zip(names, sizes, strict=True):
        assert sum(nbytes for nbytes, blob in seen if blob == name) == size
    assert digests_of([]) == []


def test_a_file_that_can_not_be_read_is_an_error_of_its_own() -> None:
    class Failing(BytesReader):
        def readinto(self, offset: int, buffer: memoryview) -> None:
            if offset:
                raise CorruptDataError("a bad sector")
            super().readinto(offset, buffer)

    first, failed, last = digests_of(
        [BytesReader(DATA_RANGES), Failing(DATA_RANGES), BytesReader(DATA_RANGES)]
    )
    assert first == last == Digest.of(DATA_RANGES)
    assert isinstance(failed, CorruptDataError)
