"""The log of a streamed import: it is never without what it said."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from blobstore.errors import StorageError
from blobstore.importer.streaming.worklog import LoggedWork, PieceSum, SegmentDone, WorkLog
from blobstore.names import Digest

SEGMENTS = [
    SegmentDone(0, b"state", (PieceSum(3, 0, 10, 7, ((20, 4),)),), ((0, 5, 9),)),
    SegmentDone(2, None, (), (), ((1, Digest("1" * 64)),)),
]
WORK = LoggedWork(SEGMENTS, {3: Digest("2" * 64)})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WorkLog]:
    made = WorkLog(tmp_path)
    made.begin_again(WORK)
    yield made
    made.close()


def test_it_says_what_was_written(log: WorkLog, tmp_path: Path) -> None:
    assert log.read() == WORK
    log.begin_again(WORK.before(1))
    log.append(SEGMENTS[1])
    assert log.read() == WORK
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


def test_a_full_disk_does_not_take_what_it_said(log: WorkLog) -> None:
    full = OSError(errno.ENOSPC, "full")
    with (
        mock.patch("os.write", side_effect=full),
        mock.patch("os.pwrite", side_effect=full),
        pytest.raises(StorageError),
    ):
        log.begin_again(WORK)
    assert log.read() == WORK
