"""Digest: the sha256 of a blob's bytes, and its file name.

Rule D1: exactly ``sha256:`` and 64 lower-case hex digits. As a file name in ``blobs/``: ``sha256-`` and the same digits.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import InvalidDigestError, quoted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEXT_LENGTH = len("sha256:") + 64


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A sha256 digest. ``hex`` is 64 lower-case hex digits: no other value can exist."""

    hex: str

    def __post_init__(self) -> None:
        if _HEX.fullmatch(self.hex) is None:
            raise InvalidDigestError(f"not a sha256 digest: {quoted(self.hex)}", rule="D1")

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Return the digest that ``sha256:<64 hex>`` names.

        Raises: InvalidDigestError (rule D1) for anything else, upper case and ``sha256-`` included.
        """
        # The length comes first: a hostile megabyte costs nothing.
        if not isinstance(text, str) or len(text) != _TEXT_LENGTH or not text.startswith("sha256:"):
            raise InvalidDigestError(f"not a digest (sha256: and 64 lower-case hex digits): {quoted(text)}", rule="D1")
        return cls(text[len("sha256:") :])

    @classmethod
    def from_file_name(cls, name: str) -> Digest | None:
        """Return the digest that a file in ``blobs/`` is named for, or None when the name is not ``sha256-<64 hex>``."""
        if len(name) == _TEXT_LENGTH and name.startswith("sha256-") and _HEX.fullmatch(name, len("sha256-")):
            return cls(name[len("sha256-") :])
        return None

    @classmethod
    def of(cls, data: ReadableBuffer) -> Digest:
        """Return the digest of bytes in memory, of any contiguous buffer."""
        return cls(hashlib.sha256(data).hexdigest())

    @property
    def file_name(self) -> str:
        """The blob's name in ``blobs/``: ``sha256-<hex>``."""
        return f"sha256-{self.hex}"

    @property
    def short(self) -> str:
        """The first 12 hex digits, as Ollama and docker show an ID."""
        return self.hex[:12]

    def __str__(self) -> str:
        return f"sha256:{self.hex}"
