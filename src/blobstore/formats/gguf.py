"""GGUF headers: metadata, and where each tensor lies. Pure over a reader; nothing is written.

The rules, each with the number that its error carries (ggml-org/ggml docs/gguf.md; where
ggml-org/llama.cpp ggml/src/gguf.cpp `gguf_init_from_file_impl` is stricter, that one wins):

G1  the file begins with ``GGUF`` and version 2 or 3, little-endian
G2  counts and lengths end in the file, and the header in its first 100,000,000 bytes
G3  keys and names of tensors are UTF-8, and no two are equal; texts are UTF-8
G4  a value has a known type; an item of an array is not an array; a bool is 0 or 1
G5  ``general.alignment``, 32 if it is missing, is a U32 and a power of two
G6  a tensor has at most 4 dimensions, whose product fits 63 bits, and a known type
G7  its first dimension, which is the last of `GgufTensor.shape`, is whole blocks of that type
G8  the tensors' data lie in their order, each at the first multiple of the alignment after the one
    before, and end in the file

The head is read in pieces, as far as it reaches. No count is believed before the file is known to
have that many bytes. All arrays together have 2,000,000 items at most: a tokenizer of 250,000
tokens has a million.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from blobstore.errors import HeaderError, LimitExceededError, quoted
from blobstore.formats.dtypes import DTYPE_BY_NAME, DType, parameters_of
from blobstore.formats.safetensors.header import Header, TensorEntry, invalid
from blobstore.formats.strictjson import check_limit
from blobstore.io.budget import MAX_HEADER, Budget
from blobstore.io.ranges import OpenReader

MAGIC = b"GGUF"
MAX_ITEMS = 2_000_000

_FIRST_READ = 64 * 2**10

_MAX_DIMS = 4
_LONG = 1000
_MAX_I64 = 2**63 - 1
# Value type → its struct code.
_NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()} | {_STRING: 8}


class GgufType(NamedTuple):
    """The type of a tensor: its number in a file, the values of a block and their bytes."""

    name: str
    number: int
    block: int
    block_nbytes: int


GGUF_TYPES = (
    GgufType("F32", 0, 1, 4),
    GgufType("F16", 1, 1, 2),
    GgufType("Q4_0", 2, 32, 18),
    GgufType("Q4_1", 3, 32, 20),
    GgufType("Q5_0", 6, 32, 22),
    GgufType("Q5_1", 7, 32, 24),
    GgufType("Q8_0", 8, 32, 34),
    GgufType("Q8_1", 9, 32, 40),
    GgufType("Q2_K", 10, 256, 84),
    GgufType("Q3_K", 11, 256, 110),
    GgufType("Q4_K", 12, 256, 144),
    GgufType("Q5_K", 13, 256, 176),
    GgufType("Q6_K", 14, 256, 210),
    GgufType("Q8_K", 15, 256, 292),
    GgufType("IQ2_XXS", 16, 256, 66),
    GgufType("IQ2_XS", 17, 256, 74),
    GgufType("IQ3_XXS", 18, 256, 98),
    GgufType("IQ1_S", 19, 256, 50),
    GgufType("IQ4_NL", 20, 32, 18),
    GgufType("IQ3_S", 21, 256, 110),
    GgufType("IQ2_S", 22, 256, 82),
    GgufType("IQ4_XS", 23, 256, 136),
    GgufType("I8", 24, 1, 1),
    GgufType("I16", 25, 1, 2),
    GgufType("I32", 26, 1, 4),
    GgufType("I64", 27, 1, 8),
    GgufType("F64", 28, 1, 8),
    GgufType("IQ1_M", 29, 256, 56),
    GgufType("BF16", 30, 1, 2),
    GgufType("TQ1_0", 34, 256, 54),
    GgufType("TQ2_0", 35, 256, 66),
    GgufType("MXFP4", 39, 32, 17),
    GgufType("NVFP4", 40, 64, 36),
    GgufType("Q1_0", 41, 128, 18),
)
"""Source: ggml-org/llama.cpp gguf-py/gguf/constants.py `GGML_QUANT_SIZES` (gguf 0.19.0)."""
_TYPES = {kind.number: kind for kind in GGUF_TYPES}


@dataclass(frozen=True, slots=True)
class GgufTensor(TensorEntry):
    """One tensor: ``dims`` of its values has the outermost dimension first, as in numpy.

    As an entry, blocks are U8, and rows of them the last dimension of ``shape``.
    """

    type: GgufType
    dims: tuple[int, ...]

    @property
    def type_name(self) -> str:
        return self.type.name

    @property
    def parameters(self) -> int:
        return parameters_of(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader(Header):
    """A validated header; ``tensors`` are in the file's order.

    ``values`` maps keys to an int, a float, a bool, a str, or a list of one of these; ``metadata``
    are those that are not lists, as texts, and no longer than 1,000 characters.
    """

    tensors: Mapping[str, GgufTensor]
    values: Mapping[str, object]


def gguf_header(
    reader: OpenReader, budget: Budget | None = None, *, arrays: bool = True
) -> GgufHeader:
    """Return the header of a GGUF file, validated (rules G1 to G8).

    ``budget`` is that of the checkpoint that the file belongs to. ``arrays``: False leaves arrays
    of texts empty, which takes a quarter of the time: a tokenizer has up to a million.

    Raises: HeaderError with ``rule`` and, if one is wrong, ``tensor``; ShortReadError when the file
    shrinks meanwhile; LimitExceededError.
    """
    try:
        return _Head(reader, budget or Budget(reader.name), arrays=arrays).header()
    except (HeaderError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None


class _Head:
    """The first bytes of a file, read as they are needed, and a place in them."""

    def __init__(self, reader: OpenReader, budget: Budget, *, arrays: bool) -> None:
        self._reader, self._budget, self._arrays = reader, budget, arrays
        self._most = min(reader.size, MAX_HEADER)
        self._data = bytearray()
        self._at = self._items = 0

    def header(self) -> GgufHeader:
        if self._most < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise invalid("G1", "not a GGUF file")
        if (version := self._number("I")) not in (2, 3):
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version} of GGUF"
            raise invalid("G1", f"{what} is not read, only version 2 or 3, little-endian")
        count, keys = self._count(24), self._count(12)
        self._budget.take_tensors(count, "the header")
        values: dict[str, object] = {}
        for _ in range(keys):
            key = self._text()
            if key in values:
                raise invalid("G3", f"two values of the key {quoted(key)}")
            values[key] = self._value(key)
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise invalid("G5", f"general.alignment is {quoted(alignment)}")
        tensors = self._tensors(count, alignment)
        start = self._at + -self._at % alignment
        for name, tensor in tensors.items():
            if start + tensor.end > self._reader.size:
                raise invalid("G8", f"the file ends before its {tensor.nbytes} bytes do", name)
        metadata = {
            key: str(value)
            for key, value in values.items()
            if not isinstance(value, list) and len(str(value)) <= _LONG
        }
        return GgufHeader(tensors=tensors, metadata=metadata, data_start=start, values=values)

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for _ in range(count):
            name = self._text()
            if name in tensors:
                raise invalid("G3", "two tensors of this name", name)
            kind, dims = self._described(name)
            begin = end + -end % alignment
            end = begin + math.prod(dims) // kind.block * kind.block_nbytes
            if (offset := self._number("Q")) != begin:
                where = f"{offset} of the data, and not at {begin}"
                raise invalid("G8", f"its {end - begin} bytes lie at {where}", name)
            dtype, shape = DTYPE_BY_NAME.get(kind.name, DType.U8), dims
            if dtype is DType.U8:
                shape = (*dims[:-1], dims[-1] // kind.block * kind.block_nbytes)
            tensors[name] = GgufTensor(dtype, shape, begin, end, kind, dims)
        return tensors

    def _described(self, name: str) -> tuple[GgufType, tuple[int, ...]]:
        if (rank := self._number("I")) > _MAX_DIMS:
            raise invalid("G6", f"{rank} dimensions, at most {_MAX_DIMS}", name)
        dims = tuple(self._number("Q") for _ in range(rank))[::-1]
        if (kind := _TYPES.get(number := self._number("I"))) is None:
            raise invalid("G6", f"the unknown type {number}", name)
        if math.prod(max(dim, 1) for dim in dims) * kind.block_nbytes > _MAX_I64:
            raise invalid("G6", f"the dimensions {list(dims)} overflow 63 bits", name)
        if (dims[-1] if dims else 1) % kind.block:
            blocks = f"blocks of {kind.block} values ({kind.name})"
            raise invalid("G7", f"{list(dims)} is not a whole number of {blocks}", name)
        return kind, dims

    def _value(self, key: str) -> object:
        kind, count = self._number("I"), 1
        if is_array := kind == _ARRAY:
            kind = self._number("I")
            count = self._count(_LEAST_BYTES.get(kind, 1))
        self._items += count
        check_limit(f"the header with {quoted(key)}", self._items, "items", MAX_ITEMS, "G4")
        if kind == _STRING and is_array and not self._arrays:
            return self._skip_texts(count)
        if kind == _STRING:
            items: list[object] = [self._text() for _ in range(count)]
        elif (code := _NUMBERS.get(kind)) is None:
            raise invalid("G4", f"{quoted(key)} has items of the type {kind}")
        else:
            raw = self._take(count * _LEAST_BYTES[kind])
            if code == "?" and raw.translate(None, b"\0\1"):
                raise invalid("G4", f"{quoted(key)} has a bool that is not 0 or 1")
            items = list(struct.unpack(f"<{count}{code}", raw))
        return items if is_array else items[0]

    def _count(self, least: int) -> int:
        """Return the number of things that take ``least`` bytes each at least."""
        count = self._number("Q")
        if count * least > self._most - self._at:
            raise invalid("G2", f"{count} at byte {self._at - 8} is more than the header can hold")
        return count

    def _number(self, code: str) -> int:
        return int.from_bytes(self._take(struct.calcsize(code)), "little")

    def _text(self) -> str:
        raw = self._take(self._number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise invalid("G3", f"the text {quoted(bytes(raw))} is not UTF-8") from None

    def _skip_texts(self, count: int) -> list[object]:
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self._at + 8 > len(self._data):
                self._take(8)
                self._at -= 8
            self._at += 8 + length(self._data, self._at)[0]
        self._take(0)  # the last text ends in the header
        return []

    def _take(self, nbytes: int) -> bytearray:
        """Return the next bytes; of the file, read so far, and as much again as there is."""
        begin, self._at = self._at, self._at + nbytes
        if self._at > self._most:
            raise invalid(
                "G2", f"a value ends at byte {self._at}, and the header could have {self._most}"
            )
        if self._at > (had := len(self._data)):
            more = min(max(self._at, 2 * had, _FIRST_READ), self._most) - had
            self._budget.take_text(more, "the header")
            self._data += self._reader.read(had, more)
        return self._data[begin : self._at]
