"""The kernels in NumPy: the operations of the C++ kernels, and the same bits.

Read it with quantize.h, dequantize.h, blocks.h, search_affine.h, search_fp.h,
turn.h and docs/quantization.md. Floats are float32, but for the sums of compare.h, which are
float64: numpy rounds Python's numbers to the type of the arrays of their expression (NEP 50), and
each operation by itself, so it needs no setting against fused multiply-add.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blobstore.formats.dtypes import DType, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.kernels.scales import (
    BF16_NAN_BITS,
    E4M3,
    F16_NAN_BITS,
    AffineCandidates,
    BlockRun,
    ScaleChoice,
    code_type,
    decoded_scales,
    e8m0_bits_up,
    largest,
    rounded_bits,
    rounded_magnitudes,
    scale_bits,
)

Pair = tuple[Array, Array] | Array
"""Scales and biases, one of each group."""

_CLEARLY = 1 - 2.0**-14
_BELOW, _ABOVE = 0.9945, 1.0055
_E2M1_BEYOND = 7
_LANES = 8
_HALF_A_STEP = 0.5
AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where each of eight codes lies in a word of AWQ."""
# Half-way from the largest code to the next value that a longer type would have.
_BEYOND = {QuantType.NVFP4: _E2M1_BEYOND, QuantType.MXFP4: _E2M1_BEYOND, QuantType.MXFP8: 464}


class Comparison(NamedTuple):
    """Sums over weights ``w`` and what they are read back as, ``r``, in float64.

    Infinite or NaN if a value is, or if no float64 holds the sum. ``max_error``, the largest
    ``|r - w|``, ignores NaN. ``beyond``: how many weights lie half a step or more beyond the codes
    of their group; 0 without groups.
    """

    squared_error: float
    squared_weight: float
    squared_read: float
    product: float
    max_error: float
    beyond: int


class ReferenceKernel:
    """NumPy twin of the native kernels.

    All arrays are flat, contiguous and aligned. Those of quantized weights hold whole groups.
    """

    name = "reference"

    def quantize(self, weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice) -> int:
        """Fill ``parts`` in place; return -1, or the index of the first weight at fault.

        That is the first non-finite weight; if all are finite, the first weight of the first group
        with an infinite scale, because it spans more than its dtype can scale. Biases are always
        finite, and the scales of the fp types saturate. ``weights`` are BF16, F16 or F32; scale and
        bias of an affine type have their dtype.
        """
        bad = _first_non_finite(weights)
        if bad >= 0 or not weights.size:
            return bad
        groups = weights.astype(np.float32).reshape(-1, parts.group_size)
        importance = _importance(choice, groups.shape)
        with np.errstate(all="ignore"):
            quantize = _quantize_affine if parts.quant_type.is_affine else _quantize_fp
            codes = quantize(groups, parts, choice, importance)
        parts.weight[:] = _pack(codes.reshape(-1), parts.quant_type.bits)
        group = _first_non_finite(parts.scale)  # -1 for the fp types, whose scales are bytes
        return group * parts.group_size if group >= 0 else -1

    def dequantize(self, parts: QuantizedArray[Array], global_scale: float, out: Array) -> None:
        """Write the values to ``out``, which is BF16, F16 or F32, each rounded from float32."""
        codes = _unpack(parts.weight, parts.quant_type.bits).reshape(-1, parts.group_size)
        with np.errstate(all="ignore"):
            if parts.bias is not None:
                product = codes.astype(np.float32) * parts.scale.astype(np.float32)[:, None]
                values = product + parts.bias.astype(np.float32)[:, None]
            else:
                floats = codes.astype(np.uint8).view(code_type(parts.quant_type))
                scales = decoded_scales(parts.scale, parts.quant_type)
                values = floats.astype(np.float32) * scales[:, None] * global_scale
            out[:] = values.reshape(-1).astype(out.dtype)

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        """Write the values of a run of codes, one at least, to ``out``: BF16, F16 or F32.

        ``scales`` (BF16, F16 or F32) are those of ``run.scales``.
        """
        rows, columns = np.divmod(np.arange(run.first, run.first + run.count), run.cols)
        matrices, rows = np.divmod(rows, run.rows)
        block_rows, block_columns = run.blocks
        of_each = (
            (matrices * block_rows + rows // run.block_rows) * block_columns
            + columns // run.block_cols
            - run.scales.start
        )
        with np.errstate(all="ignore"):
            if run.table:
                nibbles = np.stack((codes >> 4, codes & 15), axis=-1).reshape(-1)[: run.count]
                decoded = np.array(run.table, np.float32)[nibbles]
            else:
                decoded = codes.view(numpy_dtype(run.dtype)).astype(np.float32)
            values = decoded * scales.astype(np.float32)[of_each]
            if run.dtype is DType.I8:
                values *= np.float32(1 / 127)
            out[:] = values.astype(out.dtype)
        if out.itemsize == 2:  # noqa: PLR2004  # every NaN of 16 bits is the same
            is_bf16 = out.dtype == numpy_dtype(DType.BF16)
            out.view(np.uint16)[np.isnan(values)] = BF16_NAN_BITS if is_bf16 else F16_NAN_BITS

    def dequantize_columns(
        self,
        codes: Array,
        groups: Array,
        scales: Array,
        biases: Array,
        out: Array,
        *,
        by_zero: bool,
    ) -> None:
        """Write the values of codes whose columns are in any groups, each rounded from float32.

        They are ``(code - bias) * scale`` if ``by_zero``, else ``code * scale + bias``. ``codes``:
        U8 ``[rows, columns at least]``; ``groups``: I32 ``[columns]``; ``scales``, ``biases``: F32
        ``[rows, groups]``; ``out``: flat, BF16, F16 or F32.
        """
        scale, bias = scales[:, groups], biases[:, groups]
        code = codes[:, : len(groups)].astype(np.float32)
        with np.errstate(all="ignore"):
            values = (code - bias) * scale if by_zero else code * scale + bias
            out[:] = values.reshape(-1).astype(out.dtype)

    def widen(self, words: Array, bits: int, used: int, wide: int, size: int) -> Array:
        """Return codes of ``bits``, from the lowest of each word up, with ``wide`` bits, 4 or 8.

        ``words``: U32 ``[rows, words]``, of whose bits the lower ``used`` hold codes, which lie in
        two words only if all do. Returns U32 ``[rows, size]``; codes that are missing are 0.
        """
        of_words = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, 4)
        lines = np.unpackbits(of_words, axis=-1, bitorder="little")[..., :used]
        count = size * 32 // wide
        codes = np.zeros((len(words), count * bits), np.uint8)
        flat = lines.reshape(len(words), -1)[:, : codes.shape[1]]
        codes[:, : flat.shape[1]] = flat
        codes = np.pad(codes.reshape(-1, count, bits), ((0, 0), (0, 0), (0, wide - bits)))
        return np.packbits(codes.reshape(len(words), -1), axis=1, bitorder="little").view(np.uint32)

    def turn(self, lines: Array, square: int) -> Array:
        """Return words of codes that lie with a matrix's inputs first as rows of its outputs.

        ``lines``: U32 ``[inputs, words]``. ``square`` is 1 if a word's codes are of one output,
        else 8: they are of as many, in AWQ's order. Returns U32 ``[words * square, inputs /
        square]``, rounded up; inputs that are missing are 0.
        """
        if square == 1:
            return lines.T.copy()
        codes = lines[..., None] >> (4 * AWQ_PLACES).astype(np.uint32) & np.uint32(15)
        padded = np.pad(codes, ((0, -len(lines) % square), (0, 0), (0, 0)))
        squares = padded.reshape(-1, square, *codes.shape[1:])
        shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None, None]
        words: Array = np.bitwise_or.reduce(squares << shifts, axis=1)
        return words.reshape(len(words), -1).T.copy()

    def compare(self, weights: Array, read: Array) -> Comparison:
        """Return the sums over two arrays of one size, each BF16, F16, F32 or F64."""
        with np.errstate(all="ignore"):
            weight, back = weights.astype(np.float64), read.astype(np.float64)
            error = back - weight
            return Comparison(
                _sum_of_lanes(error * error),
                _sum_of_lanes(weight * weight),
                _sum_of_lanes(back * back),
                _sum_of_lanes(weight * back),
                float(np.fmax.reduce(np.abs(error), initial=0)),
                beyond=0,
            )

    def compare_stored(
        self, weights: Array, parts: QuantizedArray[Array], global_scale: float
    ) -> Comparison:
        """Return the sums over weights (as `compare`) and the float32 values of whole groups."""
        read = np.empty(weights.size, np.float32)
        self.dequantize(parts, global_scale, read)
        beyond = _count_beyond(weights, parts, global_scale)
        return self.compare(weights, read)._replace(beyond=beyond)


def _importance(choice: ScaleChoice, shape: tuple[int, ...]) -> Array:
    if choice.importance is None or not choice.importance.size:
        return np.ones(shape, np.float32)  # a product with 1 has the same bits
    columns = (np.arange(shape[0] * shape[1]) + choice.first_column) % choice.importance.size
    return choice.importance[columns].reshape(shape)


def _quantize_affine(
    groups: Array, parts: QuantizedArray[Array], choice: ScaleChoice, importance: Array
) -> Array:
    levels = 2**parts.quant_type.bits - 1
    scale, bias = stored = _affine_of(groups, levels)
    if choice.method == "search":
        search = _AffineSearch(groups, importance, stored, levels, parts.scale.dtype)
        search.run(choice.candidates_for(parts.quant_type))
        (scale, bias), stored = search.code_by, search.stored
    # Stored values are rounded here; those of a search are rounded already.
    parts.scale[:], np.asarray(parts.bias)[:] = stored
    exact = (groups - bias[:, None]) / scale[:, None]
    return _whole(exact, levels).astype(np.uint32)


def _whole(values: Array, levels: int) -> Array:
    return np.rint(np.minimum(np.where(values > 0, values, 0), levels))


def _affine_of(groups: Array, levels: int) -> Pair:
    """Return MLX's scales and biases: the edge farther from zero is exact, and zero is a code."""
    low, high = groups[:, 0], groups[:, 0]
    for column in groups.T[1:]:  # not np.min: of 0 and -0 the first one stays, as in a loop
        low = np.where(column < low, column, low)
        high = np.where(column > high, column, high)
    step = np.maximum((high - low) / levels, 1e-7)
    low_is_edge = np.abs(low) > np.abs(high)
    edge = np.where(low_is_edge, low, high)
    step = np.where(low_is_edge, step, -step)
    steps = np.rint(edge / step)
    has_bias = steps != 0
    scale = np.where(has_bias, edge / np.where(has_bias, steps, 1), step)
    return scale, np.where(has_bias, edge, 0)


def _quantize_fp(
    groups: Array, parts: QuantizedArray[Array], choice: ScaleChoice, importance: Array
) -> Array:
    kind = parts.quant_type
    groups = groups * (1 / choice.global_scale)
    scales = scale_bits(np.abs(groups).max(axis=1) / largest(code_type(kind)), kind)
    if choice.method == "search":
        scales = _search_fp(groups, importance, scales, kind)
    parts.scale[:] = scales
    scale = decoded_scales(parts.scale, kind)[:, None]
    exact = np.where(scale == 0, 0, groups / scale)
    return rounded_bits(exact, code_type(kind))


def _first_non_finite(values: Array) -> int:
    with np.errstate(invalid="ignore"):  # a signalling NaN is expected here
        finite = np.isfinite(values)
    return -1 if finite.all() else int(np.argmin(finite))


def _pack(codes: Array, bits: int) -> Array:
    shifted = codes.astype(np.uint32).reshape(-1, 32 // bits) << _shifts(bits)
    return np.bitwise_or.reduce(shifted, axis=1)


def _unpack(words: Array, bits: int) -> Array:
    return ((words[:, None] >> _shifts(bits)) & np.uint32(2**bits - 1)).reshape(-1)


def _shifts(bits: int) -> Array:
    return np.arange(0, 32, bits, dtype=np.uint32)


@dataclass
class _AffineSearch:
    """Scales and biases: ``minmax`` before rounding, ``stored``, and ``code_by``, for the codes.

    ``groups`` and ``importance``: float32 ``[groups, group_size]``.
    """

    groups: Array
    importance: Array
    minmax: Pair
    levels: int
    dtype: Any

    def __post_init__(self) -> None:
        self.total_importance = _sum(self.importance)
        self.mean = self._sum(self.groups) / self.total_importance
        self.stored = self._round(np.array(self.minmax))
        self.code_by = self.minmax
        scale, bias = (part[:, None] for part in self.minmax)
        codes = _whole((self.groups - bias) / scale, self.levels)
        self.least = self._error(codes, self.stored) * _CLEARLY

    def run(self, candidates: AffineCandidates) -> None:
        self._attempt(self.stored)
        counts = self.importance > 0
        low = np.where(counts, self.groups, np.inf).min(axis=1)
        high = np.where(counts, self.groups, -np.inf).max(axis=1)
        span = high - low
        from_high = np.abs(high) < np.abs(low)
        for shift_by in candidates.shifts:
            least, best = np.full_like(low, np.inf), np.zeros((2, len(low)), np.float32)
            for factor in candidates.factors:
                scale = self._round(span / self.levels * factor)
                reach = scale * self.levels
                slack = span - reach
                shift = np.maximum(np.abs(slack), scale * 0.75) * shift_by
                bottom = (low + slack * 0.5) + shift
                candidate = (
                    np.where(from_high, -scale, scale),
                    self._round(np.where(from_high, bottom + reach, bottom)),
                )
                error = self._attempt(candidate)
                best = np.where(error < least, candidate, best)
                least = np.where(error < least, error, least)
            slope, mean_code = self._fit(best)
            scale = self._round(slope)
            self._attempt((scale, self._round(self.mean - scale * mean_code)))
        slope, mean_code = self._fit(self.stored)
        scale = self._round(slope)
        for up in (1, _BELOW, _ABOVE):
            near = self._round(scale * up)
            bias = self._round(self.mean - near * mean_code)
            self._attempt((near, bias))
            if candidates.neighbours:
                self._attempt((near, self._round(bias * _BELOW)))
                self._attempt((near, self._round(bias * _ABOVE)))

    def _attempt(self, candidate: Pair) -> Array:
        magnitude = np.abs(candidate[0])
        usable = (magnitude >= 2.0**-60) & (magnitude <= 2.0**60)
        error = np.where(usable, self._error(self._codes(candidate), candidate), np.inf)
        better = error < self.least
        self.least = np.where(better, error, self.least)
        self.stored = np.where(better, candidate, self.stored)
        self.code_by = np.where(better, candidate, self.code_by)
        return error

    def _fit(self, by: Pair) -> Pair:
        codes = self._codes(by)
        counted = _counted(codes, self.importance)
        total = _sum(counted)
        mean_code = total / self.total_importance
        spread = _sum(counted * codes) - total * mean_code
        return _sum(counted * (self.groups - self.mean[:, None])) / spread, mean_code

    def _codes(self, by: Pair) -> Array:
        inverse = 1 / by[0]
        return _whole((self.groups - by[1][:, None]) * inverse[:, None], self.levels)

    def _error(self, codes: Array, by: Pair) -> Array:
        difference = (codes * by[0][:, None] + by[1][:, None]) - self.groups
        return self._sum(difference * difference)

    def _sum(self, values: Array) -> Array:
        return _sum(_counted(values, self.importance))

    def _round(self, values: Array) -> Array:
        return values.astype(self.dtype).astype(np.float32)


def _search_fp(groups: Array, importance: Array, minmax: Array, quant_type: QuantType) -> Array:
    """Return the stored scales (U8) of float32 ``[groups, group_size]``, given those of minmax."""
    amax = np.where(importance > 0, np.abs(groups), 0).max(axis=1)
    nvfp4 = quant_type is QuantType.NVFP4
    code_format = code_type(quant_type)
    largest_code = largest(code_format)
    top = _nvfp4_top(amax) if nvfp4 else e8m0_bits_up(amax / largest_code).astype(np.int64)
    lowest = 1 if nvfp4 else np.maximum(top, 126) - 126
    unit = np.ones_like(amax) if nvfp4 else 1 / decoded_scales(top.astype(np.uint8), quant_type)
    magnitudes = np.abs(groups) * unit[:, None]

    # Whichever weight it is, its error alone is a bound.
    most = np.argmax(_counted(magnitudes * magnitudes, importance), axis=1)[:, None]
    peak, share = (
        np.take_along_axis(values, most, axis=1)[:, 0] for values in (magnitudes, importance)
    )

    def relative(codes: Array) -> Array:
        return decoded_scales(codes.astype(np.uint8), quant_type) if nvfp4 else _power(codes - top)

    def error_of(scale: Array) -> Array:
        inverse = np.where(scale == 0, 0, 1 / scale)
        rounded = rounded_magnitudes(magnitudes * inverse[:, None], code_format)
        difference = magnitudes - rounded * scale[:, None]
        return _sum(_counted(difference * difference, importance))

    best, least = minmax.astype(np.int64), error_of(relative(minmax.astype(np.int64))) * _CLEARLY
    is_open = least > 0
    code = top.copy()
    while True:
        scale = relative(code)
        lost = np.maximum(peak - scale * largest_code, 0)
        is_open = is_open & ((lost * lost) * share < least) & (code >= lowest)
        if not is_open.any():
            return best.astype(np.uint8)
        error = error_of(scale)
        better = is_open & (error < least)
        least, best = np.where(better, error, least), np.where(better, code, best)
        code = code - 1


def _nvfp4_top(amax: Array) -> Array:
    near = rounded_bits(amax / _E2M1_BEYOND, E4M3)
    needed = near + (decoded_scales(near, QuantType.NVFP4) * _E2M1_BEYOND < amax).astype(np.int64)
    return np.minimum(np.maximum(needed, 8) + 7, 0x7E)


def _power(exponents: Array) -> Array:
    return (np.clip(exponents + 127, 0, 254) << 23).astype(np.uint32).view(np.float32)


def _counted(values: Array, importance: Array) -> Array:
    # A column of importance 0 counts 0, even if its error is infinite.
    return np.where(importance > 0, importance * values, 0)


def _sum(values: Array) -> Array:
    """Return the sums of rows as columns.h adds: four interleaved parts."""
    parts = values.reshape(len(values), -1, 4)
    total = np.zeros((len(values), 4), np.float32)
    for index in range(parts.shape[1]):
        total = total + parts[:, index]
    return (total[:, 0] + total[:, 1]) + (total[:, 2] + total[:, 3])


def _sum_of_lanes(values: Array) -> float:
    """Return the sum as compare.h adds: value i to lane i % 8, in order; then the lanes."""
    lanes = np.zeros((-(-values.size // _LANES) + 1, _LANES))  # the first row: sums of nothing
    lanes.reshape(-1)[_LANES : _LANES + values.size] = values
    total = np.add.accumulate(lanes, axis=0)[-1]
    while total.size > 1:
        total = total[::2] + total[1::2]
    return float(total[0])


def _count_beyond(weights: Array, parts: QuantizedArray[Array], global_scale: float) -> int:
    """Return how many weights lie half a step or more beyond the codes of their group."""
    with np.errstate(all="ignore"):
        rows = weights.astype(np.float64).reshape(-1, parts.group_size)
        if parts.bias is not None:
            scale, bias = (part.astype(np.float64)[:, None] for part in (parts.scale, parts.bias))
            first = bias - _HALF_A_STEP * scale
            last = bias + (2**parts.quant_type.bits - _HALF_A_STEP) * scale
            # As std::min and std::max, whose first argument stays if one is NaN.
            low, high = np.where(last < first, last, first), np.where(first < last, last, first)
            beyond = ((rows <= low) | (rows >= high)) & (scale != 0)
        else:
            scale = decoded_scales(parts.scale, parts.quant_type).astype(np.float64)[:, None]
            limit = _BEYOND[parts.quant_type] * (scale * global_scale)
            beyond = (np.abs(rows) >= limit) & (rows != 0)
    return int(np.count_nonzero(beyond))
