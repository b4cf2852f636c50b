"""Planes: the bytes of items side by side, so that the exponents of floats can be coded alone.

Plane k has byte k of every item of ``width`` bytes; bytes after the last whole item follow the
planes as they are. Rotated planes are those of packed files of earlier versions: each little-endian
item was rotated left by one bit, and plane 0 has the most significant byte.
"""

from __future__ import annotations

import numpy as np


def split_planes(data: bytes, width: int) -> list[bytes]:
    """Return the planes of items of ``width`` bytes, and the rest: together as many bytes."""
    whole = len(data) // width * width
    items = np.frombuffer(data, np.uint8, whole).reshape(-1, width)
    return [*(items[:, number].tobytes() for number in range(width)), data[whole:]]


def join_planes(planes: bytes, width: int) -> bytes:
    """Return the items whose planes these are: the reverse of `split_planes`."""
    if width == 1:
        return planes
    whole = len(planes) // width * width
    items = np.frombuffer(planes, np.uint8, whole).reshape(width, -1)
    return items.T.tobytes() + planes[whole:]


def join_rotated_planes(planes: bytes, width: int, base: bytes | None) -> bytes:
    """Return the items of rotated planes, combined by XOR with as many bytes of ``base``."""
    rows = np.frombuffer(planes, np.uint8).reshape(width, -1)
    items = rows.T.reshape(-1).view(f">u{width}").astype(f"<u{width}")
    if width > 1:
        items = (items >> 1) | (items << (8 * width - 1))
    if base is not None:
        items = items ^ np.frombuffer(base, items.dtype)
    return items.tobytes()
