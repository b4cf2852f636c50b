"""A safetensors header as a value, the rules for reading and for writing, and both.

The scanner reads a header from a file's first bytes and returns what the parser returns, or
nothing. The parser, its twin in Python, reads again what the scanner declines, and says what is
wrong. Headers of many small files are scanned at once; Python's objects are made of those that are
read. Headers are written as canonical text, in Python only; the entries are checked by the rules
for reading.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blobstore.errors import HeaderError, LimitExceededError, quoted
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DTYPE_BY_NAME, DType
from blobstore.formats.safetensors import _native
from blobstore.formats.strictjson import StrictJsonError
from blobstore.io.budget import MAX_HEADER, MAX_TENSORS, Budget
from blobstore.io.ranges import UNKNOWN_SIZE, OpenReader, close_quietly

MAX_U64 = 2**64 - 1
PREFIX = struct.Struct("<Q")
METADATA = "__metadata__"
MAX_RANK = 64
MAX_NAME_BYTES = 65_536
_MAX_I64 = 2**63 - 1


def check_metadata(value: Any) -> dict[str, str]:
    """Return the value of ``__metadata__``; raise HeaderError (F9) if it does not map strings."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise invalid("F9", "__metadata__ does not map strings to strings")
    return value


def common_metadata(maps: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata on which files agree, and the keys on which they do not."""
    common: dict[str, str] = {}
    differing: dict[str, None] = {}
    for metadata in maps:
        for key, value in metadata.items():
            if common.setdefault(key, value) != value:
                differing[key] = None
    return {key: common[key] for key in common if key not in differing}, list(differing)


def check_size(name: str, entry: TensorEntry) -> None:
    """Raise HeaderError (F14, F15) unless the entry's range has the size of its dtype and shape."""
    elements = 1
    for dim in entry.shape:
        elements *= dim
        # After every factor, as in the reference library: a later 0 must not hide an overflow, and
        # every reader must give a file the same verdict.
        if elements > MAX_U64:
            break
    bits = elements * entry.dtype.bits
    if bits > MAX_U64:
        raise invalid("F14", f"shape {list(entry.shape)} overflows 64 bits", name)
    if bits % 8:
        raise invalid("F15", f"{bits} bits of {entry.dtype} do not fill whole bytes", name)
    if bits // 8 != entry.nbytes:
        raise invalid(
            "F14",
            f"{entry.nbytes} bytes for {entry.dtype} {list(entry.shape)}, which needs {bits // 8}",
            name,
        )


def check_coverage(tensors: Mapping[str, TensorEntry], data_size: int | None) -> None:
    """Raise HeaderError (F16, F17) unless the ranges cover ``[0, data_size)``, each byte once.

    None means unknown: the data then end where the last tensor does.
    """
    expected = 0
    for begin, end, place in sorted(
        [(entry.begin, entry.end, place) for place, entry in enumerate(tensors.values())]
    ):
        if begin != expected:
            kind = "overlaps" if begin < expected else "leaves a hole before"
            raise invalid(
                "F16",
                f"the range [{begin}, {end}] {kind} byte {expected} of the data",
                list(tensors)[place],
            )
        expected = end
    if data_size is not None and expected != data_size:
        raise invalid("F17", f"the data have {data_size} bytes, the header describes {expected}")


def invalid(rule: str, what: str, tensor: str | None = None) -> HeaderError:
    """Return the error for a header that breaks ``rule``."""
    place = f"tensor {quoted(tensor)}: " if tensor is not None else ""
    return HeaderError(f"{place}{what} (rule {rule})", rule=rule, tensor=tensor)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header.

    ``begin`` and ``end`` are byte offsets in the data region, half-open.
    """

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header.

    ``tensors`` keeps the order of the JSON text; ``data_start`` is an offset in the file.
    ``within_limits``: the reader has checked ranks, dimensions and names against `check_limits`.
    """

    tensors: Mapping[str, TensorEntry] = field(repr=False)
    metadata: Mapping[str, str]
    data_start: int
    within_limits: bool = field(default=False, compare=False, repr=False)

    def check_limits(self, file: str) -> None:
        """Raise LimitExceededError, naming ``file``, if the tensors can't become arrays and blobs.

        A header beyond these limits is valid and can be listed: over 1,000,000 tensors, a rank over
        64 (numpy's own limit) or dimensions that overflow 63 bits, a name over 64 KiB.
        """
        beyond = f"{file}: limit exceeded: "
        if len(self.tensors) > MAX_TENSORS:
            counts = f"{len(self.tensors):,} tensors, at most {MAX_TENSORS:,}"
            raise LimitExceededError(beyond + counts, path=file)
        for name, entry in () if self.within_limits else self.tensors.items():
            if what := _beyond_limits(name, entry):
                raise LimitExceededError(beyond + what, path=file, tensor=name)


def _beyond_limits(name: str, entry: TensorEntry) -> str | None:
    if len(entry.shape) > MAX_RANK:
        return f"{quoted(name)} has rank {len(entry.shape)}, at most {MAX_RANK}"
    if math.prod(max(dim, 1) for dim in entry.shape) * entry.dtype.bits > 8 * _MAX_I64:
        return f"the dimensions of {quoted(name)} overflow 63 bits"
    if len(name) * 4 > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES:
        return f"the tensor name {quoted(name)} is over {MAX_NAME_BYTES:,} bytes"
    return None


def encode_header(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], align: int
) -> bytes:
    """Return the length prefix and the canonical header text: what a file has before its data.

    Compact JSON with Go's escapes; top-level keys sorted by their UTF-8 bytes; fields in the order
    dtype, shape, data_offsets; metadata keys sorted, and ``__metadata__`` only when not empty; then
    spaces, so that the data start at a multiple of ``align`` bytes. Source: docs/formats.md section
    1; the records in fixtures/ollama-records.

    Raises: HeaderError when the entries would not pass `parse_header`; LimitExceededError.
    """
    if METADATA in tensors:
        raise invalid("F9", f"a tensor can't have the name {METADATA}", METADATA)
    members = {}
    for name, entry in tensors.items():
        check_size(name, entry)
        shape = ",".join(map(str, entry.shape))
        offsets = f"{entry.begin},{entry.end}"
        members[name] = f'{{"dtype":"{entry.dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}'
    if map_of_strings := check_metadata(dict(sorted(metadata.items()))):
        members[METADATA] = strictjson.text_of(map_of_strings)
    check_coverage(tensors, None)
    # The order of code points is the order of UTF-8 bytes.
    named = [f"{strictjson.text_of(name)}:{members[name]}" for name in sorted(members)]
    try:
        text = f"{{{','.join(named)}}}".encode()
    except UnicodeEncodeError:
        raise invalid(
            "F4", "a name or the metadata contain half of a surrogate pair, which can't be written"
        ) from None
    length = len(text) + -(PREFIX.size + len(text)) % align
    strictjson.check_limit("the header", length, "bytes", MAX_HEADER)
    return PREFIX.pack(length) + text.ljust(length)


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


def json_of(header: Header) -> dict[str, Any]:
    """Return a header's JSON object: metadata, if it has any, then tensors in their order."""
    members: dict[str, Any] = {METADATA: dict(header.metadata)} if header.metadata else {}
    for name, entry in header.tensors.items():
        members[name] = {
            "dtype": entry.dtype.value,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    return members


def scan_header(text: bytes, data_size: int | None) -> Header | None:
    """Return the header of ``text`` as `parse_strictly` does, or None if the scanner declines it.

    The scanner declines every invalid header, and these valid ones: metadata that are null, unknown
    fields in an entry, an entry's keys written in escapes, and names, ranks and dimensions beyond
    the limits of `Header.check_limits`. It releases the interpreter lock while it reads the text.
    """
    if data_size is not None and not 0 <= data_size <= MAX_U64:
        return None
    scanned = _native.scan(text, data_size, _unescape)
    return None if scanned is None else _header_from(scanned, len(text))


_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_RULE_OF_REASON = {"utf8": "F4", "syntax": "F7", "duplicate": "F8"}


def parse_strictly(text: bytes, data_size: int | None) -> Header:
    """Return the header of ``text`` by the parser, the scanner's twin; else as `parse_header`."""
    document = _parse_json(text)
    value = document.pop(METADATA, None)
    metadata = {} if value is None else check_metadata(value)
    tensors = {name: _entry(name, value) for name, value in document.items()}
    check_coverage(tensors, data_size)
    return Header(tensors, metadata, PREFIX.size + len(text))


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{") and text.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"{"):
        raise invalid("F5", f"the header begins with {text[:1]!r}, not with '{{'")
    body = text.rstrip(b" ")
    if body and not body.endswith(b"}") and body.rstrip(b" \t\r\n\v\f\0").endswith(b"}"):
        raise invalid("F6", "the header is padded with bytes other than spaces")
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
        try:
            strictjson.check_depth(value, strictjson.MAX_DEPTH - 1)
            strictjson.check_numbers(value)
        except StrictJsonError as error:
            raise LimitExceededError(
                f"limit exceeded: a field is {error}", rule="F10", tensor=name
            ) from None
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
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise invalid("F13", "data_offsets is not [begin, end]", name)
    begin, end = offsets
    if not 0 <= begin <= end <= MAX_U64:
        raise invalid("F13", f"data_offsets [{begin}, {end}] are not 0 <= begin <= end", name)
    entry = TensorEntry(dtype, tuple(shape), begin, end)
    check_size(name, entry)
    return entry


def header_of(
    reader: OpenReader, budget: Budget | None = None, *, first_nbytes: int = PREFIX.size
) -> Header:
    """Return the header of a safetensors file, validated (rules F1 to F19).

    ``budget`` is that of the
    checkpoint or the stored model that the file belongs to; without one the header may be as large
    as the format allows. ``first_nbytes`` of the file are read first, and a header that ends after
    them by a second read.

    Raises: HeaderError with ``rule`` and, if one is wrong, ``tensor``; ShortReadError when the file
    shrinks meanwhile; LimitExceededError when the header exceeds the rest of ``budget``.
    """
    try:
        text = _header_text(reader, budget, first_nbytes)
        nbytes = None if reader.size == UNKNOWN_SIZE else reader.size - PREFIX.size - len(text)
        header = parse_header(text, nbytes)
        if budget is not None:
            budget.take_tensors(len(header.tensors), "the header")
    except (HeaderError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None
    return header


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Return the validated header of ``text``, the bytes after the length.

    ``data_size`` is the size of the data region; None means unknown: the data then end where the
    last tensor does.

    Raises: HeaderError for rules F4 to F19; LimitExceededError for JSON nested deeper than 64
    levels.
    """
    return scan_header(text, data_size) or parse_strictly(text, data_size)


def _header_text(reader: OpenReader, budget: Budget | None, first_nbytes: int) -> bytes:
    size = reader.size
    if size < PREFIX.size:
        raise invalid("F1", f"not a safetensors file: it has {size} bytes, a header needs 8")
    # A file of unknown size may end in these bytes; its reader has them already.
    head = reader.read(0, PREFIX.size if size == UNKNOWN_SIZE else min(size, first_nbytes))
    (length,) = PREFIX.unpack_from(head)
    if length > MAX_HEADER:
        is_pointer = head.startswith(b"version ")
        what = "a git-lfs pointer, not the file itself" if is_pointer else "not a safetensors file"
        raise invalid(
            "F2", f"{what}: its header would have {length:,} bytes, at most {MAX_HEADER:,}"
        )
    end = PREFIX.size + length
    if end > size:
        raise invalid("F3", f"the file ends inside its header of {length:,} bytes")
    if budget is not None:
        budget.take_text(length, "the header")
    text = head[PREFIX.size : end] if end <= len(head) else reader.read(PREFIX.size, length)
    if budget is not None:
        budget.give_back_text(length - text.rfind(b"}") - 1)  # some programs pad blobs to pages
    return text


class ScannedFiles(Sequence[Header | None]):
    """The headers of files, each made when it is asked for; None for one that was declined.

    A model of 50,000 blobs has as many headers of a few forms: its outline needs the names of its
    tensors, and each form once.

    ``outline`` returns the logical tensors of all headers, in columns, in stored order: names,
    forms, keys, examples and counts. Tensors are grouped as `stored_tensors` does it; the rules for
    types are not applied. Forms: of each tensor the place of its form in the keys. Tensors have one
    form, and equal keys, if their entries have the same dtypes and shapes by suffix, and what the
    metadata say of them is the same. Examples: of each form a header, and a tensor in it. Counts:
    the tensors of each header; -1 where the header has to be read alone.
    """

    def __init__(self, scanned: _native.FileHeaders) -> None:
        self._found = scanned
        self.outline = scanned.outline

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Header | None:  # type: ignore[override]  # no slices
        scanned = self._found.header(index, _unescape)
        return None if scanned is None else _header_from(*scanned)


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
        scanned = _native.scan_files(opened, files)
    finally:
        close_quietly(opened)
    return ScannedFiles(scanned) if budget.took_headers(*scanned.totals()) else [None] * len(files)


def _header_from(scanned: _native.Scanned, nbytes: int) -> Header | None:
    """Return the header of a scanned text of ``nbytes``; None if the parser has to read it."""
    places, columns, metadata = scanned
    if METADATA in places:  # written in escapes
        return None
    entries = {
        name: TensorEntry(DTYPE_BY_NAME[dtype], shape, begin, end)
        for name, (dtype, shape, begin, end) in zip(
            places, map(columns.fields, places.values()), strict=True
        )
    }
    return Header(entries, metadata, PREFIX.size + nbytes, within_limits=True)


def _unescape(literal: bytes) -> str:
    name: str = json.loads(literal.decode())
    name.encode()
    return name
