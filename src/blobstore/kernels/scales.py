"""How the scales of a quantized array are chosen: the method, and what it is given.

``minmax`` takes them from each group's extremes, as MLX does. ``search`` tries candidates and keeps the one with the
least squared error (docs/quantization.md, "search").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from blobstore.errors import UsageError
from blobstore.kernels.arguments import array_of
from blobstore.quant import QuantType

METHODS = ("minmax", "search")
_SEARCHED_NVFP4 = 3.5 * 448
"""Scales up to 1 / 3.5 of a group's largest magnitude are tried (search_fp.h), and 448 is the largest scale."""

Array = np.ndarray[Any, Any]


def check_method(method: object) -> str:
    """Return ``method`` when it is a quantization method. Raises: UsageError otherwise."""
    if not isinstance(method, str) or method not in METHODS:
        raise UsageError(f"unknown quantization method {method!r}", hint=f"Use one of: {', '.join(METHODS)}.")
    return method


@dataclass(frozen=True, slots=True)
class AffineCandidates:
    """The scales and biases that ``search`` tries for int4 and int8.

    ``factors`` of the group's range over the levels are the scales; for each of ``shifts`` the codes' range is moved
    against the group's, by that part of what they differ by (at least 0.75 scales). The best scale of each shift is
    fitted once. ``neighbours``: the stored biases next to the best ones are tried too.
    """

    factors: tuple[float, ...]
    shifts: tuple[float, ...] = (-0.5, -0.25, 0.0, 0.25, 0.5)
    neighbours: bool = True

    @property
    def evaluations(self) -> int:
        """How often a group's codes are computed."""
        return 1 + len(self.shifts) * (len(self.factors) + 2) + 1 + 3 * (3 if self.neighbours else 1)


# Few levels are worth more when the range is cut; many lose nothing when it is a little too wide, and each stored scale
# that is tried rounds differently.
_CANDIDATES = {
    QuantType.INT4: AffineCandidates((0.80, 0.852, 0.904, 0.956, 1.008, 1.06)),
    QuantType.INT8: AffineCandidates((1.0, 1.006, 1.012, 1.018, 1.024, 1.03)),
}


@dataclass(frozen=True, slots=True, eq=False)
class ScaleChoice:
    """How scales are chosen for a run of weights; the default is plain ``minmax``.

    ``importance``: float32 ``[cols]``, what each column's squared error counts in ``search``; None for all the same.
    ``first_column``: the column of the run's first weight. ``global_scale``: a power of two that the weights of a
    double-scaled nvfp4 tensor are divided by first.
    """

    method: str = "minmax"
    importance: Array | None = None
    first_column: int = 0
    global_scale: float = 1.0
    candidates: AffineCandidates | None = None

    def candidates_for(self, quant_type: QuantType) -> AffineCandidates:
        """Return the candidates of a search: those given, else the type's."""
        return self.candidates or _CANDIDATES.get(quant_type) or AffineCandidates(())


def checked_importance(importance: Any, cols: int | None, what: str = "importance") -> Array:
    """Return importance as a new float32 ``[cols]`` whose largest value is between 1 and 2: only ratios count.

    Where all columns count the same, each is 1, and a search finds what it finds without importance.

    Raises: UsageError when it is not a vector of ``cols`` (None: any number of) finite numbers >= 0.
    """
    values = array_of(importance, what)
    if values.ndim != 1 or not (values.dtype.kind in "fiu" or values.dtype == ml_dtypes.bfloat16):
        raise UsageError(f"{what} is {values.dtype} of shape {list(values.shape)}, not a vector of floats")
    if cols is not None and values.size != cols:
        raise UsageError(f"{what} has {values.size:,} values for {cols:,} columns")
    values = values.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        column = int(np.argmin(np.isfinite(values) & (values >= 0)))
        raise UsageError(f"{what} of column {column} is {values[column]}: it must be finite and at least 0")
    largest = float(values.max(initial=0))
    if largest and values.min() == largest:
        return np.ones(values.size, np.float32)
    scaled: Array = np.ldexp(values, 1 - math.frexp(largest)[1]).astype(np.float32)
    return scaled


def global_scale_of(amax: float) -> float:
    """Return the global scale of an nvfp4 tensor whose largest magnitude is ``amax``: a power of two.

    The smallest with which all scales that are tried fit E4M3, so that as few as can be are subnormal. As a power of two it
    changes no rounding: where all scales that are tried for a group are normal without it, its values are the same with it.
    """
    if not 0 < amax < math.inf:
        return 1.0
    fraction, exponent = math.frexp(amax / _SEARCHED_NVFP4)
    return math.ldexp(1.0, max(-126, exponent - 1 if fraction == 0.5 else exponent))  # noqa: PLR2004  # a power of two itself


def largest_magnitude(array: Array) -> float:
    """Return the largest magnitude of a contiguous BF16, F16 or F32 array, infinity when any value is not finite."""
    unsigned = array.view(f"u{array.dtype.itemsize}")
    bits = (unsigned & unsigned.dtype.type(2 ** (8 * array.dtype.itemsize - 1) - 1)).max(initial=0)
    amax = float(np.asarray(bits, unsigned.dtype).reshape(1).view(array.dtype)[0])
    return amax if math.isfinite(amax) else math.inf
