"""Headers of many small files, scanned at once; Python's objects are made of those that are read.

A model of 50,000 blobs has as many headers of a few forms: its outline needs the names of its
tensors, and each form once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple, overload

from blobstore.formats.safetensors import _native
from blobstore.formats.safetensors.header import METADATA, PREFIX, Header, ScannedEntries
from blobstore.io.budget import Budget
from blobstore.io.ranges import close_quietly


class ScannedOutline(NamedTuple):
    """The logical tensors of several headers, in columns, in stored order.

    ``forms``: of each tensor the place of its form in ``keys``. Tensors have one form, and equal
    keys, if their entries have the same dtypes and shapes by suffix, and what the metadata say of
    them is the same. ``examples``: of each form a header, and a tensor in it. ``counts``: the
    tensors of each header; -1 where the header has to be read alone.
    """

    names: list[str]
    forms: list[int]
    keys: list[bytes]
    examples: list[tuple[int, str]]
    counts: list[int]


class ScannedFiles(Sequence[Header | None]):
    """The headers of files, each made when it is asked for; None for one that was declined."""

    def __init__(self, found: _native.FileHeaders) -> None:
        self._found = found

    def outline(self) -> ScannedOutline:
        """Return the logical tensors of all headers.

        Tensors are grouped as `stored_tensors` does it. The rules for types are not applied here.
        """
        return ScannedOutline(*self._found.outline())

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> Header | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Header | None]: ...
    def __getitem__(self, index: int | slice) -> Header | Sequence[Header | None] | None:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        scanned = self._found.header(index, unescaped)
        return None if scanned is None else header_from(*scanned)


def headers_in(
    folder: str | os.PathLike[str], files: Sequence[tuple[str, int]], budget: Budget
) -> Sequence[Header | None]:
    """Return the headers of many files in a folder, read at once: `ScannedFiles`.

    ``files`` are names and sizes in bytes. None for a file that `header_of` has to read, or refuse:
    one that is not a regular file of that size, whose header has over 1 MiB (or is the one with
    which headers of over 4 KiB have more than 64 MiB), or that the scanner declines; and for all
    files if together they exceed the rest of ``budget``.
    The interpreter lock is released while they are read.
    """
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return [None] * len(files)
    try:
        found = _native.scan_files(opened, files)
    finally:
        close_quietly(opened)
    return ScannedFiles(found) if budget.took_headers(*found.totals()) else [None] * len(files)


def header_from(scanned: _native.Scanned, nbytes: int) -> Header | None:
    """Return the header of a scanned text of ``nbytes``; None if the parser has to read it."""
    places, columns, metadata = scanned
    if METADATA in places:  # written in escapes
        return None
    entries = ScannedEntries(places, columns)
    return Header(entries, metadata, PREFIX.size + nbytes, within_limits=True)


def unescaped(literal: bytes) -> str:
    """Return the string of a JSON literal. Raises: ValueError for half of a surrogate pair."""
    name: str = json.loads(literal.decode())
    name.encode()
    return name
