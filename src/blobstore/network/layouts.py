"""Layouts: the names and shapes under which stored tensors are offered to mlx-lm. Pure.

mlx-lm's ``sanitize`` knows the layout of an architecture's published checkpoints. An import may have stacked numbered
experts, or transposed a weight so that its groups run along the inputs; a layout takes that back, as expressions.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from blobstore.dtypes import DType
from blobstore.errors import UsageError
from blobstore.network.expressions import Expression, Stored, reshaped, row_range, transposed
from blobstore.quant import Quantization
from blobstore.stored import StoredTensor

_STACK = re.compile(r"(?P<group>.+\.experts)\.(?P<projection>[^.]+\.weight)", re.DOTALL)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor that is stored or planned: ``shape`` before packing, ``dtype`` of its values.

    ``transposed``: its last two dimensions are swapped against the source's. ``global_scale``: its codes have one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    quantization: Quantization | None = None
    transposed: bool = False
    global_scale: bool = False

    @classmethod
    def of(cls, stored: StoredTensor, float_dtype: DType) -> Self:
        """Return a stored tensor's facts; ``float_dtype`` is that of values whose codes do not tell theirs."""
        return cls(
            stored.name,
            stored.shape,
            stored.value_dtype or float_dtype,
            stored.quantization,
            stored.transposed,
            ".global_scale" in stored.entries,
        )


@dataclass(frozen=True, slots=True)
class Offered:
    """One tensor of a layout: its name there, what it is of the stored ones, and the dtype of its values."""

    name: str
    expression: Expression
    dtype: DType


def float_dtype(config: Mapping[str, Any]) -> DType:
    """Return the dtype that config.json names for weights; BF16 where it names none that quantized weights had."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            try:
                return DType.parse_float(str(section.get(key)))
            except UsageError:
                continue
    return DType.BF16


def layouts(tensors: Iterable[LogicalTensor], source_names: Container[str] | None) -> Iterator[list[Offered]]:
    """Yield the layouts to try: the source's, then those with ``.weight`` after the names of quantized tensors.

    ``source_names``: the names of the source's tensors, where they are known; otherwise a stack called
    ``….experts.PROJECTION.weight`` is taken for numbered experts first, and then as it is.
    """
    stored = list(tensors)
    yield [offered for one in stored for offered in _as_in_source(one, source_names)]
    yield [offered for one in stored for offered in _renamed(one, source_names)]
    yield [_whole(one, _weight_name(one)) for one in stored]


def _as_in_source(tensor: LogicalTensor, source_names: Container[str] | None) -> Iterator[Offered]:
    whole: Expression = Stored(tensor.name, tensor.shape)
    if tensor.transposed:
        rank = len(tensor.shape)
        whole = transposed(whole, (*range(rank - 2), rank - 1, rank - 2))
    experts = _expert_names(tensor, source_names)
    if not experts:
        yield Offered(tensor.name, whole, tensor.dtype)
    for number, name in enumerate(experts):
        yield Offered(name, reshaped(row_range(whole, number, number + 1), whole.shape[1:]), tensor.dtype)


def _renamed(tensor: LogicalTensor, source_names: Container[str] | None) -> Iterator[Offered]:
    if tensor.quantization is None or tensor.name.endswith(_WEIGHT):
        yield from _as_in_source(tensor, source_names)
    else:
        yield _whole(tensor, _weight_name(tensor))


def _whole(tensor: LogicalTensor, name: str) -> Offered:
    return Offered(name, Stored(tensor.name, tensor.shape), tensor.dtype)


def _weight_name(tensor: LogicalTensor) -> str:
    is_bare = tensor.quantization is not None and not tensor.name.endswith(_WEIGHT)
    return f"{tensor.name}{_WEIGHT}" if is_bare else tensor.name


def _expert_names(tensor: LogicalTensor, source_names: Container[str] | None) -> list[str]:
    """Return the names of the experts that a stack was made of; none when it was not made of any."""
    match = _STACK.fullmatch(tensor.name)
    if match is None or len(tensor.shape) < 3 or not tensor.shape[0]:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{match['group']}.{number}.{match['projection']}" for number in range(tensor.shape[0])]
    if source_names is not None and (tensor.name in source_names or names[0] not in source_names):
        return []
    return names
