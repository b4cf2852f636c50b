"""Integer codes of other programs: where a weight's codes, scales and zero points lie.

A value is ``scale * (code - zero)``, with codes and zero points from 0 to ``2^bits - 1``. Codes of
up to four bits become int4's and others int8's, unchanged, in groups that share a scale: a bias is
``-scale * zero``, rounded once. Where no groups of ours fit, values are computed in float32.

Sources: vllm-project/compressed-tensors@ac8e2ba8 compressors/pack_quantized/helpers.py
`pack_to_int32` (the first code in the lowest bits of dense words; codes and zero points are offset
by ``2^(bits - 1)``; zero points are packed along rows), naive_quantized/base.py (a byte of two's
complement for each code), quantization/lifecycle/forward_helpers.py `_dequantize`. Its version
0.12.2 compressors/quantized_compressors/pack_quantized.py packs ``32 // bits`` codes into a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import AFFINE_GROUP_SIZES, Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype

ReadBytes = Callable[[str, int, int], Array]
"""Returns the bytes of a weight's tensor, by its suffix, from one offset to another."""
_WORD = 32
_NIBBLE, _BYTE = 4, 8


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

    def places(self, first: int, stop: int) -> Array:
        """Return the first bits of the codes from one index to another."""
        codes = np.arange(first, stop)
        if self.dense:
            return codes * self.bits
        words, inside = np.divmod(codes, _WORD // self.bits)
        return words * _WORD + inside * self.bits

    def unpack(self, words: Array, first: int, stop: int) -> Array:
        """Return codes of each row of U32 ``[rows, words]`` as U8 ``[rows, stop - first]``."""
        if self.bits in (_NIBBLE, _BYTE):
            raw = np.ascontiguousarray(words).view(np.uint8)
            if self.bits == _NIBBLE:
                raw = np.stack((raw & 0xF, raw >> _NIBBLE), axis=-1).reshape(len(raw), -1)
            return raw[:, first:stop]
        word, shift = np.divmod(self.places(first, stop), _WORD)
        pairs = np.pad(words, ((0, 0), (0, 1))).astype(np.uint64)
        pairs = (pairs[:, word] | pairs[:, word + 1] << np.uint64(_WORD)) >> shift.astype(np.uint64)
        return (pairs & np.uint64(2**self.bits - 1)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """How the codes of matrices ``[rows, cols]`` lie in a source's tensors.

    ``group``: consecutive values that share a scale of dtype ``scale``, a whole matrix at most.
    ``words``: how each row is packed; None if a code is one byte of two's complement. ``zeros``:
    "" without zero points, as codes are symmetric; "bytes" if these lie as scales do; "words" if
    they are packed along rows.
    """

    bits: int
    rows: int
    cols: int
    group: int
    scale: DType
    words: Words | None = None
    zeros: str = ""

    @property
    def quantization(self) -> Quantization | None:
        """The type and groups of ours that hold these codes as they are; None without any."""
        kind = QuantType.INT4 if self.bits <= _NIBBLE else QuantType.INT8
        for size in reversed(AFFINE_GROUP_SIZES):
            if self.group % size == 0 and self.cols % size == 0:
                return Quantization(kind, size)
        return None

    @property
    def zero_words(self) -> Words:
        """How zero points are packed along rows."""
        return self.words or Words(self.bits)

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield what ``count`` values from flat index ``start`` on are made from.

        Each is the suffix of a tensor, and its bytes from one offset to another.
        """
        first, last = start // self.cols, (start + count - 1) // self.cols
        line = 4 * self.words.count(self.cols) if self.words is not None else self.cols
        yield "", first * line, (last + 1) * line
        begin, end = start // self.group, (start + count - 1) // self.group + 1
        size = self.scale.bits // 8
        yield ".scale", begin * size, end * size
        if self.zeros == "bytes":
            yield ".zero", begin, end
        elif self.zeros:  # of whole matrices: rows of a column are in one word
            line = 4 * self.zero_words.count(self.rows) * (self.cols // self.group)
            yield ".zero", first // self.rows * line, (last // self.rows + 1) * line

    def values(self, read: ReadBytes, start: int, count: int, dtype: DType) -> Array:
        """Return values from flat index ``start`` on, computed in float32 and rounded once."""
        parts = {suffix: read(suffix, *span) for suffix, *span in self.needs(start, count)}
        group = np.arange(start, start + count) // self.group
        scales, zeros = self._groups(parts, start, group)
        with np.errstate(over="ignore", invalid="ignore"):
            values = (self._codes(parts[""], start, count).astype(np.float32) - zeros) * scales
            return values.astype(numpy_dtype(dtype))

    def quantized(self, read: ReadBytes, start: int, count: int) -> QuantizedArray[Array]:
        """Return the codes, scales and biases of `quantization` for whole groups of it."""
        quantization = self.quantization
        if quantization is None:
            raise AssertionError("no groups of ours fit")
        parts = {suffix: read(suffix, *span) for suffix, *span in self.needs(start, count)}
        codes = self._codes(parts[""], start, count)
        if quantization.quant_type is QuantType.INT4:
            codes = codes[0::2] | codes[1::2] << np.uint8(_NIBBLE)
        group = np.arange(start, start + count, quantization.group_size) // self.group
        scales, zeros = self._groups(parts, start, group)
        with np.errstate(over="ignore", invalid="ignore"):
            biases = (-scales * zeros).astype(numpy_dtype(self.scale))
        scales = scales.astype(numpy_dtype(self.scale))
        words = np.ascontiguousarray(codes).view(np.uint32)
        return QuantizedArray(words, scales, biases, None, quantization)

    def _codes(self, raw: Array, start: int, count: int) -> Array:
        """Return codes as U8, flat, from the bytes of whole rows."""
        if self.words is None:
            codes = raw + np.uint8(2 ** (self.bits - 1))
        else:
            lines = raw.view(np.uint32).reshape(-1, self.words.count(self.cols))
            codes = self.words.unpack(lines, 0, self.cols).reshape(-1)
        return codes[start % self.cols :][:count]

    def _groups(self, parts: dict[str, Array], start: int, group: Array) -> tuple[Array, Array]:
        """Return the scales and the zero points of groups as float32."""
        first = start // self.group
        scales = parts[".scale"].view(numpy_dtype(self.scale))[group - first].astype(np.float32)
        middle = 2 ** (self.bits - 1)
        if not self.zeros:
            return scales, np.float32(middle)
        if self.zeros == "bytes":
            zeros = parts[".zero"].view(np.int8).astype(np.float32) + middle
            return scales, zeros[group - first]
        columns = self.cols // self.group
        lines = self.zero_words.count(self.rows)
        packed = parts[".zero"].view(np.uint32).reshape(-1, lines, columns)
        unpacked = [self.zero_words.unpack(one.T, 0, self.rows).T for one in packed]
        matrix = start // (self.cols * self.rows)
        flat = np.concatenate(unpacked).reshape(-1)
        return scales, flat[group - matrix * self.rows * columns].astype(np.float32)
