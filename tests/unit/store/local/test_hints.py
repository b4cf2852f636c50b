"""Hints: what was noted is found again, whatever else is in the file.

A line is a hint and never an error.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.names import Digest
from blobstore.store import hints as module
from blobstore.store.hints import HintFile
from blobstore.store.local.blobs import MadeBlob, Stamp

KEYS = [f"{number:064x}" for number in range(3)]


def made(number: int, *, size: int = 100, is_durable: bool = True) -> MadeBlob:
    """Return a blob that was made."""
    digest = Digest.of(b"%d" % number)
    return MadeBlob(digest, size, Stamp(1000 + number, 2**60 + number), is_durable)


def test_a_blob_is_read_back_from_its_text() -> None:
    for blob in (made(0), made(1, size=0), made(2, size=10**15 - 1, is_durable=False)):
        assert MadeBlob.parse(blob.encode()) == blob
    for text in ("", "x", made(0).encode().upper(), made(0).encode() + " 1"):
        assert MadeBlob.parse(text) is None


def test_the_newest_text_of_a_key_counts(tmp_path: Path) -> None:
    file = HintFile(tmp_path / "hints" / "journal")
    file.add([])
    assert list(tmp_path.iterdir()) == []
    file.add([(KEYS[0], "old"), (KEYS[1], "other")])
    file.add([(KEYS[0], "new")])
    assert HintFile(tmp_path / "hints" / "journal").read() == {KEYS[0]: "new", KEYS[1]: "other"}


def test_a_file_that_was_torn_at_any_byte_loses_that_line_only(tmp_path: Path) -> None:
    """A killed import, or a full disk, may end a file anywhere. The next import adds to it."""
    path = tmp_path / "file"
    HintFile(path).add([(KEYS[0], "first")])
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        HintFile(path).add([(KEYS[1], "second")])
        expected = {KEYS[1]: "second"} | ({KEYS[0]: "first"} if end >= len(whole) - 1 else {})
        assert HintFile(path).read() == expected, end


LINE = b"%b text 00000000\n" % KEYS[2].encode()


@pytest.mark.parametrize(
    "foreign",
    [b"\n\n\n", bytes(range(256)) * 40, b"a" * 500_000, LINE],
    ids=["empty lines", "noise", "one vast line", "a wrong sum"],
)
def test_foreign_bytes_are_passed_over(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "file"
    HintFile(path).add([(KEYS[0], "first")])
    path.write_bytes(foreign + b"\n" + path.read_bytes() + foreign)
    HintFile(path).add([(KEYS[1], "second")])
    assert HintFile(path).read() == {KEYS[0]: "first", KEYS[1]: "second"}


def test_a_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 4000)
    file = HintFile(tmp_path / "file")
    for number in range(100):
        file.add((key, str(number)) for key in KEYS)
        assert (tmp_path / "file").stat().st_size < 4000
    assert file.read() == dict.fromkeys(KEYS, "99")
    file.add((f"{number:064x}", "another") for number in range(40))
    file.add([(KEYS[0], "so many are forgotten")])
    assert file.read() == {KEYS[0]: "so many are forgotten"}


def test_two_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def add(start: int) -> None:
        for number in range(start, start + 300, 3):
            HintFile(path).add((f"{one:064x}", str(one)) for one in range(number, number + 3))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (0, 300)))
    assert HintFile(path).read() == {f"{number:064x}": str(number) for number in range(600)}


@pytest.mark.parametrize("kind", ["folder", "link", "FIFO"])
def test_something_else_in_its_place_stays(tmp_path: Path, kind: str) -> None:
    path, outside = tmp_path / "file", tmp_path / "outside"
    outside.write_bytes(b"mine")
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(outside)
    mode = path.lstat().st_mode
    assert HintFile(path).read() == {}
    HintFile(path).add([(KEYS[0], "first")])
    assert path.lstat().st_mode == mode
    assert outside.read_bytes() == b"mine"
