"""Planes: the bytes of items side by side, so that the exponents of floats can be coded alone.

`split_planes` rotates each little-endian item of 2 or 4 bytes left by one bit, which moves its sign
behind the mantissa. Plane k has byte k of every item, the most significant byte first.
So plane 0 of BF16 and F32 is the exponent; that of F16 is the exponent and three bits of the
mantissa. With a base, items and base are combined by XOR first: a fine-tune differs little from its
base.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from blobstore.errors import UsageError
from blobstore.kernels.arrays import Array
from blobstore.kernels.native import Kernel, active

Bytes: TypeAlias = bytes | bytearray | memoryview

WIDTHS = (1, 2, 4)
"""Bytes of an item. Items of one byte are one plane, and are not rotated."""


def split_planes(
    items: Bytes,
    width: int,
    base: Bytes | None = None,
    *,
    kernel: Kernel | None = None,
) -> memoryview:
    """Return the planes of ``items``, one after the other: as many bytes.

    They are new memory, or a view of items of one byte without a base.

    ``items``: whole items of ``width`` bytes (1, 2 or 4). ``base``: as many bytes, or None. Raises:
    UsageError for other sizes.
    """
    source, beside = _octets(items), None if base is None else _octets(base)
    _check(width, source.size, beside)
    if width == 1:
        return (source if beside is None else np.bitwise_xor(source, beside)).data
    planes = np.empty(source.size, np.uint8)
    (kernel or active()).split_planes(width, source, beside, planes)
    return planes.data


def join_planes(
    planes: Bytes,
    width: int,
    items: bytearray | memoryview,
    base: Bytes | None = None,
    *,
    kernel: Kernel | None = None,
) -> None:
    """Write to ``items`` the items whose planes these are: the reverse of `split_planes`.

    Raises: UsageError for sizes that do not fit.
    """
    source, out = _octets(planes), _octets(items)
    beside = None if base is None else _octets(base)
    _check(width, source.size, beside)
    if out.size != source.size:
        raise UsageError(f"{source.size:,} bytes of planes are not {out.size:,} bytes of items")
    if width == 1:
        out[:] = source if beside is None else source ^ beside
        return
    (kernel or active()).join_planes(width, source, beside, out)


def _octets(data: Bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _check(width: int, nbytes: int, base: Array | None) -> None:
    if width not in WIDTHS or nbytes % width:
        raise UsageError(f"{nbytes:,} bytes are not whole items of {width} bytes (1, 2 or 4)")
    if base is not None and base.size != nbytes:
        raise UsageError(f"the base has {base.size:,} bytes, and the items {nbytes:,}")
