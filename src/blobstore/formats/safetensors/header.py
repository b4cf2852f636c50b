"""A safetensors header as a value, and the rules that hold for reading and for writing.

The values: tensors by name, metadata, and the offset where the data start. The rules: sizes,
coverage, and the error that carries a rule's number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from blobstore.errors import HeaderError, LimitExceededError, quoted
from blobstore.formats.dtypes import DTYPE_BY_NAME, DType
from blobstore.formats.safetensors import _native
from blobstore.io.budget import MAX_TENSORS

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


class ScannedEntries(Mapping[str, TensorEntry]):
    """The tensors of a scanned header, by name in the order of the text.

    An entry is made when it is first read, and kept: a million tensors that are only listed take
    130 MB less.
    """

    __slots__ = ("_columns", "_entries")

    def __init__(self, places: dict[str, int], columns: _native.Tensors) -> None:
        self._entries = cast("dict[str, int | TensorEntry]", places)  # taken over, not copied
        self._columns = columns

    def __getitem__(self, name: str) -> TensorEntry:
        entry = self._entries[name]
        if isinstance(entry, int):
            dtype, shape, begin, end = self._columns.fields(entry)
            entry = self._entries[name] = TensorEntry(DTYPE_BY_NAME[dtype], shape, begin, end)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header.

    ``tensors`` keeps the order of the JSON text; ``data_start`` is an offset in the file.
    ``within_limits``: the reader has checked ranks, dimensions and names against `check_limits`.
    """

    tensors: Mapping[str, TensorEntry]
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
