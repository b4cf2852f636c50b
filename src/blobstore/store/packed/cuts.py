"""Cuts: which bytes of a blob are coded how. Decided from a blob's header; no value is read."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import Header, TensorEntry
from blobstore.names import Digest

FRAME = 2**20
"""Bytes of a frame at most: what is coded, checked and read at once."""
_LEAST_MEAN = 2**14
"""Bytes that the cuts of a blob have on average at least: shorter ones would be mostly index."""
_MOST_SHORT = 64
"""Cuts that a blob may have even if they are shorter."""


class Coding(enum.Enum):
    """Kinds of bytes: text, and everything unknown; floats, and scales; codes of weights."""

    TEXT = enum.auto()
    FLOATS = enum.auto()
    CODES = enum.auto()


@dataclass(frozen=True, slots=True)
class BasePlace:
    """Bytes of a base model's blob: the blob's digest and size, and the offset in it."""

    digest: Digest
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes ``begin`` to ``end`` of a blob, coded alike: ``coding``, and bytes of an item.

    ``base``: the bytes of a base model that they resemble, if any.
    """

    begin: int
    end: int
    coding: Coding
    width: int
    base: BasePlace | None = None


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of a base model: its dtype and shape, and where its bytes lie."""

    dtype: DType
    shape: tuple[int, ...]
    place: BasePlace


_WIDTHS = {DType.BF16: 2, DType.F16: 2, DType.F32: 4} | dict.fromkeys(
    (
        DType.F8_E4M3,
        DType.F8_E5M2,
        DType.F8_E4M3FNUZ,
        DType.F8_E5M2FNUZ,
        DType.F8_E8M0,
        DType.U8,  # the scales of nvfp4, mxfp4 and mxfp8
    ),
    1,
)
_CODES = frozenset({DType.U32, DType.F4})
"""The packed codes of quantized weights: hardly a bit of them can be saved."""


def cuts_of(header: Header | None, size: int, bases: Mapping[str, BaseTensor]) -> list[Cut]:
    """Return the cuts of a blob of ``size`` bytes, in order: they cover each byte once.

    ``header``: None for a blob that is not a safetensors file. ``bases``: the tensors of a base
    model by name; one of the same dtype and shape is taken.
    """
    if header is None:
        return [Cut(0, size, Coding.TEXT, 1)] if size else []
    cuts = list(_joined(_cuts(header, bases)))
    if len(cuts) > _MOST_SHORT and size < _LEAST_MEAN * len(cuts):
        return [Cut(0, size, Coding.TEXT, 1)]
    return cuts


def _cuts(header: Header, bases: Mapping[str, BaseTensor]) -> Iterator[Cut]:
    start = header.data_start
    yield Cut(0, start, Coding.TEXT, 1)
    for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].begin):
        if entry.nbytes:
            coding, width = _coding(entry.dtype)
            found = bases.get(name)
            base = found.place if found is not None and _is_alike(found, entry) else None
            yield Cut(start + entry.begin, start + entry.end, coding, width, base)


def _coding(dtype: DType) -> tuple[Coding, int]:
    if dtype in _CODES:
        return Coding.CODES, 1
    return (Coding.FLOATS, _WIDTHS[dtype]) if dtype in _WIDTHS else (Coding.TEXT, 1)


def _is_alike(base: BaseTensor, entry: TensorEntry) -> bool:
    return (base.dtype, base.shape) == (entry.dtype, entry.shape)


def _joined(cuts: Iterable[Cut]) -> Iterator[Cut]:
    """Yield cuts; neighbours that are coded alike become one."""
    last: Cut | None = None
    for piece in cuts:
        if last is not None and piece == replace(
            piece, coding=last.coding, width=last.width, base=_behind(last)
        ):
            last = replace(last, end=piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _behind(piece: Cut) -> BasePlace | None:
    """Return the place in the base behind that of a piece."""
    if piece.base is None:
        return None
    return replace(piece.base, offset=piece.base.offset + piece.end - piece.begin)


def frames_of(piece: Cut) -> Iterator[Cut]:
    """Yield the frames of a piece: whole items, of up to 1 MiB."""
    for begin in range(piece.begin, piece.end, FRAME):
        base = piece.base
        if base is not None:
            base = replace(base, offset=base.offset + begin - piece.begin)
        yield replace(piece, begin=begin, end=min(piece.end, begin + FRAME), base=base)
