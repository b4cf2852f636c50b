"""The lengths of chunks, as a reply gives them: the one thing of HTTP/1.1's framing that h11 reads too widely.

h11 takes 20 hexadecimal digits for a chunk's length, and Python has integers for that. A length of 2⁶³ and more is no
length of anything, and elsewhere it wraps around (RFC 9112 section 7.1: a recipient has to anticipate large ones and
prevent overflow), so such a reply is refused here.
"""

from __future__ import annotations

_LIMIT = 2**63
_HEAD, _CHUNKS, _PLAIN = range(3)


class ChunkLengths:
    """Follows one reply through its bytes as they come, and says of a chunk's length when it can't be one."""

    def __init__(self) -> None:
        self._state = _HEAD
        self._line = b""
        self._skip = 0
        self._lines: list[bytes] = []

    @property
    def in_head(self) -> bool:
        """Whether the head has not come to its end yet."""
        return self._state == _HEAD

    def feed(self, data: bytes) -> bool:
        """Return whether all lengths up to the end of ``data`` are lengths."""
        at = 0
        while at < len(data) and self._state != _PLAIN:
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            end = data.find(b"\n", at)
            self._line += data[at : end if end >= 0 else len(data)]
            if end < 0:
                break
            at = end + 1
            line, self._line = self._line.rstrip(b"\r"), b""
            if self._state == _HEAD:
                self._read_head_line(line)
            elif line and not self._read_length(line):
                return False
        return True

    def _read_head_line(self, line: bytes) -> None:
        if line:
            self._lines.append(line.lower())
            return
        status, *fields = self._lines or [b""]
        self._lines = []
        if status.partition(b" ")[2].startswith(b"1"):
            return  # an interim reply: another head follows (RFC 9110 section 15.2)
        chunked = any(field.startswith(b"transfer-encoding:") for field in fields)
        self._state = _CHUNKS if chunked else _PLAIN

    def _read_length(self, line: bytes) -> bool:
        try:
            length = int(line.partition(b";")[0], 16)
        except ValueError:
            length = 0  # h11's to refuse
        self._skip = length
        if length == 0:
            self._state = _PLAIN
        return length < _LIMIT
