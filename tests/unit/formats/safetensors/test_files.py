"""Headers of many files read at once: those of `header_of`, or None where it has to decide."""

import os
import struct
from pathlib import Path

from support.corpus import load

from blobstore.formats.safetensors.header import Header, header_of, headers_in, scan_header
from blobstore.io.budget import Budget
from blobstore.io.ranges import BytesReader

SMALL = [case for case in load("header") if not case.by_recipe]
TEXT = b'{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
PAGE = 4096
MOST = 2**20


def file_of(text: bytes, data: bytes = b"\1\2") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def read(folder: Path, name: str, size: int, budget: Budget | None = None) -> Header | None:
    (header,) = headers_in(folder, [(name, size)], budget or Budget.of_stored("m"))
    return header


def test_the_corpus(tmp_path: Path) -> None:
    for case in SMALL:
        size = case.write(tmp_path / case.id).stat().st_size
        header = read(tmp_path, case.id, size)
        if header is not None:
            assert case.accepted, case.id
            assert header == header_of(BytesReader(case.data))
        elif case.accepted:
            (length,) = struct.unpack_from("<Q", case.data)
            text = case.data[8 : 8 + length]
            assert length > PAGE - 8 or scan_header(text, size - 8 - length) is None, case.id


def test_only_regular_files_of_their_size_are_read(tmp_path: Path) -> None:
    data = file_of(TEXT)
    (tmp_path / "whole").write_bytes(data)
    (tmp_path / "ends").write_bytes(file_of(TEXT.ljust(2 * PAGE))[: len(data)])
    (tmp_path / "link").symlink_to("whole")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    names = ("ends", "link", "folder", "fifo", "missing", "whole")
    headers = list(headers_in(tmp_path, [(n, len(data)) for n in names], Budget.of_stored("m")))
    assert headers == [*[None] * 5, header_of(BytesReader(data))]
    for more in (-1, 1):
        assert read(tmp_path, "whole", len(data) + more) is None
    assert read(tmp_path / "missing", "whole", len(data)) is None


def test_headers_around_a_page_and_the_limit(tmp_path: Path) -> None:
    for length, data in ((PAGE - 8, b""), (PAGE - 7, b"\1" * PAGE), (MOST, b""), (MOST + 1, b"")):
        entry = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(data), len(data))
        whole = file_of(entry.ljust(length), data)
        (tmp_path / "f").write_bytes(whole)
        wanted = header_of(BytesReader(whole)) if length <= MOST else None
        assert read(tmp_path, "f", len(whole)) == wanted


def test_long_headers_of_many_files_are_limited_together(tmp_path: Path) -> None:
    whole = file_of(TEXT.ljust(MOST))
    (tmp_path / "f0").write_bytes(whole)
    files = [(f"f{number}", len(whole)) for number in range(300)]
    for name, _ in files[1:]:
        (tmp_path / name).hardlink_to(tmp_path / "f0")
    headers = headers_in(tmp_path, files, Budget.of_stored("m"))
    assert sum(header is not None for header in headers) == 64


def test_what_it_reads_is_counted_without_padding(tmp_path: Path) -> None:
    whole = file_of(TEXT.ljust(1000))
    (tmp_path / "f").write_bytes(whole)
    budget = Budget("m", text=3 * len(TEXT), tensors=2)
    for _ in range(2):
        assert read(tmp_path, "f", len(whole), budget) is not None
    assert read(tmp_path, "f", len(whole), budget) is None
    budget.take_text(len(TEXT), "a document")  # the one that it declined was not counted
