"""A header from a file's first bytes: scanned, and parsed where the scanner declines it."""

from __future__ import annotations

from blobstore.budget import Budget
from blobstore.errors import HeaderError, LimitExceededError
from blobstore.ranges import RangeReader
from blobstore.safetensors import parse
from blobstore.safetensors.header import Header
from blobstore.safetensors.rules import MAX_HEADER, PREFIX, invalid
from blobstore.safetensors.scanned import scan_header

_GIT_LFS = b"version "


def read_header(reader: RangeReader, budget: Budget | None = None) -> Header:
    """Return the header of a safetensors file, read from ``reader`` in two reads and fully validated (rules F1 to F19).

    Where the reader does not know its size, F3 and F17 can't be checked. ``budget`` is that of the checkpoint or the stored
    model that the file belongs to; without one the header may be as large as the format allows.

    Raises: HeaderError with ``rule`` and, where there is one, ``tensor``; ShortReadError when the file shrinks meanwhile;
    LimitExceededError when the header is more than is left of ``budget``.
    """
    try:
        text = _header_text(reader, budget)
        header = parse_header(text, None if reader.size is None else reader.size - PREFIX.size - len(text))
        if budget is not None:
            budget.take_tensors(len(header.tensors), "the header")
    except (HeaderError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None
    return header


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Return the validated header of ``text`` (the bytes after the length) for a data region of ``data_size`` bytes.

    None means unknown: the last tensor's end is then the end. The entries are made when they are asked for.

    Raises: HeaderError for rules F4 to F19; LimitExceededError for JSON nested deeper than 64 levels.
    """
    scanned = scan_header(text, data_size)
    return parse.parse_header(text, data_size) if scanned is None else scanned


def _header_text(reader: RangeReader, budget: Budget | None) -> bytes:
    if reader.size is not None and reader.size < PREFIX.size:
        raise invalid("F1", f"not a safetensors file: it has {reader.size} bytes, a header needs 8")
    prefix = reader.read(0, PREFIX.size)
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_HEADER:
        what = "a git-lfs pointer, not the file it stands for" if prefix == _GIT_LFS else "not a safetensors file"
        raise invalid("F2", f"{what}: its header would have {length:,} bytes, at most {MAX_HEADER:,}")
    if reader.size is not None and PREFIX.size + length > reader.size:
        raise invalid("F3", f"the file ends inside its header of {length:,} bytes")
    if budget is None:
        return reader.read(PREFIX.size, length)
    budget.take_text(length, "the header")
    text = reader.read(PREFIX.size, length)
    budget.give_back_text(length - text.rfind(b"}") - 1)  # padding: blobs are padded to pages by some programs
    return text
