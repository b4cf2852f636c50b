"""Blocks of bitsandbytes: 4-bit codes whose blocks share a scale, and 8-bit ones of LLM.int8.

A value is ``table[code] * scale``, computed in float32 and rounded once. A block is consecutive
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
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np

from blobstore import kernels
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.formats.strictjson import Between, Document, InvalidError
from blobstore.kernels.arrays import Array, numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.coding import Coding, CodingError, ReadRegion, Region
from blobstore.source.producers import TensorLike

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_TABLES: dict[str, tuple[float, ...]] = {
    "nf4": _NF4,
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
        """Return the scales of blocks from the first on."""
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
Stored: TypeAlias = tuple[BlockCodes, DType, tuple[int, ...]]
"""How a weight is stored, its dtype, and its shape."""


def int8_of(parts: Parts, dtype: DType) -> Stored:
    """Return how a weight of LLM.int8 is stored. Raises: as `four_bits_of`."""
    shape = parts[""].shape
    wanted = {".scale": (DType.F32, shape[:1]), ".weight_format": (DType.U8, ())}
    _check(parts, {suffix: wanted[suffix] for suffix in wanted if suffix in parts})
    return BlockCodes("int8", math.prod(shape[1:]), DType.F32), dtype, shape


def four_bits_of(parts: Parts, raw: bytes) -> Stored:
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
            raise ValueError(f"its {what} is {found}, and not {dtype} {list(shape)}")
