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

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from blobstore import kernels
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import AFFINE_GROUP_SIZES, Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.kernels.reference import AWQ_PLACES
from blobstore.source.coding import Coding, CodingError, ReadRegion, Region

_WORD, _WORD_BYTES = 32, 4
_NIBBLE, _BYTE = 4, 8
_BLOCK = 2**14
"""Words of rows that are unpacked at a time."""
_SIGNIFICANT_BITS = {DType.BF16: 8, DType.F16: 11, DType.F32: 24}


@dataclass(frozen=True, slots=True)
class Words:
    """Codes of ``bits`` in 32-bit words, from the lowest bits up: ``dense``, or none cut in two."""

    bits: int
    dense: bool = True

    def count(self, codes: int) -> int:
        """Return how many words hold so many codes."""
        return -(-codes * self.bits // _WORD) if self.dense else -(-codes // (_WORD // self.bits))

    def codes(self, words: int) -> int:
        """Return how many codes fit into so many words."""
        return words * _WORD // self.bits if self.dense else words * (_WORD // self.bits)

    def unpack(self, words: Array, count: int) -> Array:
        """Return codes of each row of U32 ``[rows, words]`` as U8 ``[rows, count]``."""
        if self.bits == _BYTE:
            return np.ascontiguousarray(words).view(np.uint8)[:, :count]
        # After so many codes and words, codes begin at the lowest bit of a word again.
        is_cut = self.dense and _WORD % self.bits != 0
        codes, width = (_WORD, self.bits) if is_cut else (_WORD // self.bits, 1)
        padded = np.pad(words, ((0, 0), (0, -words.shape[1] % width)))
        wide = padded.reshape(len(words), -1, width)
        unpacked = np.empty((*wide.shape[:2], codes), np.uint8)
        for number in range(codes):
            word, shift = divmod(number * self.bits, _WORD)
            code = wide[..., word] >> np.uint32(shift)
            if shift + self.bits > _WORD:
                code |= wide[..., word + 1] << np.uint32(_WORD - shift)
            unpacked[..., number] = code & np.uint32(2**self.bits - 1)
        return unpacked.reshape(len(words), -1)[:, :count]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix: their codes, in U32 ``words`` of each; scales and biases of their groups.

    These are float32 ``[rows, groups]``; where ``by_zero``, the biases are zero points instead.
    ``group``: consecutive columns that share them, or the number of each column's group.
    """

    words: Array
    packing: Words
    scales: Array
    biases: Array
    group: int | Array
    by_zero: bool = True

    def blocks(self) -> Iterator[tuple[slice, Rows]]:
        """Yield a few rows at a time, and their numbers: temporary arrays stay in the cache."""
        step = max(1, _BLOCK // self.words.shape[1])
        for first in range(0, len(self.words), step):
            place = slice(first, first + step)
            scales, biases = self.scales[place], self.biases[place]
            yield place, replace(self, words=self.words[place], scales=scales, biases=biases)

    def of_columns(self, columns: Array) -> tuple[Array, Array]:
        """Return the scales and the biases, or zero points, of columns."""
        groups = columns // self.group if isinstance(self.group, int) else self.group
        return self.scales.take(groups, axis=1), self.biases.take(groups, axis=1)


@dataclass(frozen=True, slots=True)
class IntegerCodes(Coding):
    """How the codes of matrices ``[rows, cols]`` lie in a source's tensors.

    ``group``: consecutive columns that share a scale, of dtype ``scale``. ``permuted``: columns of
    a group do not follow each other.
    """

    bits: int
    rows: int
    cols: int
    group: int
    scale: DType
    permuted: bool = False

    stated = (".shape", ".order")

    @property
    def quantization(self) -> Quantization | None:
        """The type and groups of ours that hold these codes as they are; None without any."""
        kind = QuantType.INT4 if self.bits <= _NIBBLE else QuantType.INT8
        for size in reversed(AFFINE_GROUP_SIZES):
            if self.group % size == self.cols % size == 0 and not self.permuted:
                return Quantization(kind, size)
        return None

    @property
    def has_zeros(self) -> bool:
        """True if zero points are stored, which need not be powers of two."""
        return True

    @property
    def rounding(self) -> float:
        """That of ``-scale * zero``; zero points have as many bits as codes."""
        largest = 2**self.bits - 1 if self.has_zeros else 0
        return largest * 2.0 ** -(1 + _SIGNIFICANT_BITS[self.scale])

    @abstractmethod
    def regions(self, first: int, stop: int) -> Iterator[Region]:
        """Yield what rows of the matrices, one after the other, are made from."""

    @abstractmethod
    def decoded(self, parts: Mapping[str, Array], first: int, stop: int) -> Rows:
        """Return rows from the bytes of their regions, by suffix."""

    def states(self, suffix: str, said: Array, shape: tuple[int, ...]) -> bool:
        """Return True if a weight's shape or, unless permuted, its columns' groups are as said."""
        if suffix == ".shape":
            return bool(said.tolist() == list(shape))
        if not self.permuted:
            return np.array_equal(said, np.arange(self.cols) // self.group)
        return bool(((said >= 0) & (said < -(-self.cols // self.group))).all())

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield what values are made from: a tensor's suffix, and from where to where in bytes."""
        for region in self.regions(*self._range(start, count)):
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
        values = np.empty((len(rows.words), self.cols), numpy_dtype(dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            for place, some in rows.blocks():
                scales, biases = some.of_columns(np.arange(self.cols))
                codes = some.packing.unpack(some.words, self.cols).astype(np.float32)
                values[place] = (
                    (codes - biases) * scales if some.by_zero else codes * scales + biases
                )
        return values.reshape(-1)[start - first :][:count]

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
        words = rows.words
        if rows.packing != Words(bits) or words.shape[1] != self.cols * bits // _WORD:
            words = np.empty((len(words), self.cols * bits // _WORD), np.uint32)
            for place, some in rows.blocks():
                codes = some.packing.unpack(some.words, self.cols)
                if bits == _NIBBLE:
                    codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(_NIBBLE)
                words[place] = np.ascontiguousarray(codes).view(np.uint32)
        words = words.reshape(-1)[start * bits // _WORD :][: count * bits // _WORD]
        kind = numpy_dtype(scale)
        scales, biases = rows.of_columns(np.arange(0, self.cols, size))
        with np.errstate(over="ignore", invalid="ignore"):
            biases = -scales * biases if rows.by_zero else biases
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
        """Return the rows that values are in, and the flat index of the first value of these."""
        first, stop = self._range(start, count)
        parts = {region.suffix: read(region) for region in self.regions(first, stop)}
        return first * self.cols, self.decoded(parts, first, stop)


@dataclass(frozen=True, slots=True)
class RowCodes(IntegerCodes):
    """Codes that lie row by row, as compressed-tensors and MLX store them.

    ``words``: how each row is packed; None if a code is one byte of two's complement. ``by_row``:
    each row has its own scales; else a matrix has one. ``zeros``: "" without zero points, as codes
    are symmetric; "bytes" if these lie as scales do; "words" if they are packed along rows;
    "biases" if a bias lies with each scale.
    """

    words: Words | None = None
    by_row: bool = True
    zeros: str = ""

    @property
    def has_zeros(self) -> bool:
        return self.zeros in ("bytes", "words")

    @property
    def _line(self) -> int:
        return self.cols if self.words is None else _WORD_BYTES * self.words.count(self.cols)

    @property
    def _groups(self) -> int:
        return self.cols // self.group

    @property
    def _zero_words(self) -> Words:
        return self.words or Words(self.bits)

    def regions(self, first: int, stop: int) -> Iterator[Region]:
        yield Region.lines("", self._line, first, stop)
        size = self.scale.bits // 8
        if not self.by_row:
            first, stop = first // self.rows, (stop - 1) // self.rows + 1
        yield Region.lines(".scale", size * self._groups, first, stop)
        if self.zeros == "biases":
            yield Region.lines(".bias", size * self._groups, first, stop)
        elif self.zeros == "bytes":
            yield Region.lines(".zero", self._groups, first, stop)
        elif self.zeros:
            line = _WORD_BYTES * self._zero_words.count(self.rows) * self._groups
            yield Region.lines(".zero", line, first // self.rows, (stop - 1) // self.rows + 1)

    def decoded(self, parts: Mapping[str, Array], first: int, stop: int) -> Rows:
        words, packing = parts[""].reshape(stop - first, -1), self.words
        if packing is None:
            packing = Words(_BYTE)
            padding = (0, -self.cols % _WORD_BYTES)
            words = np.pad(words + np.uint8(2 ** (self.bits - 1)), ((0, 0), padding))
            if words.max(initial=0) >> self.bits:
                raise CodingError(f"a code does not fit in the {self.bits} bits of config.json")
        words = np.ascontiguousarray(words).view(np.uint32)
        scales = parts[".scale"].view(numpy_dtype(self.scale)).reshape(-1, self._groups)
        matrices = np.arange(first, stop) // self.rows - first // self.rows
        if not self.by_row:
            scales = scales[matrices]
        zeros = np.full((1, 1), 2 ** (self.bits - 1), np.float32)
        if self.zeros == "biases":
            zeros = parts[".bias"].view(numpy_dtype(self.scale)).reshape(scales.shape)
        elif self.zeros == "bytes":
            zeros = parts[".zero"].view(np.int8).reshape(-1, self._groups) + zeros
            zeros = zeros if self.by_row else zeros[matrices]
        elif self.zeros:
            zeros = self._unpacked_zeros(parts[".zero"], first, stop)
        zeros = np.broadcast_to(zeros.astype(np.float32), scales.shape)
        by_zero = self.zeros != "biases"
        return Rows(words, packing, scales.astype(np.float32), zeros, self.group, by_zero)

    def _unpacked_zeros(self, raw: Array, first: int, stop: int) -> Array:
        """Return the zero points of rows, which are packed along the rows of each matrix."""
        words = self._zero_words
        packed = raw.view(np.uint32).reshape(-1, words.count(self.rows), self._groups)
        before = first // self.rows * self.rows
        unpacked = [words.unpack(one.T, self.rows).T for one in packed]
        return np.concatenate(unpacked)[first - before : stop - before]


@dataclass(frozen=True, slots=True)
class ColumnCodes(IntegerCodes):
    """Codes of one matrix that lies with its inputs first, as GPTQ and AWQ store them.

    GPTQ packs codes along inputs, AWQ along outputs (``along_outputs``). Zero points are packed
    along outputs. ``zero_is_less_one``: as version 1 of GPTQ stores them. If columns are permuted,
    a tensor says which group each is in.
    """

    by_columns: ClassVar[bool] = True
    along_outputs: bool = False
    zero_is_less_one: bool = False

    def regions(self, first: int, stop: int) -> Iterator[Region]:
        outputs = self._outputs(first, stop)
        inputs, groups = self.cols, -(-self.cols // self.group)
        if self.along_outputs:
            yield self._region("", self._packed(self.rows), inputs, *map(self._packed, outputs))
        else:
            yield self._region("", self.rows, self._packed(inputs), first, stop)
        yield self._region(".zero", self._packed(self.rows), groups, *map(self._packed, outputs))
        size = self.scale.bits // 8
        yield Region(".scale", self.rows * size, 0, groups, first * size, stop * size)
        if self.permuted:
            yield Region.span(".order", 0, _WORD_BYTES * inputs)

    def decoded(self, parts: Mapping[str, Array], first: int, stop: int) -> Rows:
        begin, _ = self._outputs(first, stop)
        lines = parts[""].view(np.uint32)
        words = kernels.active().turn(lines, len(AWQ_PLACES) if self.along_outputs else 1)
        if self.along_outputs:
            words = words[first - begin : stop - begin]
        packed = parts[".zero"].view(np.uint32)
        if self.zero_is_less_one and self.bits in (2, _NIBBLE, _BYTE):
            packed = packed + np.uint32((2**_WORD - 1) // (2**self.bits - 1))
        zeros = self._of_outputs(packed, first - begin, stop - begin)
        if self.zero_is_less_one and self.bits not in (2, _NIBBLE, _BYTE):
            zeros = (zeros + np.uint8(1)) & np.uint8(2**self.bits - 1)
        scales = parts[".scale"].view(numpy_dtype(self.scale)).T
        group = parts[".order"].view(np.int32).reshape(-1) if self.permuted else self.group
        scales, zeros = scales.astype(np.float32), zeros.T.astype(np.float32)
        return Rows(words, Words(self.bits), scales, zeros, group)

    def _packed(self, codes: int) -> int:
        return Words(self.bits).count(codes)

    def _region(self, suffix: str, line: int, lines: int, begin: int, end: int) -> Region:
        """Return words of each of all lines."""
        size = _WORD_BYTES
        return Region(suffix, line * size, 0, lines, begin * size, end * size)

    def _outputs(self, first: int, stop: int) -> tuple[int, int]:
        """Return outputs that begin and end where words do."""
        whole = _WORD // math.gcd(_WORD, self.bits)
        return first // whole * whole, min(-(-stop // whole) * whole, self.rows)

    def _of_outputs(self, words: Array, first: int, stop: int) -> Array:
        """Return codes that are packed along outputs."""
        codes = Words(self.bits).unpack(words, Words(self.bits).codes(words.shape[1]))
        if self.along_outputs:
            codes = codes.reshape(len(words), -1, len(AWQ_PLACES))[..., AWQ_PLACES]
        return codes.reshape(len(words), -1)[:, first:stop]
