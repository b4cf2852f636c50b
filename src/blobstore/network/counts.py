"""Counts: what config.json says of how many layers and experts there are, against the tensors of the model. Pure.

mlx-lm makes a Python object for each layer that config.json counts, before it sees a weight: of a billion layers it would
fill all memory. So counts are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blobstore.errors import UnsupportedSourceError, quoted

_FEW = 1000
"""So many of anything are made at once, whatever the tensors are."""
_LAYERS = re.compile(r"(?:[a-z]+_)*(?:n|num)_(?:[a-z]+_)*(?:layers?|loops|inputs)", re.ASCII)
_OTHERS = re.compile(r"[a-z_]*(?:experts|heads?|window_pattern|_neighbor_num|_split_num|sinkhorn_iters)", re.ASCII)


def check_counts(config: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise UnsupportedSourceError when config.json counts more than tensors of those shapes can be.

    Each layer has a tensor of its own; experts may be stacked, but a router has a row for each, and each head has rows.
    """
    given = list(shapes)
    layers = max(_FEW, len(given))
    others = max([layers, *(size for shape in given for size in shape)])
    for key, value in _numbers(config):
        most = layers if _LAYERS.fullmatch(key) else others if _OTHERS.fullmatch(key) else value
        if value > most:
            message = f"config.json: {quoted(key)} is {quoted(value)}, too many for {len(given):,} tensors"
            raise UnsupportedSourceError(message)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a config and of the sections in it, with their keys."""
    if type(value) is int:
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, name)
