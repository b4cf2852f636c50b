"""The rules that hold for reading and writing alike: sizes, coverage, and the error that carries a rule's number."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from blobstore.errors import HeaderError, quoted
from blobstore.safetensors.header import TensorEntry

MAX_HEADER = 100_000_000
MAX_U64 = 2**64 - 1
PREFIX = struct.Struct("<Q")
METADATA = "__metadata__"


def check_metadata(value: Any) -> dict[str, str]:
    """Return the value of ``__metadata__``; raise HeaderError (F9) unless it maps strings to strings."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise invalid("F9", "__metadata__ does not map strings to strings")
    return value


def check_size(name: str, entry: TensorEntry) -> None:
    """Raise HeaderError (F14, F15) unless the entry's range has the size that its dtype and shape need."""
    elements = 1
    for dim in entry.shape:
        elements *= dim
        # After every factor, as the reference library: a later 0 hides no overflow, and a file has one verdict everywhere.
        if elements > MAX_U64:
            break
    bits = elements * entry.dtype.bits
    if bits > MAX_U64:
        raise invalid("F14", f"shape {list(entry.shape)} overflows 64 bits", name)
    if bits % 8:
        raise invalid("F15", f"{bits} bits of {entry.dtype} do not fill whole bytes", name)
    if bits // 8 != entry.nbytes:
        raise invalid("F14", f"{entry.nbytes} bytes for {entry.dtype} {list(entry.shape)}, which needs {bits // 8}", name)


def check_coverage(tensors: Mapping[str, TensorEntry], data_size: int | None) -> None:
    """Raise HeaderError (F16, F17) unless the tensors' ranges cover ``[0, data_size)`` without hole or overlap.

    None means unknown: the last tensor's end is then the end.
    """
    expected = 0
    for begin, end, place in sorted([(entry.begin, entry.end, place) for place, entry in enumerate(tensors.values())]):
        if begin != expected:
            kind = "overlaps" if begin < expected else "leaves a hole before"
            raise invalid("F16", f"the range [{begin}, {end}] {kind} byte {expected} of the data", list(tensors)[place])
        expected = end
    if data_size is not None and expected != data_size:
        raise invalid("F17", f"the data have {data_size} bytes, the header describes {expected}")


def invalid(rule: str, what: str, tensor: str | None = None) -> HeaderError:
    """Return the error of a header that breaks ``rule``."""
    place = f"tensor {quoted(tensor)}: " if tensor is not None else ""
    return HeaderError(f"{place}{what} (rule {rule})", rule=rule, tensor=tensor)
