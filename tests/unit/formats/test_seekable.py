"""Zstandard's seek tables and stored frames; the zstandard package is the oracle."""

import struct

import pytest
import zstandard

from blobstore.errors import CorruptDataError
from blobstore.formats.seekable import encode_table, seek_table, stored_frame
from blobstore.io.ranges import BytesReader

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


def test_no_footer_is_no_table() -> None:
    assert seek_table(BytesReader(bytes(9), "f")) is None
    assert seek_table(BytesReader(bytes(8), "f")) is None


def test_tables_that_are_refused() -> None:
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
