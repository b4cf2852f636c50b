"""Integer codes of other programs: where a weight's codes, scales and zero points lie.

A value is ``scale * (code - zero)``, with codes and zero points from 0 to ``2^bits - 1``, or MLX's
``scale * code + bias``. Codes of up to four bits become int4's and others int8's, unchanged, in
groups that share a scale: a bias is ``-scale * zero``, rounded once. Where no groups of ours fit,
values are computed in float32.

Sources:

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
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blobstore import kernels
from blobstore.formats.dtypes import DType
from blobstore.formats.modules import Words
from blobstore.formats.quant import AFFINE_GROUP_SIZES, Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.source.coding import Coding, CodingError, ReadRegion, Region

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
    """Return ``count`` codes of each row, or a few more, as U8 ``[rows, count]``."""
    return np.ascontiguousarray(_widened(packing, words, _BYTE, count)).view(np.uint8)


class Rows(NamedTuple):
    """Rows of a matrix: their codes, in U32 ``words`` of each; scales and biases of their groups.

    These are float32 ``[rows, groups]``; the biases may be zero points instead. ``groups``: that of
    each column.
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
        """See `Coding.by_columns`."""
        return self.transposed

    @property
    def quantization(self) -> Quantization | None:
        """The type and groups of ours that hold these codes as they are; None without any."""
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
        """Return True if a weight's shape or, unless permuted, its columns' groups are as said."""
        if suffix == ".shape":
            return bool(said.tolist() == list(shape))
        if self.permuted and self.transposed:
            return bool(((said >= 0) & (said < self._groups)).all())
        # compressed-tensors sorts columns, and then counts: its groups have one size.
        ordered = np.sort(said) if self.permuted else said
        return np.array_equal(ordered, np.arange(self.cols) // self.group)

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield what values are made from: a tensor's suffix, and from where to where in bytes."""
        for region in self._regions(*self._range(start, count)):
            yield region.suffix, *region.needs

    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        """Return ``count`` values from flat index ``start`` on, in float32, rounded once.

        If `quantization` is not None, they are whole groups of it.
        """
        first, rows = self._read(read, start, count)
        quantization = self.quantization
        if quantization is not None:
            array = self._array(rows, quantization, start - first, count, DType.F32)
            return kernels.dequantize(array, dtype)
        values = np.empty(len(rows.words) * self.cols, numpy_dtype(dtype))
        kernels.active().dequantize_columns(
            _unpacked(rows.packing, rows.words, self.cols),
            rows.groups,
            np.ascontiguousarray(rows.scales),
            np.ascontiguousarray(rows.biases),
            values,
            by_zero=self.zeros != "biases",
        )
        return values[start - first :][:count]

    def quantized(self, read: ReadRegion, start: int, count: int) -> QuantizedArray[Array]:
        """Return the same as codes, scales and biases of `quantization`, whole groups of it."""
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
        kind, groups = numpy_dtype(scale), rows.groups[::size]
        scales, biases = rows.scales.take(groups, axis=1), rows.biases.take(groups, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            biases = biases if self.zeros == "biases" else -scales * biases
            scales, biases = (
                part.reshape(-1)[start // size :][: count // size].astype(kind)
                for part in (scales, biases)
            )
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
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
        """Return items of rows, of ``size`` bytes each."""
        if self.transposed:
            return Region(suffix, self.rows * size, 0, items, first * size, stop * size)
        return Region.lines(suffix, items * size, first, stop)

    def _packed_rows(self, suffix: str, items: int, first: int, stop: int) -> Region:
        """Return the words of items that are packed along rows."""
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
        """Return the biases or zero points of the groups of rows, in float32."""
        middle = np.full((1, 1), 2 ** (self.bits - 1), np.float32)
        if self.zeros == "biases":
            return self._of_groups(parts[".bias"], numpy_dtype(self.scale), first, stop)
        if self.zeros == "bytes":
            return self._of_groups(parts[".zero"], np.dtype(np.int8), first, stop) + middle
        return self._zeros(parts[".zero"], first, stop) if self.zeros else middle

    def _of_groups(self, raw: Array, kind: np.dtype[np.generic], first: int, stop: int) -> Array:
        """Return the items of the groups of rows in float32."""
        items = raw.view(kind)
        items = items.T if self.transposed else items.reshape(-1, self._groups)
        if not self.by_row:
            items = items[np.arange(first, stop) // self.rows - first // self.rows]
        return items.astype(np.float32)

    def _zeros(self, raw: Array, first: int, stop: int) -> Array:
        """Return zero points that are packed along rows."""
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
