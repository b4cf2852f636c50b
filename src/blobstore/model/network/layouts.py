"""Layouts: the names and shapes under which stored tensors are offered to mlx-lm, and what is checked of them first.

mlx-lm's ``sanitize`` knows the layout of an architecture's published checkpoints. An import may
have stacked numbered experts, or transposed a weight so that its groups run along the inputs; a
layout takes that back, as expressions.

mlx-lm makes a Python object for each layer that config.json counts, before it sees a weight: of a
billion layers it would fill all memory. So the counts of config.json are checked against the
tensors first.

Some weights ``sanitize`` multiplies, row by row: Falcon-H1 folds multipliers into most of its
weights (mlx_lm 0.32.2 models/falcon_h1.py `sanitize`). It is run on probes instead of weights;
where it is a product with one number a row, that number is read off, so that affine codes can keep
their place under other scales. Double-scaled nvfp4 has a forward pass of its own in mlx-lm's
modules: MLX multiplies by no global scale on a CPU (0.32.4), so the products are multiplied here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.model.network.expressions import (
    Array,
    Expression,
    Joined,
    Stored,
    leaves,
    reshaped,
    row_range,
    transposed,
)
from blobstore.store.stored import StoredTensor

_PROBES = ((1, 0.0), (7, 1.0))
"""Period and step of each probe's values: all ones, and 1 to 7 again and again."""
_SAME = 1e-5
"""Of float32 products, relative."""


def row_factors(
    make_network: Callable[[], Any], stand_ins: Mapping[str, Any], weights: Mapping[str, str]
) -> dict[str, Array]:
    """Return, by parameter, the float32 factor of each row, for those parameters that are products of one weight.

    ``weights``: by parameter, the name of the only tensor that it is computed from. ``stand_ins``:
    all tensors. Other parameters are left out: their values are not such a product, or their shape
    is not that of the tensor.
    """
    import mlx.core as mx

    if not weights:
        return {}
    probes = [_probed(make_network, stand_ins, weights.values(), *probe, mx) for probe in _PROBES]
    found: dict[str, Array] = {}
    for parameter, tensor in weights.items():
        shape = stand_ins[tensor].shape
        ones, ramp = (np.array(made[parameter].astype(mx.float32)) for made in probes)
        factors = ones.reshape(-1, ones.shape[-1])[:, :1]
        wanted = _probe(shape, *_PROBES[1]) * ones if ones.shape == shape else None
        if (
            wanted is not None
            and _is_same(ramp, wanted)
            and _is_same(ones.reshape(-1, shape[-1]), factors)
        ):
            found[parameter] = factors[:, 0].reshape(shape[:-1])
    return found


def _probed(
    make_network: Callable[[], Any],
    stand_ins: Mapping[str, Any],
    tensors: Iterable[str],
    period: int,
    step: float,
    mx: Any,
) -> Mapping[str, Any]:
    lazily = {name: _lazy_probe(stand_ins[name].shape, period, step, mx) for name in tensors}
    made: Mapping[str, Any] = make_network().sanitize({**stand_ins, **lazily})
    return made


def _lazy_probe(shape: tuple[int, ...], period: int, step: float, mx: Any) -> Any:
    """Return the probe as an array that MLX makes when a product of it is evaluated."""
    row = mx.arange(shape[-1]) % period
    return mx.broadcast_to(1.0 + step * row.astype(mx.float32), shape)


def _probe(shape: tuple[int, ...], period: int, step: float) -> Array:
    return np.broadcast_to(1.0 + step * (np.arange(shape[-1]) % period).astype(np.float32), shape)


def _is_same(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=_SAME, atol=0))


_STACK = re.compile(r"(?P<group>.+\.experts)\.(?P<projection>[^.]+\.weight)", re.DOTALL)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor that is stored or planned: ``shape`` before packing, ``dtype`` of its values.

    ``transposed``: its last two dimensions are swapped against the source's. ``global_scale``: its
    codes have one.
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


def layouts(
    tensors: Iterable[LogicalTensor], source_names: Container[str] | None
) -> Iterator[list[Offered]]:
    """Yield the layouts to try: the source's, then those with ``.weight`` after the names of quantized tensors.

    ``source_names``: the names of the source's tensors, where they are known; otherwise a stack
    called ``….experts.PROJECTION.weight`` is taken for numbered experts first, and then as it is.
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
        yield Offered(
            name, reshaped(row_range(whole, number, number + 1), whole.shape[1:]), tensor.dtype
        )


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
    """Return the names of the experts that a stack was made of.

    None when it was not made of any.
    """
    match = _STACK.fullmatch(tensor.name)
    if match is None or len(tensor.shape) < 3 or not tensor.shape[0]:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [
        f"{match['group']}.{number}.{match['projection']}" for number in range(tensor.shape[0])
    ]
    if source_names is not None and (tensor.name in source_names or names[0] not in source_names):
        return []
    return names


def takes_global_scale(
    module: Any, expression: Expression, sources: Sequence[LogicalTensor]
) -> bool:
    """Return True when the module can multiply by the global scales of all ``sources``: one, or one an expert."""
    from mlx import nn
    from mlx_lm.models.switch_layers import SwitchLinear

    if not all(source.global_scale for source in sources):
        return False
    if type(module) is nn.Linear:
        return len(set(leaves(expression))) == 1
    return type(module) is SwitchLinear and list(_experts(expression)) != []


def _experts(expression: Expression) -> Iterator[tuple[str, int]]:
    """Yield the stored tensor of each run of experts, and how many they are.

    Nothing when an expert has several.
    """
    parts = (
        expression.parts
        if isinstance(expression, Joined) and expression.axis == 0
        else (expression,)
    )
    found = [(set(leaves(part)), part.shape[0]) for part in parts]
    if all(len(names) == 1 for names, _ in found):
        yield from ((names.pop(), count) for names, count in found)


def global_scales_of(expression: Expression) -> list[tuple[str, int]]:
    """Return the tensors whose global scales a stack of experts has, in order, and for how many experts each."""
    return list(_experts(expression))


def honour_global_scale(module: Any, scale: Any) -> None:
    """Let a quantized module multiply by ``scale``, one F32 or one an expert.

    It is computed in float32, because products without the global scale may be beyond what float16
    holds.
    """
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    class ScaledLinear(nn.QuantizedLinear):  # type: ignore[misc]  # mlx has no types
        def __call__(self, x: Any) -> Any:
            return super().__call__(x.astype(mx.float32) * self.global_scale).astype(x.dtype)

    class ScaledSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]  # as above
        def __call__(self, x: Any, indices: Any, sorted_indices: bool = False) -> Any:  # noqa: FBT001, FBT002  # mlx-lm's
            options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
            arrays = (x.astype(mx.float32), self.weight, self.scales)
            products = mx.gather_qmm(
                *arrays, rhs_indices=indices, sorted_indices=sorted_indices, **options
            )
            products = products * self.global_scale[indices][..., None, None]
            return (
                products + self.bias[indices][..., None, :] if "bias" in self else products
            ).astype(x.dtype)

    is_switch = type(module) is QuantizedSwitchLinear
    module.global_scale = scale.reshape(-1) if is_switch else scale
    module.__class__ = (
        ScaledSwitchLinear if is_switch else ScaledLinear
    )  # a new module would quantize random weights first


_FEW = 1000
"""So many of anything are made at once, whatever the tensors are."""
_LAYERS = re.compile(r"(?:[a-z]+_)*(?:n|num)_(?:[a-z]+_)*(?:layers?|loops|inputs)", re.ASCII)
_OTHERS = re.compile(
    r"[a-z_]*(?:experts|heads?|window_pattern|_neighbor_num|_split_num|sinkhorn_iters)", re.ASCII
)


def check_counts(config: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise UnsupportedSourceError when config.json counts more than tensors of those shapes can be.

    Each layer has a tensor of its own; experts may be stacked, but a router has a row for each, and
    each head has rows.
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
