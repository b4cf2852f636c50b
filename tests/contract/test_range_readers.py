"""What every OpenReader does: exact ranges, full buffers, ShortReadError beyond the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from support.retry_policies import patient_policy
from support.servers import Server, part, server as run_server

from blobstore.errors import (
    CorruptDataError,
    NotFoundError,
    ShortReadError,
    StorageError,
)
from blobstore.io.http.remote_files import Remote
from blobstore.io.objects import open_bucket
from blobstore.io.ranges import BytesReader, FileReader, OpenReader
from blobstore.source.folders import BucketFolder

DATA = bytes(range(256)) * 40
MakeReader = Callable[[bytes], OpenReader]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A web server."""
    with run_server() as running:
        yield running


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    """A client."""
    with Remote(retry_policy=patient_policy(backoff_s=0.001)) as made:
        yield made


@pytest.fixture(params=["bytes", "file", "http", "http in short replies", "bucket"])
def make_reader(
    request: pytest.FixtureRequest, tmp_path: Path, server: Server, remote: Remote
) -> MakeReader:
    """A function that returns a reader over some bytes, once for each implementation."""

    def make(data: bytes) -> OpenReader:
        if request.param == "bytes":
            return BytesReader(data)
        if request.param.startswith("http"):
            longest = len(data) // 5 if "short" in request.param else None
            server.play(lambda asked: part(asked, data, longest=longest))
            reader = remote.open(server.url)
            reader.close()  # its first bytes are not kept then
            return reader
        if request.param == "bucket":
            bucket = open_bucket(f"memory://{uuid4()}")
            bucket.put("data", data)
            return BucketFolder(bucket).open("data")
        path = tmp_path / "data"
        path.write_bytes(data)
        return FileReader(path)

    return make


def test_reads_exactly_what_is_asked_for(make_reader: MakeReader) -> None:
    reader, size = make_reader(DATA), len(DATA)
    assert reader.size == size
    for offset, length in ((0, 0), (0, 1), (17, 300), (0, size), (size, 0), (size - 1, 1)):
        assert reader.read(offset, length) == DATA[offset : offset + length]
        buffer = bytearray(length)
        reader.readinto(offset, memoryview(buffer))
        assert buffer == DATA[offset : offset + length]


def test_reading_beyond_the_end_is_an_error(make_reader: MakeReader) -> None:
    reader, size = make_reader(DATA), len(DATA)
    for offset, length in ((0, size + 1), (size, 1), (2**62, 1), (0, 2**40)):
        with pytest.raises(ShortReadError, match="ends before byte"):
            reader.read(offset, length)


def test_a_file_that_shrinks_gives_no_short_answer(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    reader = FileReader(path)
    os.truncate(path, 100)
    with pytest.raises(ShortReadError):
        reader.read(50, 100)
    with pytest.raises(CorruptDataError, match="changed"):
        reader.check_unchanged()


def test_links_are_followed_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    (tmp_path / "link").symlink_to("data")
    assert FileReader(tmp_path / "link").size == len(DATA)
    with pytest.raises(StorageError):
        FileReader(tmp_path / "link", follow=False)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(StorageError, match=r"regular file|directory"):
            FileReader(path)
    with pytest.raises(NotFoundError):
        FileReader(tmp_path / "missing")
