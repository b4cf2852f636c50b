"""SHA-256 of many streams at once, in C++.

Blobs are independent streams, so their blocks can be hashed side by side: in the lanes of vectors
(AVX-512, AVX2), or with the SHA instructions of x86-64 and arm64, interleaved. When the module is
loaded, a measurement of a tenth of a millisecond chooses a method for each number of streams. The
digests do not depend on it.
"""

import hashlib
import mmap
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from blobstore.errors import UsageError
from blobstore.hashing import _native
from blobstore.hashing._native import Sha256 as Sha256  # exported

Bytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""Contiguous bytes."""

_OPENSSL = "openssl"
METHODS = ("fastest", "avx512", "avx2", "sha-ni", "armv8", "plain", _OPENSSL)
"""What `use_method` takes. A processor has some of them."""


class Stream(Protocol):
    """One stream of bytes that is hashed. One thread uses it at a time."""

    def update(self, data: Bytes, /) -> None:
        """Add bytes."""

    def digest(self) -> bytes:
        """Return the 32 bytes of the digest of all bytes so far."""


def use_method(name: str) -> None:
    """Choose how this process hashes, by a name in `METHODS`.

    "fastest" measures what the processor has. "openssl" is Python's hashlib.

    Raises: UsageError for another word, or for a method that the processor does not have.
    """
    global _uses_openssl  # noqa: PLW0603  # one choice a process, made before work starts
    if name not in METHODS:
        raise UsageError(
            f"unknown SHA-256 method {name!r}", hint=f"Use one of: {', '.join(METHODS)}."
        )
    here = _native.families()
    possible = [method for method in METHODS if method in ("fastest", *here, _OPENSSL)]
    if name not in possible:
        hint = f"Use one of: {', '.join(possible)}."
        raise UsageError(f"this processor has no SHA-256 method {name!r}", hint=hint)
    # AVX-512's lanes are for many streams; AVX2 also has a method for one.
    named = [name, "avx2"] if name == "avx512" else [name]
    _native.use(named if name in here else here)
    # OpenSSL has code for processors that have none of our methods.
    _uses_openssl = name == _OPENSSL or (name == "fastest" and here == ["plain"])


_uses_openssl = False
use_method("fastest")


def in_use() -> str:
    """Return the methods for one stream and for many, such as "sha-ni, avx512 x 16"."""
    if _uses_openssl:
        return _OPENSSL
    names = (name if width == 1 else f"{name} x {width}" for name, width in _native.in_use())
    return ", ".join(dict.fromkeys(names))


def width() -> int:
    """Return the number of streams that are best hashed together."""
    return 1 if _uses_openssl else _native.in_use()[-1][1]


def stream() -> Stream:
    """Return a new stream. For one that can be stopped and continued, make a `Sha256`."""
    return hashlib.sha256() if _uses_openssl else Sha256()


def update_all(streams: Sequence[Stream], pieces: Sequence[Bytes]) -> None:
    """Add a piece to each of several streams; the interpreter lock is released meanwhile.

    Raises: RuntimeError if another thread hashes one of the streams, or if one is given twice.
    """
    if _uses_openssl or not all(isinstance(one, Sha256) for one in streams):
        for one, piece in zip(streams, pieces, strict=True):
            one.update(piece)
    else:
        _native.update_all(list(streams), list(pieces))


def digests(pieces: Sequence[Bytes]) -> list[bytes]:
    """Return the digest of each piece, 32 bytes, in their order."""
    if _uses_openssl:
        return [hashlib.sha256(piece).digest() for piece in pieces]
    return _native.digests(list(pieces))
