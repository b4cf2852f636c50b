"""Hints and results: what was noted is found again, whatever else is in the files."""

import os
from pathlib import Path

import pytest
from support.stores import commit_model

from blobstore.errors import LimitExceededError
from blobstore.store.care.prune import prune
from blobstore.store.hints import MOST_BYTES, HintFile
from blobstore.store.local.store import Store

KEYS = [f"{number:064x}" for number in range(3)]


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


@pytest.mark.parametrize(
    "foreign",
    [bytes(range(256)) * 40, b"a" * 500_000, b"%b text 00000000\n" % KEYS[2].encode()],
    ids=["noise", "one vast line", "a wrong sum"],
)
def test_foreign_bytes_are_passed_over(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "file"
    HintFile(path).add([(KEYS[0], "first")])
    path.write_bytes(foreign + b"\n" + path.read_bytes() + foreign)
    HintFile(path).add([(KEYS[1], "second")])
    assert HintFile(path).read() == {KEYS[0]: "first", KEYS[1]: "second"}


# Results


def test_a_result_is_read_back_and_replaced_and_goes_with_the_last_model(store: Store) -> None:
    digest = commit_model(store, "m", b"one").digest.hex
    name, gone = f"quality/{digest}", f"quality/{'0' * 64}"
    assert store.results.read(name) is None
    for text in (b"old", b"new"):
        store.results.keep(name, text)
    store.results.keep(gone, b"of a model that is gone")
    store.results.keep("verify", b"sound")
    path, found = store.results.read(name) or ("", b"")
    assert (Path(path).read_bytes(), found) == (b"new", b"new")
    folder = store.root / ".blobstore/results/quality"
    (folder / f"{digest}.json.0123456789abcdef").write_bytes(b"unfinished")
    (folder / "notes.txt").write_bytes(b"of another program")
    prune(store)
    assert {file.name for file in folder.iterdir()} == {f"{digest}.json", "notes.txt"}
    assert (store.results.read("verify") or ("", b""))[1] == b"sound"


def test_a_large_result_is_neither_kept_nor_read(store: Store) -> None:
    store.root.mkdir()
    store.results.keep("verify", bytes(MOST_BYTES + 1))
    assert store.results.read("verify") is None
    store.results.keep("verify", b"1")
    os.truncate(store.root / ".blobstore/results/verify.json", MOST_BYTES + 1)
    with pytest.raises(LimitExceededError, match="at most"):
        store.results.read("verify")
