"""A packed file, read after docs/formats.md with numpy and zstandard, without our code."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zstandard

NOTHING: Mapping[str, bytes] = {}


def decoded(raw: bytes, base: Callable[[str], bytes] = NOTHING.__getitem__) -> Mapping[str, bytes]:
    """Return the blobs of a packed file by hex digits; ``base`` returns the bytes of a base blob.

    Raises: AssertionError if the file is not as the page says.
    """
    assert raw[:8] == b"BSPACK\x01\n"
    offset, length, sha256, end = struct.unpack("<QQ32s8s", raw[-56:])
    assert end == b"BSPEND\x01\n"
    index = raw[offset : offset + length]
    assert len(raw) == offset + length + 56
    assert hashlib.sha256(index).digest() == sha256
    blob_count, base_count, frame_count = struct.unpack_from("<III", index)
    place = 12
    heads = list(struct.iter_unpack("<32sQI", index[place : place + 44 * blob_count]))
    place += 44 * blob_count
    bases = list(struct.iter_unpack("<32sQ", index[place : place + 40 * base_count]))
    place += 40 * base_count
    frames = struct.iter_unpack("<IBBHQI4I", index[place : place + 36 * frame_count])
    at = 8
    blobs = {}
    for digest, size, count in heads:
        data = b""
        for _ in range(count):
            nbytes, width, coded, number, base_offset, crc, *lengths = next(frames)
            stored = raw[at : at + sum(lengths)]
            at += len(stored)
            assert zlib.crc32(stored) == crc
            beside = None
            if number:
                whole = base(bases[number - 1][0].hex())
                assert len(whole) == bases[number - 1][1]
                beside = whole[base_offset : base_offset + nbytes]
            data += _frame(stored, nbytes, width, coded, lengths, beside)
        assert len(data) == size
        assert hashlib.sha256(data).digest() == digest
        blobs[digest.hex()] = data
    assert at == offset
    return blobs


def _frame(
    stored: bytes, nbytes: int, width: int, coded: int, lengths: list[int], beside: bytes | None
) -> bytes:
    planes, place = [], 0
    for number in range(width):
        part = stored[place : place + lengths[number]]
        place += lengths[number]
        is_coded = coded >> number & 1
        planes.append(zstandard.ZstdDecompressor().decompress(part) if is_coded else part)
        assert len(planes[-1]) == nbytes // width
    rows: np.ndarray[Any, Any] = np.frombuffer(b"".join(planes), np.uint8).reshape(width, -1)
    items = rows.T.reshape(-1).view(f">u{width}").astype(f"<u{width}")
    if width > 1:
        items = (items >> 1) | (items << (8 * width - 1))
    data = items.view(np.uint8)
    return bytes(data if beside is None else data ^ np.frombuffer(beside, np.uint8))
