"""Metadata of a file: read, edited in place or by a new file; all else stays byte for byte."""

import errno
import hashlib
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from support.checkpoints import raw_safetensors, safetensors_bytes

import blobstore
from blobstore import errors

DATA = bytes(range(256)) * 40
ENTRY = '"x":{"dtype":"U8","extra":[1.5,{"deep":null}],"shape":[10240],"data_offsets":[0,10240]}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with fields unknown to us, 200 spaces, metadata after a tensor, and no other room."""
    return write(
        tmp_path / "m.safetensors", f'{{{ENTRY},"__metadata__":{{"a":"1","ü":"ü"}}}}' + " " * 200
    )


def write(path: Path, text: str) -> Path:
    path.write_bytes(raw_safetensors(text.encode(), DATA))
    return path


def header_of(path: Path) -> bytes:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length]


def assert_sound(path: Path, wanted: dict[str, str]) -> None:
    """Assert that the file holds the same data and metadata, and that it is alone."""
    raw = path.read_bytes()
    assert hashlib.sha256(raw[-len(DATA) :]).digest() == hashlib.sha256(DATA).digest()
    assert len(raw) == 8 + len(header_of(path)) + len(DATA)
    assert blobstore.read_metadata(path) == wanted
    with safe_open(path, "np") as opened:
        assert (opened.metadata() or {}) == wanted
        assert opened.get_tensor("x").tobytes() == DATA
    assert list(path.parent.glob(".*blobstore*")) == []


def test_an_edit_in_place_keeps_the_inode_and_all_other_bytes(file: Path) -> None:
    before = file.stat()
    edit = blobstore.edit_metadata(file, {"b": "2" * 150, "a": None})
    after = file.stat()
    assert (edit.changed, edit.copied_bytes) == (True, None)
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert ENTRY.encode() in header_of(file)
    assert_sound(file, {"ü": "ü", "b": "2" * 150})
    assert dict(edit.metadata) == {"ü": "ü", "b": "2" * 150}


def test_a_longer_header_needs_a_new_file_which_has_room_for_the_next_edit(file: Path) -> None:
    before = file.stat()
    start = 8 + len(header_of(file))
    edit = blobstore.edit_metadata(file, {"long": "x" * 5000})
    assert edit.copied_bytes == len(DATA)
    assert file.stat().st_ino != before.st_ino
    assert ENTRY.encode() in header_of(file)
    assert (8 + len(header_of(file)) - start) % 4096 == 0  # the data keep their place in a page
    inode = file.stat().st_ino
    assert blobstore.edit_metadata(file, {"more": "y" * 90}).copied_bytes is None
    assert file.stat().st_ino == inode
    assert_sound(file, {"a": "1", "ü": "ü", "long": "x" * 5000, "more": "y" * 90})


def test_what_is_not_changed_is_not_written(file: Path) -> None:
    before = (file.stat().st_mtime_ns, file.read_bytes())
    edit = blobstore.edit_metadata(file, {"a": "1"})
    assert (edit.changed, edit.copied_bytes) == (False, None)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


def test_replace_leaves_only_what_is_named(file: Path) -> None:
    blobstore.edit_metadata(file, {"z": "1", "a": "2"}, replace=True)
    assert list(blobstore.read_metadata(file).items()) == [("a", "2"), ("z", "1")]
    blobstore.edit_metadata(file, {}, replace=True)
    assert_sound(file, {})


def test_a_link_stays_and_a_second_name_keeps_its_metadata(file: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link.safetensors", tmp_path / "other"
    link.symlink_to(file)
    other.hardlink_to(file)
    assert blobstore.edit_metadata(link, {"a": "2"}).copied_bytes is not None
    assert link.is_symlink()
    assert (blobstore.read_metadata(file)["a"], blobstore.read_metadata(other)["a"]) == ("2", "1")


def test_a_link_in_the_place_of_the_new_file_is_not_followed(file: Path, tmp_path: Path) -> None:
    """Another user of the folder may put it there while the data are copied."""
    file.chmod(0o640)
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    other.chmod(0o600)

    def swap(_nbytes: int, _name: str) -> None:
        new = file.with_name(f".{file.name}.blobstore-new")
        new.unlink(missing_ok=True)
        new.symlink_to(other)

    blobstore.edit_metadata(file, {"long": "x" * 9000}, progress=swap)
    assert file.is_symlink()
    assert other.stat().st_mode & 0o777 == 0o600


def test_a_new_file_has_the_old_ones_mode_and_attributes(file: Path) -> None:
    file.chmod(0o640)
    try:
        os.setxattr(file, "user.note", b"kept")
    except OSError:
        pytest.skip("the file system of the tests has no extended attributes")
    blobstore.edit_metadata(file, {"long": "x" * 5000})
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.getxattr(file, "user.note") == b"kept"


def test_blobs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for number, name in enumerate((f"sha256-{'0' * 64}", "a" * 40)):
        path = write(tmp_path / "blobs" / name, f"{{{ENTRY}}}")
        link = tmp_path / f"{number}.safetensors"
        link.symlink_to(path)
        for file in (path, link):
            with pytest.raises(errors.UsageError, match="named after its contents"):
                blobstore.edit_metadata(file, {"a": "b"})
        assert blobstore.read_metadata(link) == {}


def test_changes_refused(file: Path) -> None:
    before = file.read_bytes()
    wrong: list[dict[str, Any]] = [{"k": "\ud800"}, {"k": 1}, {"a": None, "nope": None}]
    for changes in wrong:
        kind = errors.NotFoundError if "nope" in changes else errors.UsageError
        with pytest.raises(kind):
            blobstore.edit_metadata(file, changes)
    assert file.read_bytes() == before


def test_broken_missing_and_strange_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(raw_safetensors(b'{"x":1}'))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    wrong: dict[str, type[errors.BlobStoreError]] = {"broken": errors.HeaderError}
    wrong |= {"missing": errors.NotFoundError}
    wrong |= dict.fromkeys(("fifo", "loop", ".", "a\0b"), errors.StorageError)
    for name, error in wrong.items():
        with pytest.raises(error):
            blobstore.edit_metadata(f"{tmp_path}/{name}", {"a": "b"})
        with pytest.raises(error):
            blobstore.read_metadata(f"{tmp_path}/{name}")


def test_edits_at_once_lose_nothing(file: Path) -> None:
    """While one edits, others wait; whoever waited too long asks again."""

    def edit(number: int) -> None:
        while True:
            try:
                blobstore.edit_metadata(file, {f"key{number}": "v" * 100})
            except errors.BusyError:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(edit, range(12)))
    assert_sound(file, {"a": "1", "ü": "ü"} | {f"key{n}": "v" * 100 for n in range(12)})


def test_a_file_that_changes_while_it_is_copied_is_left_alone(file: Path) -> None:
    def write_to_it(_: int, __: str) -> None:
        with file.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"!")

    with pytest.raises(blobstore.errors.CorruptDataError, match="changed while"):
        blobstore.edit_metadata(file, {"long": "x" * 5000}, progress=write_to_it)
    assert blobstore.read_metadata(file) == {"a": "1", "ü": "ü"}
    assert list(file.parent.glob(".*blobstore*")) == []


@pytest.mark.parametrize(("first", "is_in_place"), [(502, True), (503, False), (504, True)])
def test_one_sector_is_changed_in_place(tmp_path: Path, first: int, is_in_place: bool) -> None:
    """The header's text begins at byte 8, so its byte 504 is the first of the second sector."""
    start = '{"__metadata__":{"k":"'
    value = "o" * 1000
    path = write(tmp_path / "m", f'{start}{value}"}},{ENTRY}}}')
    at = first - len(start)
    new = value[:at] + "nn" + value[at + 2 :]
    inode = path.stat().st_ino
    if not is_in_place:
        with pytest.raises(errors.UsageError, match="several disk sectors"):
            blobstore.edit_metadata(path, {"k": new}, in_place=True)
        assert blobstore.read_metadata(path) == {"k": value}
    edit = blobstore.edit_metadata(path, {"k": new})
    assert (edit.copied_bytes is None) == (path.stat().st_ino == inode) == is_in_place
    assert_sound(path, {"k": new})


def test_a_large_file_is_written_anew_where_the_kernel_can_not_copy_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr("os.copy_file_range", refuse)
    values = np.random.default_rng(1).integers(0, 255, 3_000_001, np.uint8)
    path = tmp_path / "m"
    path.write_bytes(safetensors_bytes({"x": values}, {"format": "pt"}))
    counts: list[int] = []
    edit = blobstore.edit_metadata(path, {"k": "v" * 90}, progress=lambda n, _: counts.append(n))
    assert edit.copied_bytes == sum(counts) == values.nbytes
    with safe_open(path, "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("x"), values)
