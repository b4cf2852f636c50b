"""Safetensors headers: parse, validate, encode. Pure over bytes; one set of checks for reading and writing.

The rules, each with the number that its error carries (safetensors README, "Format"; where the reference library 0.8.0
is laxer, the README wins):

F1  the file has 8 bytes: a u64, little-endian, the header's length N     F2  N <= 100,000,000
F3  8 + N <= file size          F4  the header is UTF-8, no byte order mark          F5  it begins with ``{``
F6  after the JSON only spaces  F7  strict JSON, one object                          F8  no duplicate keys
F9  ``__metadata__`` maps strings to strings
F10 every other value is an object with dtype, shape, data_offsets; unknown fields are accepted and not kept
F11 dtype is a known name       F12 shape: non-negative integers
F13 data_offsets: [begin, end], integers, begin <= end
F14 end - begin = elements * bits / 8, without overflow in 64 bits          F15 sub-byte tensors fill whole bytes
F16 the ranges, sorted, cover the data from 0 without hole or overlap       F17 the last end is the end of the file
F18 any string is a tensor name                                             F19 empty and rank-0 tensors are legal

Offsets in `TensorEntry` count from the start of the data region, as in the file.
"""

from __future__ import annotations

import gc
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blobstore import strictjson
from blobstore.dtypes import DTYPE_BY_NAME, DType
from blobstore.errors import HeaderError, LimitExceededError, quoted
from blobstore.ranges import RangeReader
from blobstore.strictjson import Reason, StrictJsonError

MAX_HEADER = 100_000_000
MAX_TENSORS = 1_000_000
MAX_RANK = 64
MAX_NAME_BYTES = 65_536
_MAX_U64 = 2**64 - 1
_MAX_I64 = 2**63 - 1
_PREFIX = struct.Struct("<Q")
_METADATA = "__metadata__"
_GIT_LFS = b"version "
_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_RULE_OF_REASON = {Reason.UTF8: "F4", Reason.SYNTAX: "F7", Reason.DUPLICATE: "F8"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. ``begin`` and ``end`` are byte offsets in the data region, half-open."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header. ``tensors`` keeps the order of the JSON text; ``data_start`` is an offset in the file."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int

    def check_limits(self, file: str) -> None:
        """Raise LimitExceededError, naming ``file``, when the tensors could not become arrays and blobs here.

        A header beyond these limits is valid and can be listed: over 1,000,000 tensors, a rank over 64 (numpy's own
        limit) or dimensions that overflow 63 bits, a name over 64 KiB.
        """
        if len(self.tensors) > MAX_TENSORS:
            raise _beyond(f"{len(self.tensors):,} tensors, at most {MAX_TENSORS:,}", file)
        for name, entry in self.tensors.items():
            if len(entry.shape) > MAX_RANK:
                raise _beyond(f"{quoted(name)} has rank {len(entry.shape)}, at most {MAX_RANK}", file, name)
            if math.prod(max(dim, 1) for dim in entry.shape) * entry.dtype.bits > 8 * _MAX_I64:
                raise _beyond(f"the dimensions of {quoted(name)} overflow 63 bits", file, name)
            if len(name) * 4 > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES:
                raise _beyond(f"the tensor name {quoted(name)} is over {MAX_NAME_BYTES:,} bytes", file)


def read_header(reader: RangeReader) -> Header:
    """Return the header of a safetensors file, read from ``reader`` in two reads and fully validated (rules F1 to F19).

    Where the reader does not know its size, F3 and F17 can't be checked.

    Raises: HeaderError with ``rule`` and, where there is one, ``tensor``; ShortReadError when the file shrinks meanwhile.
    """
    try:
        text = _header_text(reader)
        return parse_header(text, None if reader.size is None else reader.size - _PREFIX.size - len(text))
    except (HeaderError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None


def _header_text(reader: RangeReader) -> bytes:
    if reader.size is not None and reader.size < _PREFIX.size:
        raise _invalid("F1", f"no safetensors file: it has {reader.size} bytes, a header needs 8")
    prefix = reader.read(0, _PREFIX.size)
    (length,) = _PREFIX.unpack(prefix)
    if length > MAX_HEADER:
        what = "a git-lfs pointer, not the file it stands for" if prefix == _GIT_LFS else "no safetensors file"
        raise _invalid("F2", f"{what}: its header would have {length:,} bytes, at most {MAX_HEADER:,}")
    if reader.size is not None and _PREFIX.size + length > reader.size:
        raise _invalid("F3", f"the file ends inside its header of {length:,} bytes")
    return reader.read(_PREFIX.size, length)


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Return the validated header of ``text`` (the bytes after the length) for a data region of ``data_size`` bytes.

    None is a size that nobody knows: the last tensor's end is then the end.

    Raises: HeaderError for rules F4 to F19; LimitExceededError for JSON nested deeper than 64 levels.
    """
    with _collector_paused():
        document = _parse_json(text)
        metadata = _metadata(document.pop(_METADATA, {}))
        tensors = {name: _entry(name, value) for name, value in document.items()}
        check_coverage(tensors, data_size)
    return Header(tensors, metadata, _PREFIX.size + len(text))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would walk the millions of new objects of a large header again and again.

    A million tensors take 5 s instead of 12 (fixtures/corpus, st-many-1e6-empty).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{") and text.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"{"):
        raise _invalid("F5", f"the header begins with {text[:1]!r} and not with '{{'")
    body = text.rstrip(b" ")
    if body and not body.endswith(b"}") and body.rstrip(b" \t\r\n\v\f\0").endswith(b"}"):
        raise _invalid("F6", "the header is padded with something else than spaces")
    try:
        document = strictjson.parse(body)
    except StrictJsonError as error:
        if error.reason == Reason.DEPTH:
            raise LimitExceededError(f"limit exceeded: the header is {error}", rule="F10") from None
        raise _invalid(_RULE_OF_REASON[error.reason], f"the header is not valid: {error}") from None
    if not isinstance(document, dict):
        raise _invalid("F7", "the header is not a JSON object")
    return document


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _invalid("F9", "__metadata__ does not map strings to strings")
    return value


def _entry(name: str, value: Any) -> TensorEntry:
    if not isinstance(value, dict) or not value.keys() >= _ENTRY_FIELDS:
        raise _invalid("F10", "the entry is not an object with dtype, shape and data_offsets", name)
    if len(value) > len(_ENTRY_FIELDS):
        _check_unknown_fields(value, name)
    dtype_name = value["dtype"]
    dtype = DTYPE_BY_NAME.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _invalid("F11", f"unknown dtype {quoted(dtype_name)}", name)
    shape = value["shape"]
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim <= _MAX_U64 for dim in shape):
        raise _invalid("F12", "shape is not a list of non-negative integers", name)
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):  # noqa: PLR2004
        raise _invalid("F13", "data_offsets is not [begin, end]", name)
    begin, end = offsets
    if not 0 <= begin <= end <= _MAX_U64:
        raise _invalid("F13", f"data_offsets [{begin}, {end}] are not 0 <= begin <= end", name)
    entry = TensorEntry(dtype, tuple(shape), begin, end)
    _check_size(name, entry)
    return entry


def _check_unknown_fields(value: dict[str, Any], name: str) -> None:
    try:
        strictjson.check_depth(value, strictjson.MAX_DEPTH - 1)
    except StrictJsonError as error:
        raise LimitExceededError(f"limit exceeded: a field is {error}", rule="F10", tensor=name) from None


def _check_size(name: str, entry: TensorEntry) -> None:
    bits = entry.dtype.bits
    for dim in entry.shape:
        bits *= dim
        # Checked after every factor: a later 0 must not hide an overflow, or the verdict would depend on the order.
        if bits > _MAX_U64:
            raise _invalid("F14", f"shape {list(entry.shape)} overflows 64 bits", name)
    if bits % 8:
        raise _invalid("F15", f"{bits} bits of {entry.dtype} do not fill whole bytes", name)
    if bits // 8 != entry.nbytes:
        raise _invalid("F14", f"{entry.nbytes} bytes for {entry.dtype} {list(entry.shape)}, which needs {bits // 8}", name)


def check_coverage(tensors: Mapping[str, TensorEntry], data_size: int | None) -> None:
    """Raise HeaderError (F16, F17) unless the tensors' ranges cover ``[0, data_size)`` without hole or overlap."""
    expected = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            kind = "overlaps" if entry.begin < expected else "leaves a hole before"
            raise _invalid("F16", f"the range [{entry.begin}, {entry.end}] {kind} byte {expected} of the data", name)
        expected = entry.end
    if data_size is not None and expected != data_size:
        raise _invalid("F17", f"the data have {data_size} bytes, the header describes {expected}")


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], align: int) -> bytes:
    """Return the length prefix and the canonical header text: what a file has before its data.

    Compact JSON, top-level keys sorted by their UTF-8 bytes, fields in the order dtype, shape, data_offsets, metadata
    keys sorted and ``__metadata__`` only when non-empty, Go's escapes, then spaces so that the data start at a multiple
    of ``align`` bytes. Source: docs/formats.md section 1; the records in fixtures/ollama-records.

    Raises: HeaderError when the entries would not pass `parse_header`.
    """
    document: dict[str, Any] = {name: _encoded_entry(name, entry) for name, entry in tensors.items()}
    if metadata:
        document[_METADATA] = dict(sorted(_metadata(dict(metadata)).items()))
    check_coverage(tensors, max((entry.end for entry in tensors.values()), default=0))
    text = strictjson.encode(dict(sorted(document.items(), key=lambda item: item[0].encode())))
    padding = -(_PREFIX.size + len(text)) % align
    if len(text) + padding > MAX_HEADER:
        raise LimitExceededError(f"limit exceeded: a header of {len(text):,} bytes, at most {MAX_HEADER:,}")
    return _PREFIX.pack(len(text) + padding) + text + b" " * padding


def _encoded_entry(name: str, entry: TensorEntry) -> dict[str, Any]:
    if name == _METADATA:
        raise _invalid("F9", "no tensor can have the name __metadata__", name)
    _check_size(name, entry)
    return {"dtype": entry.dtype.value, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}


def lay_out(arrays: Iterable[tuple[str, DType, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Return entries for arrays stored one after the other from offset 0, in the order given."""
    entries: dict[str, TensorEntry] = {}
    begin = 0
    for name, dtype, shape in arrays:
        end = begin + dtype.nbytes(shape)
        if name in entries:
            raise _invalid("F8", "two arrays of one file have the same name", name)
        entries[name] = TensorEntry(dtype, shape, begin, end)
        begin = end
    return entries


def _invalid(rule: str, what: str, tensor: str | None = None) -> HeaderError:
    place = f"tensor {quoted(tensor)}: " if tensor is not None else ""
    return HeaderError(f"{place}{what} (rule {rule})", rule=rule, tensor=tensor)


def _beyond(what: str, file: str, tensor: str | None = None) -> LimitExceededError:
    return LimitExceededError(f"{file}: limit exceeded: {what}", path=file, tensor=tensor)
