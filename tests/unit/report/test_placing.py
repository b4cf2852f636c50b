"""Where a report is written: it appears when it is complete, and replaces nothing by mistake."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.errors import BlobStoreError, StorageError
from blobstore.web.report import check_page, place_file, place_folder


def test_what_is_not_a_file_stays(tmp_path: Path) -> None:
    in_the_way: tuple[Callable[[Path], None], ...] = (
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(tmp_path / "gone"),
        lambda path: path.symlink_to(tmp_path),
    )
    for number, make in enumerate(in_the_way):
        path = tmp_path / f"{number}.html"
        make(path)
        before = path.lstat()
        for place in (check_page, lambda text, force: place_file(Path(text), b"new", force=force)):
            with pytest.raises(StorageError, match=r"html is not a regular file"):
                place(str(path), force=True)
        assert path.lstat() == before
        assert len([*tmp_path.iterdir()]) == number + 1


def test_a_wrong_place_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in {
        "gone/a.html": "no such file",
        "file/a.html": "not a directory",
        "new/": "is not the path of a file",
        "file": "already exists",
    }.items():
        with pytest.raises(BlobStoreError, match=reason):
            check_page(f"{tmp_path}/{path}", force=False)
    check_page(str(tmp_path / "file"), force=True)
    with pytest.raises(StorageError, match="file exists"):
        place_folder(tmp_path / "file")


def test_a_link_to_a_file_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "report.html"
    target.write_bytes(b"old")
    path.symlink_to(target)
    place_file(path, b"new", force=True)
    assert (path.is_symlink(), path.read_bytes(), target.read_bytes()) == (False, b"new", b"old")


def test_a_page_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    new, old = tmp_path / "new.html", tmp_path / "old.html"
    old.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for path in (new, old):
            with pytest.raises(StorageError, match="file too large"):
                place_file(path, bytes(2000), force=path == old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [one.name for one in tmp_path.iterdir()] == ["old.html"]
    assert old.read_bytes() == b"old"
