"""Where a reply ends, and how long its chunks are, as its bytes come: what h11 reads too widely, or does not report.

h11 takes 20 hexadecimal digits for a chunk's length, and Python has integers for that. A length of 2⁶³ and more is no
length of anything, and elsewhere it wraps around (RFC 9112 section 7.1: a recipient has to anticipate large ones and
prevent overflow), so such a reply is refused here. And bytes behind the end of a reply would be taken for the next one
(section 9.2), so whoever keeps the connection has to know of them.
"""

from __future__ import annotations

import re

_LENGTH = re.compile(rb"[0-9A-Fa-f]{1,20}")
_LIMIT = 2**63
_HEAD, _CHUNKS, _BODY = range(3)


class Framing:
    """Follows one reply through its bytes. ``overrun`` says that some came behind its end, where it has a Content-Length."""

    def __init__(self) -> None:
        self.overrun = False
        self._state = _HEAD
        self._line = b""
        self._lines: list[bytes] = []
        self._skip = 0
        self._left: int | None = None

    @property
    def in_head(self) -> bool:
        """Whether the head has not come to its end yet."""
        return self._state == _HEAD

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; return whether all lengths of chunks among them are lengths."""
        at = 0
        while at < len(data) and self._state != _BODY:
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            end = data.find(b"\n", at)
            self._line += data[at : end if end >= 0 else len(data)]
            if end < 0:
                return True
            at = end + 1
            line, self._line = self._line.rstrip(b"\r"), b""
            if self._state == _HEAD:
                self._read_head_line(line)
            elif line and not self._read_length(line):
                return False
        if self._left is not None:
            self._left -= len(data) - at
            self.overrun = self._left < 0
        return True

    def _read_head_line(self, line: bytes) -> None:
        if line:
            self._lines.append(line.lower())
            return
        status, *lines = self._lines or [b""]
        self._lines = []
        if status.partition(b" ")[2].startswith(b"1"):
            return  # an interim reply: another head follows (RFC 9110 section 15.2)
        fields = dict(line.partition(b":")[::2] for line in lines)
        self._state = _CHUNKS if b"transfer-encoding" in fields else _BODY
        length = fields.get(b"content-length", b"").strip()
        if self._state == _BODY and length.isdigit():
            self._left = int(length)

    def _read_length(self, line: bytes) -> bool:
        digits = _LENGTH.match(line)
        length = int(digits[0], 16) if digits else 0  # h11 refuses an invalid length
        self._skip = length
        if length == 0:
            self._state = _BODY
        return length < _LIMIT
