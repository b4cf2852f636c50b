"""The scanner's side of reading a header: it gives what the parser gives, or nothing."""

from __future__ import annotations

import json

from blobstore import strictjson
from blobstore.safetensors import _native
from blobstore.safetensors.header import Header, ScannedEntries
from blobstore.safetensors.rules import MAX_U64, METADATA, PREFIX, check_metadata


def scan_header(text: bytes, data_size: int | None) -> Header | None:
    """Return the validated header of ``text`` as `parse.parse_header` does, or None where the scanner declines it.

    It declines every header that is not valid, and of the valid ones those whose metadata are null, those with unknown
    fields in an entry, with keys of an entry written in escapes, and beyond the limits of `Header.check_limits` on names,
    ranks and dimensions. The interpreter lock is released while it reads the text.
    """
    if data_size is not None and not 0 <= data_size <= MAX_U64:
        return None
    try:
        found = _native.scan(text, data_size, _unescaped)
        if found is None:
            return None
        places, columns, raw_metadata = found
        metadata = check_metadata(strictjson.parse(raw_metadata)) if raw_metadata else {}
    except ValueError:  # strictjson's, and that of bytes which are no UTF-8
        return None
    if METADATA in places:  # written in escapes
        return None
    return Header(ScannedEntries(places, columns), metadata, PREFIX.size + len(text))


def _unescaped(literal: bytes) -> str:
    name: str = json.loads(literal.decode())
    name.encode()  # half of a surrogate pair can't be, and is a ValueError too
    return name
