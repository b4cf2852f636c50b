"""The search in NumPy: the candidates, sums and comparisons of search_affine.h and search_fp.h, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blobstore.formats.quant import QuantType
from blobstore.kernels.scales import (
    AffineCandidates,
    code_max,
    decoded_scales,
    e4m3_bits,
    e8m0_bits_up,
    rounded_magnitudes,
)

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]

_CLEARLY = np.float32(1 - 2.0**-14)
_BELOW, _ABOVE = np.float32(0.9945), np.float32(1.0055)
_INFINITY = np.float32(np.inf)
_E2M1_BEYOND = np.float32(7)


def search_affine(
    groups: Array,
    importance: Array | None,
    minmax: Pair,
    levels: np.float32,
    candidates: AffineCandidates,
    dtype: Any,
) -> tuple[Array, Array, Array, Array]:
    """Return per group what its weights are coded by (scale, bias), and what is stored (scale, bias), all float32.

    ``groups``: float32 ``[groups, group_size]``; ``importance`` alike, or None; ``minmax``: scale
    and bias before rounding.
    """
    search = _AffineSearch(groups, importance, minmax, levels, dtype)
    search.run(candidates)
    return (*search.code_by, *search.stored)


@dataclass
class _AffineSearch:
    groups: Array
    importance: Array | None
    minmax: Pair
    levels: np.float32
    dtype: Any
    stored: Pair = field(init=False)
    code_by: Pair = field(init=False)
    least: Array = field(init=False)
    mean: Array = field(init=False)
    total_importance: Array = field(init=False)

    def __post_init__(self) -> None:
        ones = np.full(len(self.groups), self.groups.shape[1], np.float32)
        self.total_importance = ones if self.importance is None else _sum(self.importance)
        self.mean = _sum(self._counted(self.groups)) / self.total_importance
        self.stored = (self._rounded(self.minmax[0]), self._rounded(self.minmax[1]))
        self.code_by = self.minmax
        scale, bias = (part[:, None] for part in self.minmax)
        codes = self._clamped_to_whole((self.groups - bias) / scale)
        self.least = self._error(codes, self.stored) * _CLEARLY

    def run(self, candidates: AffineCandidates) -> None:
        """Try all candidates, in the order of search_affine.h."""
        self._attempt(self.stored)
        counts = (
            np.ones(self.groups.shape, bool) if self.importance is None else self.importance > 0
        )
        low = np.where(counts, self.groups, _INFINITY).min(axis=1)
        high = np.where(counts, self.groups, -_INFINITY).max(axis=1)
        span = high - low
        from_high = np.abs(high) < np.abs(low)
        for shift_by in np.array(candidates.shifts, np.float32):
            least, best = np.full(len(low), _INFINITY), (np.zeros_like(low), np.zeros_like(low))
            for factor in np.array(candidates.factors, np.float32):
                scale = self._rounded(span / self.levels * factor)
                reach = scale * self.levels
                slack = span - reach
                shift = np.maximum(np.abs(slack), scale * np.float32(0.75)) * shift_by
                bottom = (low + slack * np.float32(0.5)) + shift
                candidate = (
                    np.where(from_high, -scale, scale),
                    self._rounded(np.where(from_high, bottom + reach, bottom)),
                )
                error = self._attempt(candidate)
                best = _where(error < least, candidate, best)
                least = np.where(error < least, error, least)
            slope, mean_code = self._fit(best)
            scale = self._rounded(slope)
            self._attempt((scale, self._rounded(self.mean - scale * mean_code)))
        slope, mean_code = self._fit(self.stored)
        scale = self._rounded(slope)
        for up in (np.float32(1), _BELOW, _ABOVE):
            near = self._rounded(scale * up)
            bias = self._rounded(self.mean - near * mean_code)
            self._attempt((near, bias))
            if candidates.neighbours:
                self._attempt((near, self._rounded(bias * _BELOW)))
                self._attempt((near, self._rounded(bias * _ABOVE)))

    def _attempt(self, candidate: Pair) -> Array:
        magnitude = np.abs(candidate[0])
        usable = (magnitude >= np.float32(2.0**-60)) & (magnitude <= np.float32(2.0**60))
        error = np.where(usable, self._error(self._codes(candidate), candidate), _INFINITY)
        better = error < self.least
        self.least = np.where(better, error, self.least)
        self.stored = _where(better, candidate, self.stored)
        self.code_by = _where(better, candidate, self.code_by)
        return error

    def _fit(self, by: Pair) -> Pair:
        codes = self._codes(by)
        counted = self._counted(codes)
        total = _sum(counted)
        mean_code = total / self.total_importance
        spread = _sum(counted * codes) - total * mean_code
        return _sum(counted * (self.groups - self.mean[:, None])) / spread, mean_code

    def _codes(self, by: Pair) -> Array:
        inverse = np.float32(1) / by[0]
        return self._clamped_to_whole((self.groups - by[1][:, None]) * inverse[:, None])

    def _clamped_to_whole(self, values: Array) -> Array:
        return np.rint(np.minimum(np.where(values > 0, values, np.float32(0)), self.levels))

    def _error(self, codes: Array, by: Pair) -> Array:
        difference = (codes * by[0][:, None] + by[1][:, None]) - self.groups
        return _sum(self._counted(difference * difference))

    def _counted(self, values: Array) -> Array:
        return _counted(values, self.importance)

    def _rounded(self, values: Array) -> Array:
        rounded: Array = values.astype(self.dtype).astype(np.float32)
        return rounded


def search_fp(
    groups: Array, importance: Array | None, minmax: Array, quant_type: QuantType
) -> Array:
    """Return the stored scales (U8) of float32 ``[groups, group_size]``; ``minmax`` are those that minmax gives."""
    counts = np.ones(groups.shape, bool) if importance is None else importance > 0
    amax = np.where(counts, np.abs(groups), np.float32(0)).max(axis=1)
    nvfp4 = quant_type is QuantType.NVFP4
    top = _nvfp4_top(amax) if nvfp4 else e8m0_bits_up(amax / code_max(quant_type)).astype(np.int64)
    lowest = 1 if nvfp4 else np.maximum(top, 126) - 126
    unit = (
        np.float32(1) if nvfp4 else np.float32(1) / decoded_scales(top.astype(np.uint8), quant_type)
    )

    peak, share = amax * unit, np.ones(len(groups), np.float32)
    if importance is not None:
        magnitudes = np.abs(groups) * np.reshape(unit, (-1, 1))
        most = np.argmax(_counted(magnitudes * magnitudes, importance), axis=1)[:, None]
        peak, share = (
            np.take_along_axis(values, most, axis=1)[:, 0] for values in (magnitudes, importance)
        )

    def relative(codes: Array) -> Array:
        return decoded_scales(codes.astype(np.uint8), quant_type) if nvfp4 else _power(codes - top)

    def error_of(scale: Array) -> Array:
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        weights = np.abs(groups) * np.reshape(unit, (-1, 1))
        difference = (
            weights - rounded_magnitudes(weights * inverse[:, None], quant_type) * scale[:, None]
        )
        return _sum(_counted(difference * difference, importance))

    found, least = minmax.astype(np.int64), error_of(relative(minmax.astype(np.int64))) * _CLEARLY
    is_open = least > 0
    code = top.copy()
    while True:
        scale = relative(code)
        lost = np.maximum(peak - scale * code_max(quant_type), np.float32(0))
        is_open = is_open & ((lost * lost) * share < least) & (code >= lowest)
        if not is_open.any():
            return found.astype(np.uint8)
        error = error_of(scale)
        better = is_open & (error < least)
        least, found = np.where(better, error, least), np.where(better, code, found)
        code = code - 1


def _nvfp4_top(amax: Array) -> Array:
    near = e4m3_bits(amax / _E2M1_BEYOND)
    needed = near + (decoded_scales(near, QuantType.NVFP4) * _E2M1_BEYOND < amax).astype(np.int64)
    top: Array = np.minimum(np.maximum(needed, 8) + 7, 0x7E)
    return top


def _power(exponents: Array) -> Array:
    """Return powers of two as float32, at most 2^127."""
    powers: Array = (np.clip(exponents + 127, 0, 254) << 23).astype(np.uint32).view(np.float32)
    return powers


def _where(mask: Array, yes: Pair, no: Pair) -> Pair:
    return np.where(mask, yes[0], no[0]), np.where(mask, yes[1], no[1])


def _counted(values: Array, importance: Array | None) -> Array:
    # Of a column of importance 0 nothing counts, not even an infinite error.
    return (
        values
        if importance is None
        else np.where(importance > 0, importance * values, np.float32(0))
    )


def _sum(values: Array) -> Array:
    """Return the sums of rows as columns.h adds: four interleaved parts."""
    parts = values.reshape(len(values), -1, 4)
    total = np.zeros((len(values), 4), np.float32)
    for index in range(parts.shape[1]):
        total = total + parts[:, index]
    result: Array = (total[:, 0] + total[:, 1]) + (total[:, 2] + total[:, 3])
    return result
