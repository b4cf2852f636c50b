"""Scales: how they are chosen, their number formats, and the scales of block FP8.

``minmax`` takes them from each group's extremes, as MLX does. ``search`` tries candidates and keeps
the one with the least squared error (docs/quantization.md, "search"). The number formats of codes
and scales are the twin of formats.h. A `BlockRun` is a run of the codes of block FP8 matrices, with
the scales that it needs. No file is read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from blobstore.errors import UsageError
from blobstore.formats.dtypes import FP8, DType, QuantType
from blobstore.kernels.arrays import Array, array_of

FP8_BLOCK = 128
"""Rows and columns of the square that shares a scale in a block FP8 matrix."""
BF16_NAN_BITS, F16_NAN_BITS = 0x7FC0, 0x7E00
"""The bits of every NaN that kernels make."""
E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
_BITS_OF_2_TO_MINUS_127 = 0x400000


def code_type(quant_type: QuantType) -> type[Any]:
    """Return the number format of a type's codes: E2M1 or E4M3."""
    return E4M3 if quant_type is QuantType.MXFP8 else E2M1


def largest(number_format: type[Any]) -> int:
    """Return the largest value of a number format: 6 or 448."""
    return 448 if number_format is E4M3 else 6


def scale_bits(values: Array, quant_type: QuantType) -> Array:
    """Return scales for values >= 0: E4M3, rounded to even, for nvfp4; else E8M0, rounded up."""
    return rounded_bits(values, E4M3) if quant_type is QuantType.NVFP4 else e8m0_bits_up(values)


def decoded_scales(scales: Array, quant_type: QuantType) -> Array:
    """Return the values of stored scales (U8) as float32."""
    return scales.view(E4M3 if quant_type is QuantType.NVFP4 else E8M0).astype(np.float32)


def e8m0_bits_up(values: Array) -> Array:
    """Return the exponent bytes of the smallest powers of two >= ``values``, which are >= 0.

    The powers are clamped to [2^-127, 2^127].
    """
    raw = values.view(np.uint32)
    exponent, mantissa = raw >> 23, raw & 0x7FFFFF
    normal = np.minimum(exponent + (mantissa != 0), 254)
    subnormal = raw > _BITS_OF_2_TO_MINUS_127
    return np.where(exponent == 0, subnormal, normal).astype(np.uint8)


def rounded_bits(values: Array, number_format: type[Any]) -> Array:
    """Return the bits of ``values`` in a format as bytes, rounded half to even and saturated."""
    most = largest(number_format)
    return np.clip(values, -most, most).astype(number_format).view(np.uint8)


def rounded_magnitudes(values: Array, number_format: type[Any]) -> Array:
    """Return ``values`` >= 0 rounded to a format, NaN as its largest, as float32."""
    most = largest(number_format)
    return np.where(values < most, values, most).astype(number_format).astype(np.float32)


METHODS = ("minmax", "search")
# A search tries scales up to 1 / 3.5 of a group's largest magnitude; the largest scale is 448.
_SEARCHED_NVFP4 = 3.5 * 448


def check_method(method: object) -> str:
    """Return ``method``; raise UsageError if it is not a quantization method."""
    if not isinstance(method, str) or method not in METHODS:
        raise UsageError(
            f"unknown quantization method {method!r}", hint=f"Use one of: {', '.join(METHODS)}."
        )
    return method


@dataclass(frozen=True, slots=True)
class AffineCandidates:
    """The scales and biases that ``search`` tries for int4 and int8.

    The scales are ``factors`` times the group's range over the levels. Each of ``shifts`` moves the
    codes' range against the group's by that part of their difference (at least 0.75 scales). The
    best scale of each shift is fitted once. ``neighbours``: the stored biases next to the best ones
    are tried too.
    """

    factors: tuple[float, ...]
    shifts: tuple[float, ...] = (-0.5, -0.25, 0.0, 0.25, 0.5)
    neighbours: bool = True


# With few levels it pays to cut the range. With many, a range that is a little too wide costs
# nothing, and each candidate's stored scale rounds differently.
_CANDIDATES = {
    QuantType.INT4: AffineCandidates((0.80, 0.852, 0.904, 0.956, 1.008, 1.06)),
    QuantType.INT8: AffineCandidates((1.0, 1.006, 1.012, 1.018, 1.024, 1.03)),
}


@dataclass(frozen=True, slots=True, eq=False)
class ScaleChoice:
    """How scales are chosen for a run of weights; the default is plain ``minmax``.

    ``importance``: float32 ``[cols]``, the weight of each column's squared error in ``search``;
    None for equal weights. ``first_column``: the column of the run's first weight.
    ``global_scale``: a power of two that divides the weights of a double-scaled nvfp4 tensor first.
    """

    method: str = "minmax"
    importance: Array | None = None
    first_column: int = 0
    global_scale: float = 1.0
    candidates: AffineCandidates | None = None

    def candidates_for(self, quant_type: QuantType) -> AffineCandidates:
        return self.candidates or _CANDIDATES.get(quant_type) or AffineCandidates(())


def checked_importance(importance: Any, cols: int | None, what: str = "importance") -> Array:
    """Return importance as a new float32 ``[cols]`` whose largest value is from 1 to 2.

    Only ratios count. If all columns count the same, each is 1, and a search gives the same result
    as without importance.

    Raises: UsageError when it is not a vector of ``cols`` (None: any number of) finite numbers >=
    0.
    """
    values = array_of(importance, what)
    if values.ndim != 1 or not (values.dtype.kind in "fiu" or values.dtype == ml_dtypes.bfloat16):
        raise UsageError(
            f"{what} is {values.dtype} of shape {list(values.shape)}, not a vector of floats"
        )
    if cols is not None and values.size != cols:
        raise UsageError(f"{what} has {values.size:,} values for {cols:,} columns")
    values = values.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        column = int(np.argmin(np.isfinite(values) & (values >= 0)))
        raise UsageError(
            f"{what} of column {column} is {values[column]}: it must be finite and at least 0"
        )
    largest = float(values.max(initial=0))
    if largest and values.min() == largest:
        return np.ones(values.size, np.float32)
    return np.ldexp(values, 1 - math.frexp(largest)[1]).astype(np.float32)


def global_scale_of(amax: float) -> float:
    """Return the global scale, a power of two, of an nvfp4 tensor of largest magnitude ``amax``.

    It is the smallest with which all candidate scales fit E4M3, so that as few as possible are
    subnormal. A power of two changes no rounding: if all candidate scales of a group are normal
    without it, the group's values are the same with it.
    """
    if not 0 < amax < math.inf:
        return 1.0
    fraction, exponent = math.frexp(amax / _SEARCHED_NVFP4)
    return math.ldexp(1.0, max(-126, exponent - 1 if fraction == 0.5 else exponent))  # noqa: PLR2004  # a power of two itself


def largest_magnitude(array: Array) -> float:
    """Return the largest magnitude of a contiguous BF16, F16 or F32 array.

    Returns infinity if any value is not finite.
    """
    unsigned = array.view(f"u{array.dtype.itemsize}")
    # Without a sign, the bits of floats are in the order of the floats. Two passes need no memory.
    least_negative = 2 ** (8 * array.dtype.itemsize - 1)
    positive = int(unsigned.view(f"i{array.dtype.itemsize}").max(initial=0))
    negative = int(unsigned.max(initial=0)) % least_negative
    amax = float(np.array([max(positive, negative)], unsigned.dtype).view(array.dtype)[0])
    return amax if math.isfinite(amax) else math.inf


# Flat indices are int64.
_END = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """``count`` codes from flat index ``first`` on, of consecutive matrices ``[rows, cols]``.

    The codes are of ``dtype``: E4M3, E5M2, or I8, parts of 127. In U8 two codes of four bits are a
    byte, the first in the high bits, and ``table`` has their 16 values. The matrices are row-major.
    A run may begin and end inside a row. Each matrix has its own scales, row-major too: one for
    each block of ``block_rows`` and ``block_cols``, ``blocks`` of them; those at edges may be cut.

    Raises: UsageError unless codes are of these, all others are whole numbers >= 0, blocks are
    not empty, matrices of a run with codes are not empty, and the run ends before 2^63.
    """

    rows: int
    cols: int
    first: int
    count: int
    block_rows: int = FP8_BLOCK
    block_cols: int = FP8_BLOCK
    dtype: DType = DType.F8_E4M3
    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = {DType.U8: 16}
        if self.dtype not in (*FP8, DType.I8, *sizes):
            raise UsageError(f"codes are {self.dtype}, not F8_E4M3, F8_E5M2, I8 or U8")
        if len(self.table) != sizes.get(self.dtype, 0):
            raise UsageError(f"codes are {self.dtype}, and the table has {len(self.table)} values")
        for name in ("rows", "cols", "first", "count", "block_rows", "block_cols"):
            number, least = getattr(self, name), int(name.startswith("block"))
            if type(number) is not int or not least <= number < _END:
                raise UsageError(
                    f"{name} is {number!r}: it must be a whole number from {least} to 2^63 - 1"
                )
        if self.first + self.count >= _END:
            raise UsageError(
                f"the run ends at {self.first + self.count:,}: it must end before 2^63"
            )
        if self.count and not self.rows * self.cols:
            raise UsageError(
                f"the run has {self.count:,} codes, but its matrices "
                f"[{self.rows:,}, {self.cols:,}] are empty"
            )

    @property
    def nbytes(self) -> int:
        """The bytes of the codes."""
        return -(-self.count // 2) if self.table else self.count

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of a matrix's scales."""
        return -(-self.rows // self.block_rows), -(-self.cols // self.block_cols)

    @property
    def scales(self) -> range:
        """The needed scales, as flat indices into those of all matrices.

        A run within one row of a matrix needs those of its blocks; other runs need whole rows of
        scales.
        """
        if not self.count:
            return range(0)
        last = self.first + self.count - 1
        begin, end = self._row_of_scales(self.first), self._row_of_scales(last)
        if self.first // self.cols == last // self.cols:
            width = self.block_cols
            return range(
                begin + self.first % self.cols // width, end + last % self.cols // width + 1
            )
        return range(begin, end + self.blocks[1])

    def _row_of_scales(self, index: int) -> int:
        """Return the first scale of the row of blocks that a code is in."""
        matrix, row = divmod(index // self.cols, self.rows)
        return (matrix * self.blocks[0] + row // self.block_rows) * self.blocks[1]

    def pieces(self, scales: int) -> Iterator[BlockRun]:
        """Yield the run in pieces that need about ``scales`` scales each, whatever the shape.

        A piece needs at most 4 more, and one more for each 16 of its codes. A run that needs fewer
        stays whole unless it is shorter than a row: it is then cut at the end of a row, because a
        whole row of scales may be far more than its pieces need.
        """
        block_rows, block_columns = self.blocks
        most = max(1, scales * self.rows * self.cols // max(1, block_rows * block_columns))
        first, end = self.first, self.first + self.count
        while first < end:
            count = min(most, end - first)
            if count < self.cols:
                count = min(count, self.cols - first % self.cols)
            yield replace(self, first=first, count=count)
            first += count
