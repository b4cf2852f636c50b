"""Ranges that a client asks for (RFC 9110 section 14): one range of bytes, or the whole. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=[ \t]*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})[ \t]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The bytes ``[begin, end)`` of ``size``; ``is_whole``: no range was asked for."""

    begin: int
    end: int
    size: int
    is_whole: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes these are."""
        return self.end - self.begin

    @property
    def content_range(self) -> str:
        """The field ``Content-Range`` of an answer with the part."""
        return f"bytes {self.begin}-{self.end - 1}/{self.size}"


def part_of(size: int, field: str | None) -> ByteSpan | None:
    """Return the part that a ``Range`` field asks for; None if there are no such bytes (416).

    The whole for no field, several ranges, other units, and a field that is not valid: a server may
    ignore it (section 14.2).
    """
    match = _RANGE.fullmatch(field or "")
    if match is None or not (match["first"] or match["last"]):
        return ByteSpan(0, size, size, is_whole=True)
    if not match["first"]:
        begin, end = max(0, size - int(match["last"])), size
    else:
        begin = int(match["first"])
        last = int(match["last"]) if match["last"] else size - 1
        if match["last"] and last < begin:
            return ByteSpan(0, size, size, is_whole=True)
        end = min(last + 1, size)
    return ByteSpan(begin, end, size) if begin < end else None
