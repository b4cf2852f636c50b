"""The parser of headers: the scanner's twin in Python, and the one that says what is wrong with a header."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blobstore import strictjson
from blobstore.dtypes import DTYPE_BY_NAME
from blobstore.errors import LimitExceededError, quoted
from blobstore.safetensors.header import Header, TensorEntry
from blobstore.safetensors.rules import MAX_U64, METADATA, PREFIX, check_coverage, check_metadata, check_size, invalid
from blobstore.strictjson import Reason, StrictJsonError

_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_RULE_OF_REASON = {Reason.UTF8: "F4", Reason.SYNTAX: "F7", Reason.DUPLICATE: "F8"}


def parse_header(text: bytes, data_size: int | None) -> Header:
    """Return the validated header of ``text`` (the bytes after the length) for a data region of ``data_size`` bytes.

    None means unknown: the last tensor's end is then the end.

    Raises: HeaderError for rules F4 to F19; LimitExceededError for JSON nested deeper than 64 levels.
    """
    with _collector_paused():
        document = _parse_json(text)
        value = document.pop(METADATA, None)
        metadata = {} if value is None else check_metadata(value)
        tensors = {name: _entry(name, value) for name, value in document.items()}
        check_coverage(tensors, data_size)
    return Header(tensors, metadata, PREFIX.size + len(text))


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
        raise invalid("F5", f"the header begins with {text[:1]!r} and not with '{{'")
    body = text.rstrip(b" ")
    if body and not body.endswith(b"}") and body.rstrip(b" \t\r\n\v\f\0").endswith(b"}"):
        raise invalid("F6", "the header is padded with something else than spaces")
    try:
        document = strictjson.parse(body)
    except StrictJsonError as error:
        if error.reason == Reason.DEPTH:
            raise LimitExceededError(f"limit exceeded: the header is {error}", rule="F10") from None
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
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim <= MAX_U64 for dim in shape):
        raise invalid("F12", "shape is not a list of non-negative integers", name)
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):  # noqa: PLR2004
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
        raise LimitExceededError(f"limit exceeded: a field is {error}", rule="F10", tensor=name) from None
