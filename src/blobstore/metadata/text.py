"""The text of a safetensors header, with other metadata and everything else byte for byte as it was. Pure.

A header is not decoded and encoded again: that would lose the order of its tensors, fields unknown here, and how
numbers are written. The value of ``__metadata__`` is found in the text and replaced.

Spare room is kept behind that value, not at the header's end: JSON allows spaces there as well, and so the next edit leaves
all that follows where it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder

from blobstore.errors import LimitExceededError, UsageError, quoted
from blobstore.safetensors import MAX_HEADER

PREFIX = 8
"""Bytes of the header's length, before its text."""
_KEY = "__metadata__"
_SPACE = " \t\r\n"
_PAGE = 4096
_MOST_ALIGNED = 16_384
_LEAST_ALIGNED = 8
_SPARE = 1024
"""Bytes that a new header has left at least, for the edits to come."""


@dataclass(frozen=True, slots=True)
class HeaderText:
    """A header's text in parts: what stands ``before`` the metadata's value, the value, the ``room`` that it may have.

    ``after`` is what follows the room, without the spaces at the end: there are ``padding`` of those.
    """

    before: bytes
    value: bytes
    room: int
    after: bytes
    padding: int

    @classmethod
    def parse(cls, raw: bytes) -> HeaderText:
        """Return the parts of a text that has passed `parse_header`."""
        body = raw.rstrip(b" ")
        text = body.decode()
        found = _find(text)
        if found is None:
            rest = text[_skip(text, 1) :]
            head = f'{{"{_KEY}":'
            return cls(head.encode(), b"", -1, ("" if rest == "}" else ",").encode() + rest.encode(), len(raw) - len(body))
        begin, end = found
        stop = _skip(text, end)
        value = text[begin:end].encode()
        return cls(text[:begin].encode(), value, len(value) + stop - end, text[stop:].encode(), len(raw) - len(body))

    def held(self, value: bytes) -> bytes | None:
        """Return the text with that value and all that follows where it was; None when the value is too long for that."""
        spare = self.room - len(value)
        return None if spare < 0 else b"".join((self.before, value, b" " * spare, self.after, b" " * self.padding))

    def shifted(self, value: bytes, length: int) -> bytes | None:
        """Return the text with that value in ``length`` bytes, what follows it at the end; None when that is too short."""
        spare = length - len(self.before) - len(value) - len(self.after)
        return None if spare < 0 else b"".join((self.before, value, b" " * spare, self.after))

    def grown(self, value: bytes, data_start: int) -> bytes:
        """Return the text with that value for a new file, whose data began at byte ``data_start`` of the old one.

        They move by whole pages of 4096 bytes, of 16,384 where that was their alignment: so they stay as aligned as they
        were, and blocks can be shared between the files. Raises: LimitExceededError over 100,000,000 bytes.
        """
        needed = PREFIX + len(self.before) + len(value) + len(self.after)
        if needed - PREFIX > MAX_HEADER:
            raise LimitExceededError(f"limit exceeded: a header of {needed - PREFIX:,} bytes, at most {MAX_HEADER:,}")
        step = _MOST_ALIGNED if data_start % _MOST_ALIGNED == 0 else _PAGE
        origin = data_start % step if data_start % _LEAST_ALIGNED == 0 else 0
        start = needed + _SPARE
        start += (origin - start) % step
        text = self.shifted(value, min(start - PREFIX, MAX_HEADER))
        if text is None:
            raise AssertionError("there is room for what is needed")
        return text


def encode_metadata(metadata: Mapping[str, str]) -> bytes:
    """Return the value of ``__metadata__``: compact JSON in the order given.

    Raises: UsageError for a key or value that UTF-8 can't encode.
    """
    for key, value in metadata.items():
        if not all(isinstance(text, str) for text in (key, value)):
            raise UsageError(f"metadata map strings to strings, not {quoted(key)} to {quoted(value)}")
    try:
        return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise UsageError("metadata are texts in UTF-8, and one holds half of a surrogate pair") from None


def difference(old: bytes, new: bytes) -> tuple[int, int]:
    """Return where two different texts of one length begin to differ, and where they end to."""
    first = _equal_bytes(memoryview(old), memoryview(new))
    rest = slice(None, first - 1 if first else None, -1)
    return first, len(old) - _equal_bytes(memoryview(old[rest]), memoryview(new[rest]))


def _equal_bytes(one: memoryview, other: memoryview) -> int:
    """Return how many bytes at the beginning are equal."""
    least, most = 0, len(one)
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _find(text: str) -> tuple[int, int] | None:
    """Return where the value of ``__metadata__`` begins and ends, or None if the header has none."""
    decode = JSONDecoder().raw_decode
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = decode(text, begin)
        if key == _KEY:
            return begin, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return None


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
