"""What every OpenReader does: exact ranges, full buffers, ShortReadError beyond the end."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from support.retry_policies import patient_policy
from support.servers import part, server

from blobstore.errors import CorruptDataError, NotFoundError, ShortReadError, StorageError
from blobstore.io.http.remote_files import Remote
from blobstore.io.objects import open_bucket
from blobstore.io.ranges import BytesReader, FileReader, OpenReader
from blobstore.source.folders import BucketFolder

DATA = bytes(range(256)) * 40


@pytest.fixture(params=["bytes", "file", "http", "http in short replies", "bucket"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenReader]:
    (tmp_path / "data").write_bytes(DATA)
    match request.param:
        case "bytes":
            yield BytesReader(DATA)
        case "file":
            yield FileReader(tmp_path / "data")
        case "bucket":
            bucket = open_bucket(f"memory://{uuid4()}")
            bucket.put("data", DATA)
            yield BucketFolder(bucket).open("data")
        case _:
            longest = len(DATA) // 5 if "short" in request.param else None
            policy = patient_policy(backoff_s=0.001)
            with server() as running, Remote(retry_policy=policy) as remote:
                running.play(lambda asked: part(asked, DATA, longest=longest))
                made = remote.open(running.url)
                made.close()  # its first bytes are not kept then
                yield made


def test_reads_exactly_what_is_asked_for(reader: OpenReader) -> None:
    size = len(DATA)
    assert reader.size == size
    for offset, length in ((0, 0), (0, 1), (17, 300), (0, size), (size, 0), (size - 1, 1)):
        assert reader.read(offset, length) == DATA[offset : offset + length]
        buffer = bytearray(length)
        reader.readinto(offset, memoryview(buffer))
        assert buffer == DATA[offset : offset + length]
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


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "data").touch()
    (tmp_path / "link").symlink_to("data")
    assert FileReader(tmp_path / "link").size == 0
    with pytest.raises(StorageError):
        FileReader(tmp_path / "link", follow=False)
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(StorageError, match=r"regular file|directory"):
            FileReader(path)
    with pytest.raises(NotFoundError):
        FileReader(tmp_path / "missing")
