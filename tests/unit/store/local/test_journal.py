"""Journal: what was noted is found again, whatever else is in the file.

A line is a hint and never an error.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blobstore.errors import StorageError
from blobstore.names import Digest
from blobstore.store.local import journal as journal_module
from blobstore.store.local.blobs import Stamp
from blobstore.store.local.journal import Journal, JournalEntry

SOURCE = "/models/tiny"


def entry(number: int, *, size: int = 100, is_durable: bool = True) -> JournalEntry:
    """Return an entry of key ``number``."""
    key, digest = (
        hashlib.sha256(f"{kind} {number}".encode()).hexdigest() for kind in ("key", "bytes")
    )
    return JournalEntry(key, Digest(digest), size, Stamp(1000 + number, 2**60 + number), is_durable)


def path_of(folder: Path, source: str = SOURCE) -> Path:
    """Return where the journal of a source lies."""
    return folder / hashlib.sha256(os.fsencode(source)).hexdigest()


def found(folder: Path, *entries: JournalEntry) -> list[JournalEntry | None]:
    """Return what another process would find for the keys of ``entries``."""
    journal = Journal(folder, SOURCE)
    return [journal.find(one.key) for one in entries]


def test_what_is_appended_is_found_by_the_next(tmp_path: Path) -> None:
    entries = [entry(0), entry(1, size=0), entry(2, size=10**15 - 1, is_durable=False)]
    journal = Journal(tmp_path / "journal", SOURCE)
    journal.append(entries[:2])
    journal.append(entries[2:])
    assert found(tmp_path / "journal", *entries, entry(9)) == [*entries, None]


def test_the_newest_entry_of_a_key_wins(tmp_path: Path) -> None:
    for size in (1, 3, 2):
        Journal(tmp_path, SOURCE).append([entry(0, size=size), entry(size)])
    assert found(tmp_path, entry(0)) == [entry(0, size=2)]


def test_asking_makes_nothing_and_noting_nothing_neither(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", SOURCE)
    assert journal.find(entry(0).key) is None
    journal.append([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "other", ["", "/models/tiny/", "/models/Tiny", "/models/\udcff", "/models/\n"]
)
def test_each_source_has_a_journal_of_its_own(tmp_path: Path, other: str) -> None:
    Journal(tmp_path, other).append([entry(0)])
    assert found(tmp_path, entry(0)) == [None]
    assert Journal(tmp_path, other).find(entry(0).key) == entry(0)
    assert path_of(tmp_path, other).is_file()


def test_a_journal_that_was_torn_at_any_byte_loses_that_entry_only(tmp_path: Path) -> None:
    """An import that was killed, or a full disk, may end a journal anywhere.

    The next import adds to it.
    """
    Journal(tmp_path, SOURCE).append([entry(0), entry(1)])
    whole = path_of(tmp_path).read_bytes()
    for end in range(len(whole)):
        path_of(tmp_path).write_bytes(whole[:end])
        before = found(tmp_path, entry(0), entry(1))
        # A line may be whole but for its end: then it says less, or another time of writing, and is
        # not believed.
        assert before[0] in (entry(0), None) or before[0].stamp != entry(0).stamp, end
        Journal(tmp_path, SOURCE).append([entry(2)])
        assert found(tmp_path, entry(0), entry(1), entry(2)) == [*before, entry(2)], end


FOREIGN = {
    "nothing": b"",
    "empty lines": b"\n\n\n",
    "zeros": bytes(10_000),
    "noise": bytes(range(256)) * 40,
    "one vast line": b"a" * 5_000_000,
    "capitals": entry(7).encode().upper(),
    "returns": entry(7).encode().replace(b"\n", b"\r\n"),
    "spaces": entry(7).encode().replace(b" ", b"  "),
    "other digits": entry(7).encode().replace(b" 100 ", " \u0661\u0660\u0660 ".encode()),
    "a negative size": entry(7).encode().replace(b" 100 ", b" -100 "),
    "a vast size": entry(7).encode().replace(b" 100 ", b" " + b"9" * 5000 + b" "),
    "five fields": entry(7).encode().rpartition(b" ")[0] + b"\n",
    "seven fields": entry(7).encode().replace(b"\n", b" 1\n"),
    "json": b'{"key": "value"}\n',
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("place", ["before", "after", "alone"])
def test_foreign_bytes_are_passed_over(tmp_path: Path, foreign: str, place: str) -> None:
    line = entry(0).encode()
    parts = {
        "before": (FOREIGN[foreign], b"\n", line),
        "after": (line, FOREIGN[foreign]),
        "alone": (FOREIGN[foreign],),
    }
    path_of(tmp_path).write_bytes(b"".join(parts[place]))
    assert found(tmp_path, entry(0), entry(7)) == [None if place == "alone" else entry(0), None]
    Journal(tmp_path, SOURCE).append([entry(1)])
    assert found(tmp_path, entry(1), entry(7)) == [entry(1), None]


def test_a_hundred_thousand_entries(tmp_path: Path) -> None:
    entries = [entry(number) for number in range(100_000)]
    started = time.process_time()
    Journal(tmp_path, SOURCE).append(entries)
    assert found(tmp_path, *entries) == entries
    assert time.process_time() - started < 20  # about 1 s
    assert path_of(tmp_path).stat().st_size < 25_000_000


def test_a_journal_of_many_imports_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SPARE_LINES", 20)
    entries = [entry(number) for number in range(10)]
    most = 0
    for size in range(50):
        journal = Journal(tmp_path, SOURCE)
        assert journal.find(entry(11).key) is None  # an import asks first
        journal.append(entry(number, size=size) for number in range(5))
        journal.append(entry(number, size=size) for number in range(5, 10))
        most = max(most, path_of(tmp_path).read_bytes().count(b"\n"))
    assert 40 <= most < 100
    assert [one and one.size for one in found(tmp_path, *entries)] == [49] * 10
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path).name]


APPEND = """
import sys
from pathlib import Path
from blobstore.names import Digest
from blobstore.store.local.journal import JournalEntry, Journal
from blobstore.store.local.blobs import Stamp
journal = Journal(Path(sys.argv[1]), "/models/tiny")
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 3000, 3):
    entries = [
        JournalEntry(f"{one:064x}", Digest(f"{one:064x}"), one, Stamp(one, one))
        for one in range(number, number + 3)
    ]
    journal.append(iter(entries))
"""


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    lines = [[sys.executable, "-c", APPEND, str(tmp_path), start] for start in ("0", "3000")]
    children = [subprocess.Popen(line) for line in lines]
    assert [child.wait() for child in children] == [0, 0]
    journal = Journal(tmp_path, SOURCE)
    entries = [journal.find(f"{number:064x}") for number in range(6000)]
    assert [one and one.size for one in entries] == list(range(6000))


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link", "FIFO"])
def test_something_else_in_its_place_is_no_journal_and_stays(tmp_path: Path, kind: str) -> None:
    path, outside = path_of(tmp_path), tmp_path / "outside"
    outside.write_bytes(b"mine")
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    mode = path.lstat().st_mode
    assert found(tmp_path, entry(0)) == [None]
    with pytest.raises(StorageError) as caught:
        Journal(tmp_path, SOURCE).append([entry(0)])
    assert caught.value.path == str(path)
    assert path.lstat().st_mode == mode
    assert outside.read_bytes() == b"mine"
    assert not (tmp_path / "nowhere").exists()
