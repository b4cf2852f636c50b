"""Codes of other programs: where a weight's codes, scales and zero points lie, and their values.

*Integer codes*: a value is ``scale * (code - zero)``, with codes and zero points from 0 to
``2^bits - 1``, or MLX's ``scale * code + bias``. Codes of up to four bits become int4's and others
int8's, unchanged, in groups that share a scale: a bias is ``-scale * zero``, rounded once. Where no
groups of ours fit, values are computed in float32. Sources:

- compressed-tensors: vllm-project/compressed-tensors@ac8e2ba8 compressors/pack_quantized/helpers.py
  `pack_to_int32` (the first code in the lowest bits of dense words; codes and zero points are
  offset by ``2^(bits - 1)``; zero points are packed along rows), naive_quantized/base.py (a byte of
  two's complement for each code), quantization/lifecycle/forward_helpers.py `_dequantize`. Version
  0.12.2 compressors/quantized_compressors/pack_quantized.py packs ``32 // bits`` codes into a word.
- GPTQ: ModelCloud/GPTQModel@f4c327a1 nn_modules/qlinear/__init__.py `PackableQuantLinear`,
  utils/model.py `convert_gptq_v1_to_v2_format_module` (version 1 stores zero points less one: a
  whole word's addition gives them back, and of 3 bits each one's).
- MLX: mlx 0.32.4 backend/cpu/quantized.cpp `extract_bits` (dense words too).
- AWQ: casper-hansen/AutoAWQ@88e4c76b awq/modules/linear/gemm.py, utils/packing_utils.py
  `dequantize_gemm`.

*Blocks of bitsandbytes*: 4-bit codes whose blocks share a scale, and 8-bit ones of LLM.int8. A
value is ``table[code] * scale``, computed in float32 and rounded once. A block is consecutive
values of the whole weight, wherever its rows end. A *nested* scale is
``outer_map[byte] * outer_scale + offset``, each operation rounded. In LLM.int8 a block is a row,
and a value is ``code * scale * (1 / 127)``, rounded after each step.

Sources, bitsandbytes 0.50.2 (bitsandbytes-foundation/bitsandbytes@95f9af30): csrc/cpu_ops.cpp
`dequantizeBlockwise4bitCpu` (its tables; the first code in the high bits), functional.py
`QuantState.from_dict`, `dequantize_4bit`, `dequantize_blockwise`, _ops.py
`int8_vectorwise_dequant`, nn/modules.py `maybe_rearrange_weight`. The stored ``quant_map`` is not
used there, so one that is not the type's own is refused.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from blobstore import kernels
from blobstore.formats import strictjson
from blobstore.formats.dtypes import AFFINE_GROUP_SIZES, DType, Quantization, QuantType, Words
from blobstore.formats.strictjson import Between, Document, InvalidError
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.coding import Coding, CodingError, ReadRegion, Region
from blobstore.source.producers import TensorLike

_WORD, _WORD_BYTES = 32, 4
_NIBBLE, _BYTE = 4, 8
_SQUARE = _WORD // _NIBBLE
_SIGNIFICANT_BITS = {DType.BF16: 8, DType.F16: 11, DType.F32: 24}


def _widened(packing: Words, words: Array, wide: int, count: int) -> Array:
    """Return codes of each row of U32 ``[rows, words]`` with 4 or 8 bits, in U32 words."""
    size = -(-count * wide // _WORD)
    if packing == Words(wide) and words.shape[1] == size:
        return words
    words = np.ascontiguousarray(words)
    return kernels.active().widen(words, packing.bits, packing.used, wide, size)


def _unpacked(packing: Words, words: Array, count: int) -> Array:
    return np.ascontiguousarray(_widened(packing, words, _BYTE, count)).view(np.uint8)


class Rows(NamedTuple):
    """Rows of a matrix: their codes, in U32 ``words`` of each; scales and biases of their groups.

    These are ``[rows, groups]`` of any float type; the biases may be zero points instead.
    ``groups``: that of each column.
    """

    words: Array
    packing: Words
    scales: Array
    biases: Array
    groups: Array


@dataclass(frozen=True, slots=True)
class IntegerCodes(Coding):
    """How the codes of matrices ``[rows, cols]`` lie in a source's tensors.

    ``words``: how they are packed; None if a code is one byte of two's complement. ``group``:
    consecutive columns that share a scale, of dtype ``scale``. ``permuted``: a tensor says which
    group each column is in instead. ``by_row``: each row has its own scales; else a matrix has one.
    ``zeros``: "" without zero points, as codes are symmetric; "bytes" if these lie as scales do;
    "words" if they are packed along rows; "biases" if a bias lies with each scale.

    ``transposed``: columns come first in all tensors, of one matrix. ``along_rows``: codes are
    packed along rows, in AWQ's order. ``zero_is_less_one``: as version 1 of GPTQ stores them.
    """

    bits: int
    rows: int
    cols: int
    group: int
    scale: DType
    words: Words | None
    zeros: str = ""
    by_row: bool = True
    permuted: bool = False
    transposed: bool = False
    along_rows: bool = False
    zero_is_less_one: bool = False

    stated = (".shape", ".order")

    @property
    def by_columns(self) -> bool:
        return self.transposed

    @property
    def quantization(self) -> Quantization | None:
        kind = QuantType.INT4 if self.bits <= _NIBBLE else QuantType.INT8
        for size in reversed(AFFINE_GROUP_SIZES):
            if self.group % size == self.cols % size == 0 and not self.permuted:
                return Quantization(kind, size)
        return None

    @property
    def rounding(self) -> float:
        """That of ``-scale * zero``, unless all zero points are powers of two."""
        largest = 2**self.bits - 1 if self.zeros in ("bytes", "words") else 0
        return largest * 2.0 ** -(1 + _SIGNIFICANT_BITS[self.scale])

    @property
    def _groups(self) -> int:
        return -(-self.cols // self.group)

    @property
    def _packed(self) -> Words:
        return self.words or Words(self.bits)

    def shapes(self, lead: tuple[int, ...]) -> Iterator[tuple[str, DType, tuple[int, ...]]]:
        """Yield the suffix, dtype and shape of each tensor of ``lead`` matrices."""

        def of(rows: int, cols: int) -> tuple[int, ...]:
            return (cols, rows) if self.transposed else (*lead, rows, cols)

        count, scales = self._packed.count, of(self.rows, self._groups) if self.by_row else lead
        if self.words is None:
            yield "", DType.I8, of(self.rows, self.cols)
        elif self.along_rows:
            yield "", DType.I32, of(count(self.rows), self.cols)
        else:
            yield "", DType.I32, of(self.rows, count(self.cols))
        yield ".scale", self.scale, scales
        if self.zeros == "biases":
            yield ".bias", self.scale, scales
        elif self.zeros == "bytes":
            yield ".zero", DType.I8, scales
        elif self.zeros:
            yield ".zero", DType.I32, of(count(self.rows), self._groups)
        yield ".order", DType.I32, (self.cols,)

    def states(self, suffix: str, said: Array, shape: tuple[int, ...]) -> bool:
        if suffix == ".shape":
            return bool(said.tolist() == list(shape))
        if self.permuted and self.transposed:
            return bool(((said >= 0) & (said < self._groups)).all())
        # compressed-tensors sorts columns, and then counts: its groups have one size.
        ordered = np.sort(said) if self.permuted else said
        return np.array_equal(ordered, np.arange(self.cols) // self.group)

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        for region in self._regions(*self._range(start, count)):
            yield region.suffix, *region.needs

    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        first, rows = self._read(read, start, count)
        quantization = self.quantization
        if quantization is not None:
            return kernels.dequantize(
                self._array(rows, quantization, start - first, count, DType.F32), dtype
            )
        values = np.empty(len(rows.words) * self.cols, numpy_dtype(dtype))
        kernels.active().dequantize_columns(
            _unpacked(rows.packing, rows.words, self.cols),
            rows.groups,
            np.ascontiguousarray(rows.scales, np.float32),
            np.ascontiguousarray(rows.biases, np.float32),
            values,
            by_zero=self.zeros != "biases",
        )
        return values[start - first :][:count]

    def quantized(self, read: ReadRegion, start: int, count: int) -> QuantizedArray[Array]:
        quantization = self.quantization
        if quantization is None:
            raise AssertionError("no groups of ours fit")
        first, rows = self._read(read, start, count)
        return self._array(rows, quantization, start - first, count, self.scale)

    def _array(
        self, rows: Rows, quantization: Quantization, start: int, count: int, scale: DType
    ) -> QuantizedArray[Array]:
        """Return some of the rows' values; scales and biases have the dtype ``scale``."""
        bits, size = quantization.quant_type.bits, quantization.group_size
        words = _widened(rows.packing, rows.words, bits, self.cols).reshape(-1)
        words = words[start * bits // _WORD :][: count * bits // _WORD]
        kind, groups, biases = numpy_dtype(scale), rows.groups[::size], rows.biases
        with np.errstate(over="ignore", invalid="ignore"):
            if self.zeros != "biases":
                biases = -rows.scales.astype(np.float32) * biases
            scales, biases = (
                part.astype(kind, copy=False)
                .take(groups, axis=1)
                .reshape(-1)[start // size :][: count // size]
                for part in (rows.scales, biases)
            )
        if not all(math.isfinite(kernels.largest_magnitude(part)) for part in (scales, biases)):
            raise CodingError(f"a scale or a bias is not finite in {scale}")
        return QuantizedArray(np.ascontiguousarray(words), scales, biases, None, quantization)

    def _range(self, start: int, count: int) -> tuple[int, int]:
        return start // self.cols, (start + count - 1) // self.cols + 1

    def _read(self, read: ReadRegion, start: int, count: int) -> tuple[int, Rows]:
        """Return the flat index of the first value of the rows that values are in, and these."""
        first, stop = self._range(start, count)
        parts = {region.suffix: read(region) for region in self._regions(first, stop)}
        scales = self._of_groups(parts[".scale"], numpy_dtype(self.scale), first, stop)
        order = np.arange(self.cols, dtype=np.int32) // np.int32(min(self.group, self.cols))
        if self.permuted:
            order = parts[".order"].view(np.int32).reshape(-1)
        words, packing = self._words(parts[""], first, stop)
        biases = np.broadcast_to(self._biases(parts, first, stop), scales.shape)
        return first * self.cols, Rows(words, packing, scales, biases, order)

    def _regions(self, first: int, stop: int) -> Iterator[Region]:
        """Yield what rows of the matrices, one after the other, are made from."""
        if self.along_rows:
            yield self._packed_rows("", self.cols, first, stop)
        elif self.words is None:
            yield self._lines("", self.cols, 1, first, stop)
        else:
            yield self._lines("", self.words.count(self.cols), _WORD_BYTES, first, stop)
        if self.zeros == "words":
            yield self._packed_rows(".zero", self._groups, first, stop)
        if not self.by_row:
            first, stop = self._matrices(first, stop)
        size = self.scale.bits // 8
        yield self._lines(".scale", self._groups, size, first, stop)
        if self.zeros == "biases":
            yield self._lines(".bias", self._groups, size, first, stop)
        elif self.zeros == "bytes":
            yield self._lines(".zero", self._groups, 1, first, stop)
        if self.permuted:
            yield Region.span(".order", 0, _WORD_BYTES * self.cols)

    def _lines(self, suffix: str, items: int, size: int, first: int, stop: int) -> Region:
        if self.transposed:
            return Region(suffix, self.rows * size, 0, items, first * size, stop * size)
        return Region.lines(suffix, items * size, first, stop)

    def _packed_rows(self, suffix: str, items: int, first: int, stop: int) -> Region:
        count = self._packed.count
        begin, end = (
            row // self.rows * count(self.rows) + count(row % self.rows)
            for row in self._whole(first, stop)
        )
        if not self.transposed:
            return Region.lines(suffix, _WORD_BYTES * items, begin, end)
        line = _WORD_BYTES * count(self.rows)
        return Region(suffix, line, 0, items, begin * _WORD_BYTES, end * _WORD_BYTES)

    def _matrices(self, first: int, stop: int) -> tuple[int, int]:
        return first // self.rows, (stop - 1) // self.rows + 1

    def _whole(self, first: int, stop: int) -> tuple[int, int]:
        """Return rows around these that begin and end with words: of one matrix, or whole ones."""
        before, after = (number * self.rows for number in self._matrices(first, stop))
        if after - before > self.rows:
            return before, after
        whole = self._packed.used // math.gcd(self._packed.used, self.bits)
        first, stop = first - before, -(-(stop - before) // whole) * whole
        return before + first // whole * whole, min(before + stop, after)

    def _words(self, raw: Array, first: int, stop: int) -> tuple[Array, Words]:
        """Return the words of each row, and how codes lie in them."""
        if self.along_rows:
            begin, _ = self._whole(first, stop)
            words = kernels.active().turn(raw.view(np.uint32), _SQUARE)
            return words[first - begin : stop - begin], self._packed
        if self.transposed:
            return kernels.active().turn(raw.view(np.uint32), 1), self._packed
        lines = raw.reshape(stop - first, -1)
        if self.words is not None:
            return lines.view(np.uint32), self.words
        padding = (0, -self.cols % _SQUARE)
        codes = np.pad(lines + np.uint8(2 ** (self.bits - 1)), ((0, 0), padding))
        if codes.max(initial=0) >> self.bits:
            raise CodingError(f"a code does not fit in the {self.bits} bits of config.json")
        if self.bits > _NIBBLE:
            return codes.view(np.uint32), Words(_BYTE)
        pairs = codes[:, 0::2] | codes[:, 1::2] << np.uint8(_NIBBLE)
        return pairs.view(np.uint32), Words(_NIBBLE)

    def _biases(self, parts: Mapping[str, Array], first: int, stop: int) -> Array:
        """Return the biases or zero points of the groups of rows."""
        middle = np.full((1, 1), 2 ** (self.bits - 1), np.float32)
        if self.zeros == "biases":
            return self._of_groups(parts[".bias"], numpy_dtype(self.scale), first, stop)
        if self.zeros == "bytes":
            return self._of_groups(parts[".zero"], np.dtype(np.int8), first, stop) + middle
        return self._zeros(parts[".zero"], first, stop) if self.zeros else middle

    def _of_groups(self, raw: Array, kind: np.dtype[np.generic], first: int, stop: int) -> Array:
        """Return the items of the groups of rows."""
        items = raw.view(kind)
        items = items.T.copy() if self.transposed else items.reshape(-1, self._groups)
        if not self.by_row:
            items = items[np.arange(first, stop) // self.rows - first // self.rows]
        return items

    def _zeros(self, raw: Array, first: int, stop: int) -> Array:
        words, (begin, end) = self._packed, self._whole(first, stop)
        packed = raw.view(np.uint32)
        count = min(self.rows, end - begin)
        if not self.transposed:  # as if they were
            packed = packed.reshape(-1, words.count(count), self._groups).swapaxes(1, 2)
            packed = packed.reshape(-1, packed.shape[-1])
        in_whole_words = _WORD % self.bits == 0
        if self.zero_is_less_one and in_whole_words:
            packed = packed + np.uint32((2**_WORD - 1) // (2**self.bits - 1))
        if self.along_rows:
            zeros = _unpacked(words, kernels.active().turn(packed, _SQUARE), self._groups)
            return zeros[first - begin : stop - begin, : self._groups].astype(np.float32)
        zeros = _unpacked(words, packed, count)[:, :count]
        if self.zero_is_less_one and not in_whole_words:
            zeros = (zeros + np.uint8(1)) & np.uint8(2**self.bits - 1)
        zeros = zeros.reshape(-1, self._groups, count).swapaxes(1, 2).reshape(-1, self._groups)
        return zeros[first - begin : stop - begin].astype(np.float32)


_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_FP4, *(-value for value in _FP4)),
}
_LARGEST_CODE = np.float32(128)
_VALUES_OF_BYTE = {"nf4": 2, "fp4": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class BlockCodes(Coding):
    """How the codes of a weight lie: ``kind`` is nf4, fp4 or int8, ``block`` the values of a block.

    ``scale``: the dtype of scales, U8 of nested ones, of which ``outer`` share an outer scale. The
    ``offset`` of these does not tell codings apart, as each expert has its own.
    """

    kind: str
    block: int
    scale: DType
    outer: int = 0
    offset: float = field(default=0.0, compare=False)

    stated: ClassVar = (".quant_map", ".weight_format")

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        values, size = _VALUES_OF_BYTE[self.kind], self.scale.bits // 8
        yield "", start // values, -(-(start + count) // values)
        first, last = start // self.block, (start + count - 1) // self.block
        yield ".scale", first * size, (last + 1) * size
        if self.outer:
            yield ".nested_quant_map", 0, 4 * 256
            yield ".nested_absmax", first // self.outer * 4, (last // self.outer + 1) * 4

    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        needed = self.needs(start, count)
        parts = {suffix: read(Region.span(suffix, *part))[0] for suffix, *part in needed}
        first, of_byte = start // self.block, _VALUES_OF_BYTE[self.kind]
        scales = self._scales(parts, first)
        with np.errstate(over="ignore"):
            if not np.isfinite(scales * _LARGEST_CODE).all():
                raise CodingError("a scale gives values that are not finite in float32")
        run = BlockRun(
            rows=1,
            cols=len(scales) * self.block,
            first=start // of_byte * of_byte - first * self.block,
            count=parts[""].size * of_byte,
            block_rows=1,
            block_cols=self.block,
            dtype=DType.I8 if of_byte == 1 else DType.U8,
            table=_TABLES.get(self.kind, ()),
        )
        values = np.empty(run.count, numpy_dtype(dtype))
        kernels.decode_blocks_into(parts[""], scales, values, run)
        return values[start % of_byte :][:count]

    def _scales(self, parts: Mapping[str, Array], first: int) -> Array:
        scales = parts[".scale"].view(numpy_dtype(self.scale))
        if not self.outer:
            return scales
        outer = np.arange(first, first + len(scales)) // self.outer - first // self.outer
        inner = parts[".nested_quant_map"].view(np.float32).take(scales)
        with np.errstate(over="ignore", invalid="ignore"):
            inner *= parts[".nested_absmax"].view(np.float32).take(outer)
            inner += np.float32(self.offset)
        return inner

    def states(self, suffix: str, said: Array, shape: tuple[int, ...]) -> bool:  # noqa: ARG002
        by_rows = suffix == ".weight_format" and not said.any()
        # Tables are compared as by functional.py `QuantState.__eq__`.
        return by_rows or np.allclose(said, _TABLES.get(self.kind, 0), rtol=0, atol=1e-6)


_Size: TypeAlias = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


@dataclass(frozen=True, kw_only=True)
class QuantState(Document):
    """What the quant state of a 4-bit weight says, which is JSON in a tensor of bytes."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: _Size
    dtype: Literal["bfloat16", "float16", "float32"]
    shape: list[Annotated[int, Between(1)]]


@dataclass(frozen=True, kw_only=True)
class NestedState(QuantState):
    """The same of a weight whose scales are nested."""

    nested_blocksize: _Size
    nested_offset: float
    nested_dtype: Literal["float32"]


Parts: TypeAlias = Mapping[str, TensorLike]
# How a weight is stored, its dtype, and its shape.
_Stored: TypeAlias = tuple[BlockCodes, DType, tuple[int, ...]]


def int8_of(parts: Parts, dtype: DType) -> _Stored:
    """Return how a weight of LLM.int8 is stored. Raises: as `four_bits_of`."""
    shape = parts[""].shape
    wanted = {".scale": (DType.F32, shape[:1]), ".weight_format": (DType.U8, ())}
    _check(parts, {suffix: wanted[suffix] for suffix in wanted if suffix in parts})
    return BlockCodes("int8", math.prod(shape[1:]), DType.F32), dtype, shape


def four_bits_of(parts: Parts, raw: bytes) -> _Stored:
    """Return how a weight is stored whose quant state is ``raw``.

    Raises: ValueError with a reason if it is not valid, or if ``parts``, its tensors, do not fit.
    """
    kind = NestedState if ".nested_absmax" in parts else QuantState
    state = kind.from_json(said := strictjson.parse(raw, values=64))
    if unknown := sorted(said.keys() - {key for _, key, *_ in kind.json_keys()}):
        raise InvalidError("Unknown key", unknown[0])
    size, offset = 0, 0.0
    if isinstance(state, NestedState):
        size, offset = state.nested_blocksize, state.nested_offset
    count, codes = math.prod(state.shape), parts[""].dtype
    blocks = -(-count // state.blocksize)
    wanted = {
        "": (codes, (-(-count // (2 * codes.bits // 8)), 1)),
        ".scale": (DType.U8 if size else DType.F32, (blocks,)),
        ".quant_map": (DType.F32, (16,)),
        ".quant_state": (DType.U8, (len(raw),)),
    }
    if size:
        wanted[".nested_absmax"] = (DType.F32, (-(-blocks // size),))
        wanted[".nested_quant_map"] = (DType.F32, (256,))
    _check(parts, wanted)
    scale = parts[".scale"].dtype
    coding = BlockCodes(state.quant_type, state.blocksize, scale, size, offset)
    return coding, DType.parse_float(state.dtype), tuple(state.shape)


def _check(parts: Parts, wanted: Mapping[str, tuple[DType, tuple[int, ...]]]) -> None:
    for suffix, (dtype, shape) in wanted.items():
        part = parts.get(suffix)
        if part is None or (part.dtype, part.shape) != (dtype, shape):
            found = f"{part.dtype} {list(part.shape)}" if part is not None else "missing"
            what = suffix[1:] or "tensor"
            raise ValueError(f"its {what} is {found}, not {dtype} {list(shape)}")
