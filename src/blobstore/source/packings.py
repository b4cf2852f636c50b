"""Packings: the shape and type of quantized weights, from their headers and config.json. Pure.

An inspection counts weights before packing, including those in formats that are not imported.
producers.py says which tensors belong together. Here each of its rows has a reader, which returns
the shape of the values and their packing, or raises. Nothing is guessed: if several answers fit,
the reader raises.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import DType, Words
from blobstore.formats.safetensors.header import TensorEntry
from blobstore.source import producers
from blobstore.source.producers import Found, Producer

_WORD_BITS = 32
_AFFINE = tuple(
    (f"int{bits}", bits, size) for bits in (1, 2, 3, 4, 5, 6, 8) for size in (32, 64, 128)
)
_SMALL_FLOATS = (("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32))
_EXPONENTS = frozenset({DType.U8, DType.F8_E8M0})
_CODE_BITS = range(1, 9)
_TILE = 16
_UNCLEAR_BYTES = "nothing says how many codes are in a byte"
# Programs by their ``quant_method`` in config.json.
_FORMATS = {
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "bitnet": "BitNet",
    "quark": "Quark",
}


@dataclass(frozen=True, slots=True)
class Packing:
    """How values are packed: a type's name, bits a code, and how many of a row share a scale.

    ``group_size`` is None where a scale is shared by a whole row, or by more.
    """

    kind: str
    bits: float
    group_size: int | None = None

    def __str__(self) -> str:
        return self.kind if self.group_size is None else f"{self.kind}/{self.group_size}"


class UnclearPackingError(ValueError):
    """A weight's packing is unclear; the text says why, without the weight's name."""


def _need(condition: object, reason: str) -> None:
    if not condition:
        raise UnclearPackingError(reason)


_Found: TypeAlias = Found[TensorEntry]
_Shaped: TypeAlias = tuple[tuple[int, ...], Packing]
# The shape and packing of values, and the convention's name if it is not the row's.
_Unpacked: TypeAlias = _Shaped | tuple[tuple[int, ...], Packing, str]


def read_packing(
    row: Producer,
    name: str,
    tensors: Mapping[str, TensorEntry],
    config: Callable[[], SourceConfig | None],
) -> tuple[str, tuple[int, ...], Packing, str]:
    """Return the name in the model of a row's weight, and the shape and packing of its values.

    The last is the program whose convention it is. ``tensors`` may hold its companions.

    Raises: UnclearPackingError; DocumentError when config.json is read and is not valid.
    """
    match = Found(row, name, tensors, config)
    _need(match.tensor.shape, "packed weights of rank 0")
    shape, packing, *form = _READERS[row](match)
    return match.weight_name, shape, packing, form[0] if form else row.name


def _mlx(match: _Found) -> _Unpacked:
    *lead, words = match.tensor.shape
    *scale_lead, groups = match.scale.shape or (0,)
    _need(lead == scale_lead and groups, "MLX's scales do not have the rows of their weights")
    module = match.mlx
    possible = _AFFINE if match.companion(".biases") is not None else _SMALL_FLOATS
    if (match.scale.dtype.bits == 8) == (possible is _AFFINE):  # noqa: PLR2004
        possible = ()  # 8-bit scales are those of small floats
    if module is not None:
        kind = f"int{module.bits}" if module.mode == "affine" else module.mode
        possible = ((kind, module.bits, module.group_size),)
    fitting = [Packing(*one) for one in possible if one[1] * one[2] * groups == words * _WORD_BITS]
    answers = " and ".join(map(str, fitting)) or "no type that MLX has"
    says = "config.json's is another" if module is not None else "no config.json says which"
    _need(len(fitting) == 1, f"MLX's shapes fit {answers}, and {says}")
    return (*lead, words * _WORD_BITS // int(fitting[0].bits)), fitting[0]


def _nvfp4(match: _Found) -> _Unpacked:
    formats, end = match.config.packed_formats, "-pack-quantized"
    kinds = {text.removesuffix(end) for text in formats if text.endswith(end)}
    # Other formats have NVFP4's tensors with another meaning of the scales, such as mixfp4, and as
    # many values.
    kind = kinds.pop() if len(kinds) == 1 else "nvfp4"
    return _pairs(match, kind, _TILE)


def _pairs(match: _Found, kind: str, size: int) -> _Shaped:
    """Return a weight of two 4-bit floats a byte, with one scale for ``size`` values of a row."""
    *lead, last = shape = _double(match.tensor.shape)
    packing = Packing(kind, 4, size)
    fits = match.scale.shape == (*lead, last // size) and last % size == 0
    _need(fits, f"the scales do not have the groups of {packing}")
    return shape, packing


def _gpt_oss(match: _Found) -> _Unpacked:
    shape = match.tensor.shape
    fits = len(shape) > 1 and match.scale.shape == shape[:-1] and shape[-1] == _TILE
    _need(fits, "unknown layout: not the shapes of gpt-oss's blocks and scales")
    *lead, groups, _ = shape
    return (*lead, groups * 32), Packing("mxfp4", 4, 32)


def _compressed_tensors(match: _Found) -> _Unpacked:
    readers = {DType.I32: _packed_words, DType.I8: _two_integers, DType.U8: _fp4}
    return readers[match.tensor.dtype](match)


def _fp4(match: _Found) -> _Shaped:
    return _pairs(match, *(("mxfp4", 32) if match.scale.dtype in _EXPONENTS else ("nvfp4", _TILE)))


def _two_integers(match: _Found) -> _Shaped:
    return _double(match.tensor.shape), Packing("int4", 4, _group_size(match, 2))


def _double(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * 2)


def _group_size(match: _Found, codes: int) -> int | None:
    """Return how many values of a row share a scale; None for a whole row, or more."""
    shape, scale = match.tensor.shape, match.scale.shape
    groups = scale[-1] if shape and len(scale) == len(shape) and scale[:-1] == shape[:-1] else 1
    return shape[-1] * codes // groups if groups > 1 and not shape[-1] * codes % groups else None


def _packed_words(match: _Found) -> _Unpacked:
    """Return a weight of codes packed without gaps into words, row by row.

    The last word of a row may be padded. If the scales do not give the length of rows, the padding
    is counted as values.
    """
    shape, zeros = match.tensor.shape, match.companion(".weight_zero_point")
    _need(len(shape) > 1, "compressed-tensors' packed weights are not matrices")
    *lead, rows, words = shape
    groups = match.scale.shape[-1] if len(match.scale.shape) > 1 else 1
    are_packed = zeros is not None and zeros.dtype is DType.I32 and len(zeros.shape) > 1
    packed_rows = {zeros.shape[-2]} if zeros is not None and are_packed else None
    said = [(group.bits, group.group_size) for group in match.config.integer_groups]
    fitting = set()
    for bits, size in said or [(bits, None) for bits in _CODE_BITS]:
        count, in_groups = Words(bits).count, size if groups > 1 else None
        cols = groups * in_groups if in_groups is not None else Words(bits).codes(words)
        if count(cols) == words and count(rows) in (packed_rows or {count(rows)}):
            fitting.add((bits, in_groups, cols))
    _need(len(fitting) == 1, "nothing says how many bits the codes of compressed-tensors have")
    bits, size, cols = fitting.pop()
    return (*lead, rows, cols), Packing(f"int{bits}", bits, size)


def _scaled_bytes(match: _Found) -> _Unpacked:
    shape, scale = match.tensor.shape, match.scale.shape
    form = _FORMATS.get(match.config.quant_method or "", match.row.name)
    if match.tensor.dtype is DType.I8:
        return shape, Packing("int8", 8, _group_size(match, 1)), form
    if form == "BitNet" and len(shape) > 1:
        return (*shape[:-2], shape[-2] * 4, shape[-1]), Packing("bitnet", 2), form
    _need(len(shape) > 1 and len(scale) == len(shape), _UNCLEAR_BYTES)
    if scale[:-1] == shape[:-1]:
        of_floats = match.scale.dtype in _EXPONENTS or match.scale.dtype is DType.F8_E4M3
        return *(_fp4(match) if of_floats else _two_integers(match)), form
    # ModelOpt packs two rows into one.
    _need(scale[:-2] == shape[:-2] and scale[-2] == 2 * shape[-2], _UNCLEAR_BYTES)
    size = shape[-1] // scale[-1] if scale[-1] > 1 and not shape[-1] % scale[-1] else None
    return (*shape[:-2], scale[-2], shape[-1]), Packing("int4", 4, size), form


def _stacked_nvfp4(match: _Found) -> _Unpacked:
    shape, scale = match.tensor.shape, match.scale.shape
    fits = len(shape) > 1 and math.prod(shape) * 2 == math.prod(scale) * _TILE
    _need(fits, "the scales do not have the groups of nvfp4/16")
    *lead, rows, cols = shape
    unpacked = (rows * 2, cols) if scale[-1] == cols else (rows, cols * 2)
    return (*lead, *unpacked), Packing("nvfp4", 4, _TILE)


def _qweight(match: _Found) -> _Unpacked:
    """Return a weight of AWQ or GPTQ, stored transposed: AWQ packs outputs, GPTQ inputs."""
    shape, scales = match.tensor.shape, match.scale.shape
    fits = len(shape) > 1 and len(scales) == len(shape) and shape[:-2] == scales[:-2]
    _need(fits and math.prod(scales), "unknown layout: not the scales of AWQ or GPTQ")
    *lead, rows, cols = shape
    groups, out = scales[-2:]
    bits, inputs, form = _awq_or_gptq(match, rows, cols, out)
    size = inputs // groups if groups > 1 and not inputs % groups else None
    return (*lead, out, inputs), Packing(f"int{bits}", bits, size), form


def _awq_or_gptq(match: _Found, rows: int, cols: int, out: int) -> tuple[int, int, str]:
    """Return bits, inputs and the convention's name."""
    zeros, order = match.companion(".qzeros"), match.companion(".g_idx")
    if cols != out and cols * _WORD_BITS % out == 0 and cols * _WORD_BITS // out in _CODE_BITS:
        return cols * _WORD_BITS // out, rows, "AWQ"
    said = match.settings.get("bits", match.settings.get("w_bit"))
    possible = {said} if type(said) is int and said in _CODE_BITS else set(_CODE_BITS)
    if zeros is not None and zeros.shape:
        possible = {
            bits for bits in possible if zeros.shape[-1] * _WORD_BITS == out * bits
        } or possible
    if order is not None and order.shape and order.shape[-1] > 1:
        possible = {bits for bits in possible if rows * _WORD_BITS == order.shape[-1] * bits}
    bits, reason = min(possible, default=0), "unknown layout: not the shapes of AWQ or GPTQ"
    _need(cols == out and len(possible) == 1 and not rows * _WORD_BITS % bits, reason)
    return bits, rows * _WORD_BITS // bits, "GPTQ"


def _bitsandbytes(match: _Found) -> _Unpacked:
    """Return a weight of 4-bit codes in blocks.

    Its shape is in the data, not in the header, so here it is flat.
    """
    count = match.tensor.nbytes * 2
    kind = next(kind for kind, row in producers.BITSANDBYTES.items() if row is match.row)
    blocks = math.prod(match.scale.shape)
    sizes = [2**power for power in range(5, 13) if -(-count // 2**power) == blocks]
    return (count,), Packing(kind, 4, sizes[0] if len(sizes) == 1 else None)


def _exl2(match: _Found) -> _Unpacked:
    """Return a weight of several widths.

    Its outputs are padded to a multiple of 32, and the padding is counted.
    """
    shape, inputs = match.tensor.shape, math.prod(match.tensors[f"{match.base}.q_invperm"].shape)
    _need(len(shape) == 2 and inputs, "unknown layout: not the codes of EXL2")  # noqa: PLR2004
    return (shape[1], inputs), Packing("exl2", round(shape[0] * _WORD_BITS / inputs, 2))


def _exl3(match: _Found) -> _Unpacked:
    _need(len(match.tensor.shape) == 3, "unknown layout: not the trellis of EXL3")  # noqa: PLR2004
    inputs, outputs, width = match.tensor.shape
    bits = width // _TILE if width % _TILE == 0 else width / _TILE
    return (outputs * _TILE, inputs * _TILE), Packing("exl3", bits)


def _fp4_experts(match: _Found) -> _Unpacked:
    _need(match.scale.dtype in _EXPONENTS, _UNCLEAR_BYTES)
    return _fp4(match)


def _fp8(match: _Found) -> _Unpacked:
    shape, scale = match.tensor.shape, match.scale
    by_32 = scale.dtype in _EXPONENTS and shape and scale.shape == (*shape[:-1], shape[-1] // 32)
    if by_32 and match.tensor.dtype is DType.F8_E4M3:
        return shape, Packing("mxfp8", 8, 32), "MXFP8"
    blocks = len(scale.shape) > 1 and scale.shape[-1] > 1
    return shape, Packing("fp8", 8), producers.BLOCK_FP8[0].name if blocks else "FP8"


_READERS: Mapping[Producer, Callable[[_Found], _Unpacked]] = {
    producers.MLX: _mlx,
    producers.COMPRESSED_NVFP4: _nvfp4,
    producers.MODELOPT_NVFP4: _nvfp4,
    producers.GPT_OSS: _gpt_oss,
    producers.COMPRESSED: _compressed_tensors,
    producers.SCALED_BYTES: _scaled_bytes,
    producers.STACKED_NVFP4: _stacked_nvfp4,
    producers.QWEIGHT: _qweight,
    producers.EXL2: _exl2,
    producers.EXL3: _exl3,
    **dict.fromkeys(producers.BITSANDBYTES.values(), _bitsandbytes),
    **dict.fromkeys(producers.FP4_EXPERTS, _fp4_experts),
    **dict.fromkeys(producers.PLAIN_BYTES, lambda match: (match.tensor.shape, Packing("int8", 8))),
    **dict.fromkeys((*producers.BLOCK_FP8, *producers.SCALED_FP8), _fp8),
}
