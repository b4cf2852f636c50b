"""Weights of the sources of fixtures/ollama-records: named, shaped, seeded by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

HIDDEN, INTERMEDIATE, VOCABULARY, KEYS, HEAD, EXPERT = 256, 512, 2048, 128, 64, 128
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be made: its name, its shape, the mean and deviation of its values, its dtype."""

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    deviation: float = 0.02
    dtype: np.dtype[Any] = BF16

    def array(self) -> Array:
        """Return its values: normal, seeded by the name, rounded to its dtype."""
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        values = generator.standard_normal(self.shape, dtype=np.float32)
        return (values * self.deviation + self.mean).astype(self.dtype)


def norm(name: str, size: int = HIDDEN) -> Weight:
    """Return the weights of a norm: about 1."""
    return Weight(f"{name}.weight", (size,), mean=1.0, deviation=0.1)


def attention(layer: str, *, norms: bool = False, keys: int = KEYS) -> Iterator[Weight]:
    """Yield the projections of a layer's attention, and the norms of its queries and keys."""
    for projection, rows in (("q", HIDDEN), ("k", keys), ("v", keys), ("o", HIDDEN)):
        yield Weight(f"{layer}.self_attn.{projection}_proj.weight", (rows, HIDDEN))
    if norms:
        yield from (norm(f"{layer}.self_attn.{name}_norm", HEAD) for name in ("q", "k"))


def mlp(prefix: str, size: int, *experts: int) -> Iterator[Weight]:
    """Yield the projections of an MLP, or of a stack of them."""
    yield Weight(f"{prefix}.gate_proj.weight", (*experts, size, HIDDEN))
    yield Weight(f"{prefix}.up_proj.weight", (*experts, size, HIDDEN))
    yield Weight(f"{prefix}.down_proj.weight", (*experts, HIDDEN, size))
