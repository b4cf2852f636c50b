"""Blocks: how values lie in GGUF's tensors, and which of their codes are ours.

A block is a number of consecutive values of a row with its scales. Q4_0, Q4_1 and Q4_K are affine
in groups of 32 (int4), and so is Q8_0 (int8); MXFP4's codes and exponents are ours. All
others are dequantized by the gguf package, at 0.06 GB of values a second, or less.

Sources: ggml-org/llama.cpp gguf-py/gguf/quants.py `Q4_0.dequantize_blocks` and so on (gguf 0.19.0);
the rows of queries and keys: convert_hf_to_gguf.py `LlamaModel.permute`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from blobstore import kernels
from blobstore.formats.dtypes import DType
from blobstore.formats.gguf import GgufType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.source.coding import Coding, ReadRegion, Region

FLOATS = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}
_AFFINE = dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), Quantization(QuantType.INT4, 32))
KEPT = {
    **_AFFINE,
    "Q8_0": Quantization(QuantType.INT8, 32),
    "MXFP4": Quantization(QuantType.MXFP4, 32),
}
"""What holds the codes of a type as they are."""
UNREAD = frozenset({"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"})
"""The types that weights do not have, or that the gguf package does not dequantize."""
_WORD = 32


@dataclass(frozen=True, slots=True)
class Blocks(Coding):
    """How the values of a tensor with rows of ``cols`` lie in blocks of ``kind``.

    ``scale``: the dtype of affine scales and biases. ``head``: rows of a head whose halves the
    converter has interleaved; 0 if rows are in order. ``less``: what it has added to each value.
    ``is_half``: the tensor has every other row, and ".up" those between.
    """

    kind: GgufType
    cols: int
    scale: DType
    head: int = 0
    less: int = 0
    is_half: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.kind.name not in FLOATS

    @property
    def becomes(self) -> QuantType | None:
        return QuantType.INT8 if self.is_quantized and self.quantization is None else None

    @property
    def quantization(self) -> Quantization | None:
        return KEPT.get(self.kind.name)

    @property
    def _line(self) -> int:
        return self.cols // self.kind.block * self.kind.block_nbytes

    def _regions(self, start: int, count: int) -> Iterator[Region]:
        """Yield where the rows lie that values are in: those of whole heads, or pairs."""
        first, stop = start // self.cols, -(-(start + count) // self.cols)
        unit = 2 if self.is_half else self.head or 1
        begin, end = first // unit * unit, -(-stop // unit) * unit
        if self.is_half:
            begin, end = begin // 2, end // 2
            yield Region.lines(".up", self._line, begin, end)
        yield Region.lines("", self._line, begin, end)

    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        for region in self._regions(start, count):
            yield region.suffix, *region.needs

    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        if self.quantization is not None:
            return kernels.dequantize(self._codes(read, start, count, DType.F32), dtype)
        lines, skip = self._lines(read, start, count)
        if self.kind.name in FLOATS:
            values = lines.view(numpy_dtype(FLOATS[self.kind.name])).astype(np.float32)
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(all="ignore"):
                values = dequantize(lines, GGMLQuantizationType(self.kind.number))
        with np.errstate(over="ignore"):
            values = values.reshape(-1)[skip:][:count] - np.float32(self.less)
            rounded: Array = values.astype(numpy_dtype(dtype))
        return rounded

    def quantized(self, read: ReadRegion, start: int, count: int) -> QuantizedArray[Array]:
        return self._codes(read, start, count, self.scale)

    def _lines(self, read: ReadRegion, start: int, count: int) -> tuple[Array, int]:
        """Return the rows of values, in their order, and how many values lie before the first."""
        *second, region = self._regions(start, count)
        lines = read(region).reshape(-1, self._line)
        begin = region.begin // self._line
        if self.head:
            heads = lines.reshape(-1, self.head // 2, 2, self._line)
            lines = heads.swapaxes(1, 2).reshape(len(lines), -1)
        for other in second:
            lines = np.stack((lines, read(other).reshape(-1, self._line)), axis=1)
            lines, begin = lines.reshape(-1, self._line), 2 * begin
        return lines, start - begin * self.cols

    def _codes(
        self, read: ReadRegion, start: int, count: int, scale: DType
    ) -> QuantizedArray[Array]:
        quantization = KEPT[self.kind.name]
        lines, skip = self._lines(read, start, count)
        bits, size = quantization.quant_type.bits, quantization.group_size
        codes, scales, biases = _parts(self.kind.name, lines.reshape(-1, self.kind.block_nbytes))
        words = np.ascontiguousarray(codes).view(np.uint32).reshape(-1)
        words = words[skip * bits // _WORD :][: count * bits // _WORD]
        groups = slice(skip // size, (skip + count) // size)
        if biases is None:
            return QuantizedArray(words, scales.reshape(-1)[groups], None, None, quantization)
        with np.errstate(over="ignore"):
            scales, biases = (
                part.reshape(-1)[groups].astype(numpy_dtype(scale)) for part in (scales, biases)
            )
        return QuantizedArray(words, scales, biases, None, quantization)


def _parts(kind: str, blocks: Array) -> tuple[Array, Array, Array | None]:
    """Return the codes of blocks, packed as ours, and float32 scales and biases of each group.

    MXFP4 has exponents instead, and no biases.
    """
    if kind == "MXFP4":
        return _in_pairs(blocks[:, 1:], 16), blocks[:, :1], None
    scales = _halves(blocks[:, :2])
    if kind == "Q8_0":
        return blocks[:, 2:] ^ np.uint8(0x80), scales, np.float32(-128) * scales
    if kind == "Q4_0":
        return _in_pairs(blocks[:, 2:], 16), scales, np.float32(-8) * scales
    least = _halves(blocks[:, 2:4])
    if kind == "Q4_1":
        return _in_pairs(blocks[:, 4:], 16), scales, least
    of_scales, of_least, high = np.split(blocks[:, 4:16], 3, axis=1)
    of_scales = np.hstack((of_scales & 0x3F, (high & 0x0F) | ((of_scales >> 2) & 0x30)))
    of_least = np.hstack((of_least & 0x3F, (high >> 4) | ((of_least >> 2) & 0x30)))
    return _in_pairs(blocks[:, 16:], 32), scales * of_scales, -least * of_least


def _halves(raw: Array) -> Array:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _in_pairs(raw: Array, span: int) -> Array:
    """Return 4-bit codes two by two, of bytes whose low halves precede the high ones in a span."""
    even, odd = raw[:, 0::2], raw[:, 1::2]
    low, high = (even & 0xF) | (odd << 4), (even >> 4) | (odd & 0xF0)
    halves = (half.reshape(len(raw), -1, span // 2) for half in (low, high))
    return np.stack(tuple(halves), axis=2)
