"""A packed file, read after docs/formats.md with numpy and zstandard, without our code."""

import struct

import numpy as np
import zstandard


def decoded(raw: bytes) -> bytes:
    """Return the blob in a packed file. Raises: AssertionError if it is not as the page says."""
    magic, nbytes, ours, width = struct.unpack("<II7sB", raw[:16])
    assert (magic, nbytes, ours) == (0x184D2A50, 8, b"BSPACK\x02")
    count, descriptor, end = struct.unpack("<IBI", raw[-9:])
    assert (descriptor, end) == (0, 0x8F92EAB1)
    table = raw[len(raw) - 17 - 8 * count :]
    assert struct.unpack("<II", table[:8]) == (0x184D2A5E, len(table) - 8)
    mark, *frames = struct.iter_unpack("<II", table[8:-9])
    assert mark == (16, 0)
    at, data = 16, b""
    for stored, plain in frames:
        assert plain == 2**20 or at + stored + len(table) == len(raw)
        frame = raw[at : at + stored]
        assert zstandard.get_frame_parameters(frame).has_checksum
        planes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        assert len(planes) == plain
        whole = plain // width * width
        items = np.frombuffer(planes, np.uint8, whole).reshape(width, -1)
        data += items.T.tobytes() + planes[whole:]
        at += stored
    assert at + len(table) == len(raw)
    return data
