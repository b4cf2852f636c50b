"""Headers of tar archives, written and read; Python's tarfile is the oracle."""

import io
import struct
import tarfile
from typing import Literal

import pytest
import zstandard

from blobstore.errors import CorruptDataError, LimitExceededError
from blobstore.formats import archives
from blobstore.formats.archives import encode_table, seek_table, stored_frame
from blobstore.io.ranges import BytesReader

WHAT = "a.tar"


@pytest.mark.parametrize(
    ("path", "size", "blocks"),
    [
        ("blobs/sha256/a", 0, 1),
        (99 * "a", 8**11, 3),
        ("/".join([90 * "a"] * 5), 2**48, 3),
        ("a/ü", 5, 3),
        (100 * "a" + "/", 0, 3),
    ],
)
def test_what_is_written_tarfile_reads_and_so_do_we(path: str, size: int, blocks: int) -> None:
    is_file = not path.endswith("/")
    header = archives.member_header(path, size)
    assert len(header) == blocks * archives.BLOCK
    with tarfile.open(fileobj=io.BytesIO(header)) as archive:
        info = archive.next()
    assert info is not None
    assert (info.name, info.size, info.isreg()) == (path.rstrip("/"), size, is_file)
    assert (info.mode, info.mtime, info.uid, info.gid) == (0o644 if is_file else 0o755, 0, 0, 0)
    assert read(header) == (path if is_file else None, size)


def read(blocks: bytes) -> tuple[str | None, int]:
    says: dict[str, str] = {}
    at = 0
    while (
        header := archives.parse_block(blocks[at : at + archives.BLOCK], WHAT)
    ) is not None and header.extends:
        data = blocks[at + archives.BLOCK : at + archives.BLOCK + header.size]
        says |= archives.parse_extension(header, data, WHAT)
        at += archives.BLOCK + archives.in_blocks(header.size)
    assert header is not None
    header = archives.with_extensions(header, says, WHAT)
    return archives.path_of(header, WHAT), header.size


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_paths_and_sizes_of_all_forms(form: Literal[0, 1, 2]) -> None:
    large = [] if form == tarfile.USTAR_FORMAT else [("/".join(["x" * 90] * 5), 2**40)]
    for path, size in (("short", 0), ("a/" * 60 + "b", 1), ("käse", 2), ("./a", 3), *large):
        info = tarfile.TarInfo(path)
        info.size = size
        found = read(info.tobuf(form, "utf-8", "surrogateescape"))
        assert found == (path.removeprefix("./"), size)


def test_paths_that_lead_elsewhere() -> None:
    for name in ("/etc/passwd", "../x", "a//b", "a\\b", "", "a:b"):
        with pytest.raises(CorruptDataError, match="A1"):
            archives.path_of(archives.TarHeader(b"0", name, 0), WHAT)
    kinds = [(kind, "some/file", 0) for kind in (b"1", b"2", b"3", b"7", b"S", b"K", b"?")]
    for kind, name, size in (*kinds, (b"5", "folder-with-contents/", 1)):
        with pytest.raises(CorruptDataError):
            archives.path_of(archives.TarHeader(kind, name, size), WHAT)


RECORDS = [b"22 GNU.sparse.major=1\n", b"11 path=a\n", b"0 path=a\n", b"99999999999 path=a\n"]
RECORDS += [b"11 size=-1\n\n", b"10 size=x\n", b"9 path=\xff\n"]
# Counts for Python's tarfile: no two readers may take a member for two files.
RECORDS += [b"8 path=\n"]


MEMBER = archives.TarHeader(b"0", "a", 0)


def extension(kind: bytes, records: bytes) -> dict[str, str]:
    return archives.parse_extension(archives.TarHeader(kind, "", len(records)), records, WHAT)


def test_pax_records_that_are_refused() -> None:
    for records in RECORDS:
        with pytest.raises(CorruptDataError, match="A1"):
            archives.path_of(archives.with_extensions(MEMBER, extension(b"x", records), WHAT), WHAT)
    with pytest.raises(CorruptDataError, match="global PAX header"):
        extension(b"g", b"9 path=a\n")
    for kind in (b"g", b"x"):
        assert extension(kind, b"13 comment=a\n") == {}


def test_every_byte_of_a_header_is_checked_and_a_size_beyond_any_blob() -> None:
    assert archives.parse_block(archives.END[: archives.BLOCK], WHAT) is None
    with pytest.raises(LimitExceededError):
        read(archives.member_header("some/file", 2**50))
    block = bytearray(archives.member_header("path", 5))
    for at in range(archives.BLOCK):
        block[at] ^= 1
        with pytest.raises(CorruptDataError):
            archives.parse_block(bytes(block), WHAT)
        block[at] ^= 1


def test_sums_of_signed_bytes_are_accepted() -> None:
    block = tarfile.TarInfo("käse").tobuf(tarfile.GNU_FORMAT)
    plain = block[:148] + b" " * 8 + block[156:]
    signed = sum(plain) - 256 * sum(byte > 127 for byte in plain)
    assert read(plain[:148] + b"%06o\0 " % signed + plain[156:]) == ("käse", 0)


FRAMES = [(10, 100), (20, 0), (5, 2**30)]


def parsed(table: bytes, file_size: int) -> list[tuple[int, int]]:
    found = seek_table(BytesReader(bytes(file_size - len(table)) + table, "f"))
    assert found is not None
    return list(zip(found.places, found.starts, strict=True))


def test_a_table_comes_back() -> None:
    table = encode_table(FRAMES)
    starts = [(0, 0), (10, 100), (30, 100), (35, 100 + 2**30)]
    assert parsed(table, 35 + len(table)) == starts
    assert parsed(encode_table([]), len(encode_table([]))) == [(0, 0)]
    # zstd_seekable_compression_format.md
    one = bytes.fromhex("5e2a4d181100000001000000020000000100000000b1ea928f")
    assert encode_table([(1, 2)]) == one


def test_tables_that_are_refused() -> None:
    for size in (8, 9):  # without a footer there is no table
        assert seek_table(BytesReader(bytes(size), "f")) is None
    table = encode_table(FRAMES)
    large = encode_table([(10, 2**30 + 1)])
    in_another_frame = table[:4] + bytes([table[4] ^ 1]) + table[5:]
    footers = [struct.pack("<IBI", *row, 0x8F92EAB1) for row in ((2**31, 0), (1, 0x40))]
    sizes = [(table, 34), (table, 36), (large, 10), (in_another_frame, 35)]
    for wrong, before in (*sizes, *((footer, 0) for footer in footers)):
        with pytest.raises(CorruptDataError, match="A3"):
            parsed(wrong, before + len(wrong))


@pytest.mark.parametrize("size", [0, 2**17, 2**17 + 1])
def test_stored_frames_and_tables_are_read_by_zstandard(size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    frame = b"".join(stored_frame(memoryview(data)))
    assert zstandard.frame_content_size(frame) == size
    assert len(frame) == 9 + 3 * max(1, -(-size // 2**17)) + size
    whole = frame + encode_table([(len(frame), size)])
    with zstandard.ZstdDecompressor().stream_reader(whole, read_across_frames=True) as reader:
        assert reader.read() == data
