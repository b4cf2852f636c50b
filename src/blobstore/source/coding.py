"""Coding: how another program stored the values of a weight, and how they are decoded.

A coding is a value that says where the bytes of any values lie in the weight's tensors; it reads
nothing itself. integers.py has those of integer codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.kernels.arrays import Array, QuantizedArray


class Region(NamedTuple):
    """Bytes ``begin`` to ``end`` of each of some lines of a tensor, by its suffix.

    A line has ``line`` bytes; ``first`` and ``stop`` are the lines' numbers.
    """

    suffix: str
    line: int
    first: int
    stop: int
    begin: int
    end: int

    @classmethod
    def span(cls, suffix: str, begin: int, end: int) -> Region:
        """Return consecutive bytes."""
        return cls(suffix, 0, 0, 1, begin, end)

    @classmethod
    def lines(cls, suffix: str, line: int, first: int, stop: int) -> Region:
        """Return whole lines."""
        return cls.span(suffix, first * line, stop * line)

    @property
    def needs(self) -> tuple[int, int]:
        """The bytes that are read, or lie between: whole lines."""
        if not self.line:
            return self.begin, self.end
        return self.first * self.line, self.stop * self.line


ReadRegion = Callable[[Region], Array]
"""Returns a region's bytes as U8 ``[lines, end - begin]``."""


class CodingError(ValueError):
    """What a weight's tensors hold is outside of its coding; `SourceReaders` adds the name."""


class Coding(ABC):
    """A frozen dataclass: its text tells it from every other coding (writing.py).

    Indexes are flat, in the values of all matrices ``[rows, cols]`` of the weight. ``stated``: the
    suffixes of tensors that `states` checks, if the weight has them, before any value is read.
    """

    stated: ClassVar[tuple[str, ...]] = ()

    @property
    def by_columns(self) -> bool:
        """True if the values of a row lie far apart, each beside those of the next rows."""
        return False

    @property
    def is_quantized(self) -> bool:
        """False if the values are all those of a float type."""
        return True

    @property
    def becomes(self) -> QuantType | None:
        """The type that matrices get if none is asked for; None if they keep codes or floats."""
        return None

    @property
    def quantization(self) -> Quantization | None:
        """The type and groups of ours that hold these codes as they are; None without any."""
        return None

    @property
    def rounding(self) -> float:
        """The largest difference that rounded biases make to kept codes' values.

        It is counted in steps between two codes.
        """
        return 0.0

    @abstractmethod
    def needs(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield what values are made from: a tensor's suffix, and from where to where in bytes."""

    @abstractmethod
    def values(self, read: ReadRegion, start: int, count: int, dtype: DType) -> Array:
        """Return ``count`` values from flat index ``start`` on, in float32, rounded once.

        If `quantization` is not None, they are whole groups of it.
        """

    def quantized(self, read: ReadRegion, start: int, count: int) -> QuantizedArray[Array]:
        """Return the same as codes, scales and biases of `quantization`, whole groups of it."""
        raise AssertionError(f"no groups of ours fit {read}, {start}, {count}")

    def states(self, suffix: str, said: Array, shape: tuple[int, ...]) -> bool:
        """Return True unless what a tensor of the weight states contradicts the coding."""
        raise AssertionError(f"no tensor {suffix} states {said} of {shape}")
