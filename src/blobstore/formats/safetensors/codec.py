"""Headers read and written.

The scanner reads a header from a file's first bytes and returns what the parser returns, or
nothing. The parser, its twin in Python, reads again what the scanner declines, and says what is
wrong. Headers are written as canonical text; the entries are held to the rules for reading.

Writing is Python only. Blobs of one tensor, of which a model may have 100,000, share the work that
their names do not change: patterns.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from blobstore.errors import HeaderError, LimitExceededError, quoted
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DTYPE_BY_NAME, DType
from blobstore.formats.safetensors import _native
from blobstore.formats.safetensors.header import (
    MAX_U64,
    METADATA,
    PREFIX,
    Header,
    TensorEntry,
    check_coverage,
    check_metadata,
    check_size,
    invalid,
)
from blobstore.formats.safetensors.scanned_files import header_from, unescaped
from blobstore.formats.strictjson import StrictJsonError
from blobstore.io.budget import MAX_HEADER, Budget
from blobstore.io.ranges import RangeReader


def encode_header(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], align: int
) -> bytes:
    """Return the length prefix and the canonical header text: what a file has before its data.

    Compact JSON with Go's escapes; top-level keys sorted by their UTF-8 bytes; fields in the order
    dtype, shape, data_offsets; metadata keys sorted, and ``__metadata__`` only when not empty; then
    spaces, so that the data start at a multiple of ``align`` bytes. Source: docs/formats.md section
    1; the records in fixtures/ollama-records.

    Raises: HeaderError when the entries would not pass `parse_header`.
    """
    if METADATA in tensors:
        raise reserved()
    members = {name: entry_text(name, entry) for name, entry in tensors.items()}
    if map_of_strings := check_metadata(dict(sorted(metadata.items()))):
        members[METADATA] = strictjson.text_of(map_of_strings)
    check_coverage(tensors, None)
    # The order of code points is the order of UTF-8 bytes.
    body = ",".join([f"{strictjson.text_of(name)}:{members[name]}" for name in sorted(members)])
    return framed(body, align)


def framed(members: str, align: int) -> bytes:
    """Return the header whose JSON object has ``members``, with its length and its padding.

    Raises: HeaderError for half of a surrogate pair; LimitExceededError.
    """
    text = utf8(f"{{{members}}}")
    length = padded(len(text), align)
    return PREFIX.pack(length) + text.ljust(length)


def utf8(text: str) -> bytes:
    """Return a header's text as bytes. Raises: HeaderError for half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid(
            "F4", "a name or the metadata contain half of a surrogate pair, which can't be written"
        ) from None


def padded(nbytes: int, align: int) -> int:
    """Return the length of a text of ``nbytes`` with its padding. Raises: LimitExceededError."""
    padded_nbytes = nbytes + -(PREFIX.size + nbytes) % align
    if padded_nbytes > MAX_HEADER:
        raise LimitExceededError(
            f"limit exceeded: a header of {nbytes:,} bytes, at most {MAX_HEADER:,}"
        )
    return padded_nbytes


def reserved() -> HeaderError:
    """Return the error for a tensor that has the name of the metadata."""
    return invalid("F9", f"a tensor can't have the name {METADATA}", METADATA)


def entry_text(name: str, entry: TensorEntry) -> str:
    """Return the JSON of a tensor's entry. Raises: HeaderError (F14, F15)."""
    check_size(name, entry)
    shape = ",".join(map(str, entry.shape))
    offsets = f"{entry.begin},{entry.end}"
    return f'{{"dtype":"{entry.dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'


def lay_out(arrays: Iterable[tuple[str, DType, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Return entries for arrays stored one after the other from offset 0, in the order given."""
    entries: dict[str, TensorEntry] = {}
    begin = 0
    for name, dtype, shape in arrays:
        end = begin + dtype.nbytes(shape)
        if name in entries:
            raise invalid("F8", "two arrays of one file have the same name", name)
        entries[name] = TensorEntry(dtype, shape, begin, end)
        begin = end
    return entries


def scan_header(text: bytes, data_size: int | None) -> Header | None:
    """Return the header of ``text`` as `parse_strictly` does, or None if the scanner declines it.

    The scanner declines every invalid header, and these valid ones: metadata that are null, unknown
    fields in an entry, an entry's keys written in escapes, and names, ranks and dimensions beyond
    the limits of `Header.check_limits`. It releases the interpreter lock while it reads the text.
    """
    if data_size is not None and not 0 <= data_size <= MAX_U64:
        return None
    scanned = _native.scan(text, data_size, unescaped)
    return None if scanned is None else header_from(scanned, len(text))


_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_RULE_OF_REASON = {"utf8": "F4", "syntax": "F7", "duplicate": "F8"}


def parse_strictly(text: bytes, data_size: int | None) -> Header:
    """Return the header of ``text`` by the parser, the scanner's twin; else as `parse_header`."""
    with collector_paused():
        document = _parse_json(text)
        value = document.pop(METADATA, None)
        metadata = {} if value is None else check_metadata(value)
        tensors = {name: _entry(name, value) for name, value in document.items()}
        check_coverage(tensors, data_size)
    return Header(tensors, metadata, PREFIX.size + len(text))


_pausing = threading.Lock()
_pauses = 0
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would walk the objects of headers many times.

    A million tensors take 5 s instead of 12 (fixtures/corpus, st-many-1e6-empty), and the first
    list of a store a tenth less. Threads may pause it together; the last one resumes it.
    """
    global _pauses, _was_on  # noqa: PLW0603  # the collector is the process's
    with _pausing:
        if not _pauses:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pausing:
            _pauses -= 1
            if not _pauses and _was_on:
                gc.enable()


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{") and text.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"{"):
        raise invalid("F5", f"the header begins with {text[:1]!r}, not with '{{'")
    body = text.rstrip(b" ")
    if body and not body.endswith(b"}") and body.rstrip(b" \t\r\n\v\f\0").endswith(b"}"):
        raise invalid("F6", "the header is padded with other bytes than spaces")
    try:
        document = strictjson.parse(body)
    except StrictJsonError as error:
        if error.reason in ("depth", "values"):
            raise LimitExceededError(f"limit exceeded: the header: {error}", rule="F10") from None
        raise invalid(_RULE_OF_REASON[error.reason], f"the header is not valid: {error}") from None
    if not isinstance(document, dict):
        raise invalid("F7", "the header is not a JSON object")
    return document


def _entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or not value.keys() >= _ENTRY_FIELDS:
        raise invalid("F10", "the entry is not an object with dtype, shape and data_offsets", name)
    if len(value) > len(_ENTRY_FIELDS):
        _check_unknown_fields(value, name)
    dtype_name = value["dtype"]
    dtype = DTYPE_BY_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise invalid("F11", f"unknown dtype {quoted(dtype_name)}", name)
    shape = value["shape"]
    if not isinstance(shape, list) or not all(
        type(dim) is int and 0 <= dim <= MAX_U64 for dim in shape
    ):
        raise invalid("F12", "shape is not a list of non-negative integers", name)
    offsets = value["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2  # noqa: PLR2004
        or not all(type(n) is int for n in offsets)
    ):
        raise invalid("F13", "data_offsets is not [begin, end]", name)
    begin, end = offsets
    if not 0 <= begin <= end <= MAX_U64:
        raise invalid("F13", f"data_offsets [{begin}, {end}] are not 0 <= begin <= end", name)
    entry = TensorEntry(dtype, tuple(shape), begin, end)
    check_size(name, entry)
    return entry


def _check_unknown_fields(value: dict[str, Any], name: str) -> None:
    try:
        strictjson.check_depth(value, strictjson.MAX_DEPTH - 1)
        strictjson.check_numbers(value)
    except StrictJsonError as error:
        raise LimitExceededError(
            f"limit exceeded: a field is {error}", rule="F10", tensor=name
        ) from None


_GIT_LFS = b"version "


def header_of(
    reader: RangeReader, budget: Budget | None = None, *, first_nbytes: int = PREFIX.size
) -> Header:
    """Return the header of a safetensors file, validated (rules F1 to F19).

    If the reader does not know its size, F3 and F17 are not checked. ``budget`` is that of the
    checkpoint or the stored model that the file belongs to; without one the header may be as large
    as the format allows. ``first_nbytes`` of the file are read first, and a header that ends behind
    them by a second read.

    Raises: HeaderError with ``rule`` and, if one is wrong, ``tensor``; ShortReadError when the file
    shrinks meanwhile; LimitExceededError when the header exceeds the rest of ``budget``.
    """
    try:
        text = _header_text(reader, budget, first_nbytes)
        size = None if reader.size is None else reader.size - PREFIX.size - len(text)
        header = parse_header(text, size)
        if budget is not None:
            budget.take_tensors(len(header.tensors), "the header")
    except (HeaderError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None
    return header


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Return the validated header of ``text``, the bytes after the length.

    ``data_size`` is the size of the data region; None means unknown: the data then end where the
    last tensor does. Entries are made when they are first read.

    Raises: HeaderError for rules F4 to F19; LimitExceededError for JSON nested deeper than 64
    levels.
    """
    scanned = scan_header(text, data_size)
    return parse_strictly(text, data_size) if scanned is None else scanned


def _header_text(reader: RangeReader, budget: Budget | None, first_nbytes: int) -> bytes:
    size = reader.size
    if size is not None and size < PREFIX.size:
        raise invalid("F1", f"not a safetensors file: it has {size} bytes, a header needs 8")
    head = reader.read(0, PREFIX.size if size is None else min(size, first_nbytes))
    (length,) = PREFIX.unpack_from(head)
    if length > MAX_HEADER:
        is_pointer = head.startswith(_GIT_LFS)
        what = "a git-lfs pointer, not its file" if is_pointer else "not a safetensors file"
        raise invalid(
            "F2", f"{what}: its header would have {length:,} bytes, at most {MAX_HEADER:,}"
        )
    end = PREFIX.size + length
    if size is not None and end > size:
        raise invalid("F3", f"the file ends inside its header of {length:,} bytes")
    if budget is not None:
        budget.take_text(length, "the header")
    text = head[PREFIX.size : end] if end <= len(head) else reader.read(PREFIX.size, length)
    if budget is not None:
        budget.give_back_text(length - text.rfind(b"}") - 1)  # some programs pad blobs to pages
    return text
