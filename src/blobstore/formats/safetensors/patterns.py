"""Header patterns: the headers of blobs that differ only in how the names of their tensors begin.

Blobs of one tensor differ in its name, and groups of experts in the group's.

A model of 100,000 small tensors has as many headers and a handful of patterns. What does not depend
on the name is checked and encoded once a pattern, by `encode_header`: a header of three arrays then
takes 3 µs instead of 20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.codec import (
    encode_header,
    entry_text,
    framed,
    lay_out,
    padded,
    reserved,
    utf8,
)
from blobstore.formats.safetensors.header import METADATA, PREFIX


class HeaderPattern:
    """The header of a blob that stores ``arrays`` whose names begin alike, and that name is open.

    ``arrays``: suffix of the name, dtype and shape, in stored order. A suffix is empty, or begins
    with a dot: so the name alone decides on which side of ``__metadata__`` its arrays are sorted.
    ``metadata`` and ``align``: as in `encode_header`.

    Raises: HeaderError, LimitExceededError: as `encode_header`.
    """

    def __init__(
        self,
        arrays: Sequence[tuple[str, DType, tuple[int, ...]]],
        metadata: Mapping[str, str],
        align: int,
    ) -> None:
        entries = lay_out(arrays)
        encode_header(entries, metadata, align)  # for its checks: no name makes another header fail
        self._align = align
        self._members = [
            f"{strictjson.text_of(suffix)[1:]}:{entry_text(suffix, entries[suffix])}"
            for suffix in sorted(entries)
        ]
        described = strictjson.text_of(dict(sorted(metadata.items())))
        self._metadata = f'"{METADATA}":{described}' if metadata else ""
        self._fixed = len(utf8(f"{{{self._body('')}}}"))

    def header(self, name: str) -> bytes:
        """Return the header of a tensor's blob: the bytes of `encode_header`.

        Raises: HeaderError for a name that no header can have; LimitExceededError for a long one.
        """
        if name == METADATA:
            raise reserved()
        return framed(self._body(name), self._align)

    def size(self, name: str) -> int:
        """Return the length of `header` in bytes, without making it. Raises: as `header`."""
        if name == METADATA:
            raise reserved()
        nbytes = self._fixed + len(self._members) * (len(utf8(strictjson.text_of(name))) - 2)
        return PREFIX.size + padded(nbytes, self._align)

    def _body(self, name: str) -> str:
        start = strictjson.text_of(name)[:-1]
        arrays = start + f",{start}".join(self._members)
        if not self._metadata:
            return arrays
        return f"{arrays},{self._metadata}" if name < METADATA else f"{self._metadata},{arrays}"
