"""Headers of many files read at once: those of `header_of`, or None where it has to decide."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpus import Case, case_id, load

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


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_the_corpus(case: Case, tmp_path: Path) -> None:
    size = case.write(tmp_path / "f").stat().st_size
    header = read(tmp_path, "f", size)
    if not case.accepted:
        assert header is None
    elif header is None:
        (length,) = struct.unpack_from("<Q", case.data)
        assert (
            length > PAGE - 8 or scan_header(case.data[8 : 8 + length], size - 8 - length) is None
        )
    else:
        assert header == header_of(BytesReader(case.data))


def test_many_files_in_their_order(tmp_path: Path) -> None:
    files = {f"f{number}": file_of(TEXT.replace(b'"a"', b'"a%d"' % number)) for number in range(9)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "f4").unlink()
    sizes = [(name, len(data)) for name, data in files.items()]
    headers = headers_in(tmp_path, sizes, Budget.of_stored("m"))
    names = [None if one is None else list(one.tensors) for one in headers]
    assert names == [None if number == 4 else [f"a{number}"] for number in range(9)]
    assert all(one is None or one.metadata == {"k": "v"} for one in headers)


def _link(path: Path, whole: Path) -> None:
    path.symlink_to(whole)


def _folder(path: Path, _whole: Path) -> None:
    path.mkdir()


def _fifo(path: Path, _whole: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_link, _folder, _fifo])
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    (tmp_path / "whole").write_bytes(file_of(TEXT))
    make(tmp_path / "f", tmp_path / "whole")
    for size in {len(file_of(TEXT)), (tmp_path / "f").lstat().st_size}:
        assert read(tmp_path, "f", size) is None


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size(tmp_path: Path, more: int) -> None:
    (tmp_path / "f").write_bytes(file_of(TEXT))
    assert read(tmp_path, "f", len(file_of(TEXT)) + more) is None


@pytest.mark.parametrize(
    ("length", "is_read"), [(PAGE - 8, True), (PAGE - 7, True), (MOST, True), (MOST + 1, False)]
)
@pytest.mark.parametrize("data", [b"", b"\1" * PAGE])
def test_headers_around_a_page_and_the_limit(
    tmp_path: Path, length: int, data: bytes, is_read: bool
) -> None:
    entry = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(data), len(data))
    whole = file_of(entry.ljust(length), data)
    (tmp_path / "f").write_bytes(whole)
    header = read(tmp_path, "f", len(whole))
    assert header == (header_of(BytesReader(whole)) if is_read else None)


def test_long_headers_of_many_files_are_limited_together(tmp_path: Path) -> None:
    whole = file_of(TEXT.ljust(MOST))
    (tmp_path / "f0").write_bytes(whole)
    files = [(f"f{number}", len(whole)) for number in range(300)]
    for name, _ in files[1:]:
        (tmp_path / name).hardlink_to(tmp_path / "f0")
    headers = headers_in(tmp_path, files, Budget.of_stored("m"))
    assert sum(header is not None for header in headers) == 64


def test_a_file_that_ends_inside_its_header(tmp_path: Path) -> None:
    whole = file_of(TEXT.ljust(2 * PAGE))[:PAGE]
    (tmp_path / "f").write_bytes(whole)
    assert read(tmp_path, "f", len(whole)) is None


def test_what_it_reads_is_counted_without_padding(tmp_path: Path) -> None:
    whole = file_of(TEXT.ljust(1000))
    (tmp_path / "f").write_bytes(whole)
    budget = Budget("m", text=2 * len(TEXT), tensors=3)
    for _ in range(2):
        assert read(tmp_path, "f", len(whole), budget) is not None
    assert read(tmp_path, "f", len(whole), budget) is None


def test_a_folder_that_can_not_be_opened(tmp_path: Path) -> None:
    assert read(tmp_path / "missing", "f", 100) is None


def test_what_it_declines_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_of(TEXT))
    budget = Budget("m", text=10 * len(TEXT), tensors=1)
    assert read(tmp_path, "f", len(file_of(TEXT)), budget) is not None
    assert read(tmp_path, "f", len(file_of(TEXT)), budget) is None
    budget.take_text(9 * len(TEXT), "a document")  # the second one was not counted
