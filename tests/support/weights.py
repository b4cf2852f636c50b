"""Weights that a quantizer is tried on: random ones of every kind, and the corners of the number formats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def random_weights(dtype: np.dtype[Any], *shape: int, seed: tuple[int, ...] = ()) -> Array:
    """Return finite weights: rows of scales 1e-6 to 1e3, every third row heavy-tailed and every third full of ties."""
    generator = np.random.default_rng((*shape, *seed))
    values = generator.standard_normal(shape, dtype=np.float32)
    values[1::3] **= 3
    values[2::3] = np.rint(values[2::3] * 8) / 16
    scales = 10.0 ** generator.uniform(-6, 3, (*shape[:-1], 1))
    scales[2::3] = 2.0 ** generator.integers(-20, 10, scales[2::3].shape)
    values *= scales.astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -limit, limit).astype(dtype)


def edge_weights(dtype: np.dtype[Any]) -> Array:
    """Return ``[rows, 128]`` weights, one row a corner of the number format or of the arithmetic."""
    info = ml_dtypes.finfo(dtype)
    largest, normal, subnormal = float(info.max), float(info.smallest_normal), float(info.smallest_subnormal)
    generator = np.random.default_rng(128)
    noise = generator.standard_normal(128)
    whole = generator.integers(-8, 9, 128)
    one_hot = np.eye(1, 128, 5)[0]
    alternating = np.where(np.arange(128) % 2, 1.0, -1.0)
    constants = [0.0, -0.0, 1.0, -1.0, 3.3, -3.3, 1e-7, -1e-7, largest, -largest, normal, -normal, subnormal, -subnormal]
    rows = [np.full(128, value) for value in constants]
    rows += [-np.abs(noise), np.abs(noise), -1 - np.abs(noise), 1 + np.abs(noise)]
    rows += [noise * 0.01 + one_hot * 50, noise * 0.01 - one_hot * 50, one_hot * largest, one_hot * -largest]
    rows += [alternating * largest, alternating * normal, alternating * 0.0, -alternating * 0.0, noise * normal]
    rows += [noise * 0.2 * largest]
    rows += [whole * subnormal, whole * normal, whole / 2, whole / 4, whole * 1.0, whole * 2.0**-13]
    rows += [noise * 1e-7, noise * 1e-9, noise * 1e-6 + 1, noise * 1e-6 - 1, generator.integers(-127, 129, 128) * 1.0]
    rows += [np.where(noise < 0, -0.0, noise), np.where(noise > 0, 0.0, noise)]
    return np.clip(np.array(rows), -largest, largest).astype(dtype)
