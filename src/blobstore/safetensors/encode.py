"""Headers written: canonical text for entries that are held to the same rules as those that are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from blobstore import strictjson
from blobstore.dtypes import DType
from blobstore.errors import LimitExceededError
from blobstore.safetensors import _native
from blobstore.safetensors.header import DTYPES, TensorEntry
from blobstore.safetensors.rules import MAX_HEADER, METADATA, PREFIX, check_coverage, check_metadata, check_size, invalid


def encode_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str], align: int) -> bytes:
    """Return the length prefix and the canonical header text: what a file has before its data.

    Compact JSON, top-level keys sorted by their UTF-8 bytes, fields in the order dtype, shape, data_offsets, metadata
    keys sorted and ``__metadata__`` only when non-empty, Go's escapes, then spaces so that the data start at a multiple
    of ``align`` bytes. Source: docs/formats.md section 1; the records in fixtures/ollama-records.

    Raises: HeaderError when the entries would not pass `parse_header`.
    """
    if METADATA in tensors:
        raise invalid("F9", "no tensor can have the name __metadata__", METADATA)
    map_of_strings = check_metadata(dict(sorted(metadata.items())))
    text = write_text(tensors, map_of_strings) or encode_text(tensors, map_of_strings)
    padding = -(PREFIX.size + len(text)) % align
    if len(text) + padding > MAX_HEADER:
        raise LimitExceededError(f"limit exceeded: a header of {len(text):,} bytes, at most {MAX_HEADER:,}")
    return b"".join((PREFIX.pack(len(text) + padding), text, b" " * padding))


def write_text(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes | None:
    """Return the header's text by the native writer, or None where it declines: its twin writes or refuses it then."""
    members: dict[str, TensorEntry | bytes] = {**tensors}
    try:
        if metadata:
            members[METADATA] = strictjson.encode(metadata)
    except UnicodeEncodeError:
        return None
    names = sorted(members)
    return _native.write(names, [members[name] for name in names], DTYPES)


def encode_text(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header's text, by the writer's twin in Python, which says what is wrong with entries.

    Names are sorted by code points, which is the order of their UTF-8 bytes.
    """
    members = dict(_encoded_entries(tensors))
    if metadata:
        members[METADATA] = strictjson.compact(metadata)
    check_coverage(tensors, None)
    text = ",".join([f"{strictjson.compact(name)}:{members[name]}" for name in sorted(members)])
    try:
        return strictjson.escape(f"{{{text}}}").encode()
    except UnicodeEncodeError:
        raise invalid("F4", "half of a surrogate pair is in a name or in the metadata, and can't be written") from None


def _encoded_entries(tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name and its entry in JSON."""
    for name, entry in tensors.items():
        check_size(name, entry)
        shape = strictjson.compact(entry.shape)
        yield name, f'{{"dtype":"{entry.dtype}","shape":{shape},"data_offsets":[{entry.begin},{entry.end}]}}'


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
