"""Which bytes of a file a reply brings, and of which version of it: the part of rule R1 that is about ranges.

Sources: RFC 9110 sections 14.4 (Content-Range), 15.3.7 (206), 8.8 (validators), 13.1.5 (If-Range).

- a 206 has exactly one ``Content-Range: bytes first-last/total`` of ASCII digits; ``total`` may be ``*``, unknown
- ``first`` is the asked one, ``last`` not beyond the asked one and not before ``first``, ``total`` beyond ``last``
- its body has ``last - first + 1`` bytes, and so has its Content-Length, where it has one
- it is not ``multipart/byteranges``, which answers several ranges
- total, ETag and Last-Modified, where they are given, are the same on every reply
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from blobstore.errors import CorruptDataError
from blobstore.transport import Reply

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.ASCII | re.IGNORECASE)
_MAX_SIZE = 2**63 - 1
_STRONG = re.compile(r'"[!#-~]*"', re.ASCII)


def check_part(reply: Reply, begin: int, end: int) -> tuple[int, int | None]:
    """Return the end of the range in a 206 that answers ``[begin, end)``, and the file's size, None where it is not said.

    Raises: RemoteError (rule R1) for any other reply.
    """
    text = reply.field("content-range")
    match = _CONTENT_RANGE.fullmatch(text or "")
    if match is None:
        raise reply.refuse(f"answers 206 with the Content-Range {(text or 'none')[:60]!r}")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    right = first == begin and first <= last < end and (total is None or last < total <= _MAX_SIZE)
    if not right:
        raise reply.refuse(f"answers a request for bytes {begin}-{end - 1} with the Content-Range {text!r}")
    if (reply.field("content-type") or "").lower().startswith("multipart/byteranges"):
        raise reply.refuse("answers one range in several parts")
    if reply.length not in (None, last + 1 - first):
        raise reply.refuse(f"has a Content-Length of {reply.length} beside the Content-Range {text!r}")
    return last + 1, total


@dataclass(frozen=True, slots=True)
class Version:
    """Which version of a file it is: what its server says of it. None is what it does not say."""

    size: int | None
    etag: str | None
    modified: str | None

    @classmethod
    def of(cls, reply: Reply, size: int | None) -> Self:
        """Return the version in a reply's head."""
        return cls(size, reply.field("etag"), reply.field("last-modified"))

    @property
    def condition(self) -> tuple[tuple[str, str], ...]:
        """An If-Range field, where the server gave a strong validator: only that may be one (RFC 9110 section 13.1.5)."""
        return (("If-Range", self.etag),) if self.etag is not None and _STRONG.fullmatch(self.etag) else ()

    def check_same(self, other: Version, name: str) -> None:
        """Raise CorruptDataError when a later reply is of another version; fields that only one has do not count."""
        pairs = ((self.size, other.size), (self.etag, other.etag), (self.modified, other.modified))
        if any(one is not None and two is not None and one != two for one, two in pairs):
            raise changed(name)


def changed(name: str) -> CorruptDataError:
    """Return the error of a file that is not the same on its server any more."""
    return CorruptDataError(
        f"{name} changed while it was read", path=name, rule="R1", hint="Read it again from its beginning."
    )
