"""Network: a stored model as mlx-lm's network.

``sanitize`` of mlx-lm is traced, not fed with codes: what it does to the tensors of a published
checkpoint is known as expressions (tracing.py), and the same moves are made with codes and scales
wherever every group stays together (planning.py).

Building: mlx-lm's network with the weights of an open model.

Arrays: what a network's parameters are stored as, and their values from the maps of an open model.

A parameter with codes is several arrays (``….weight``, ``….scales``, ``….biases``); one with values
is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.dtypes import DType, fits_mlx
from blobstore.kernels.arrays import QuantizedArray, numpy_dtype
from blobstore.model.network.expressions import (
    Array,
    Computed,
    Expression,
    Stored,
    evaluate,
    fill,
    in_units,
    leaves,
)
from blobstore.model.network.layouts import LogicalTensor, global_scales_of, honour_global_scale
from blobstore.model.network.planning import (
    NetworkPlan,
    Parameter,
    mlx_dtype,
    mlx_lm_errors,
    stand_in,
)
from blobstore.model.tensors import Tensor

_WORD_BITS = 32
_SUFFIXES = {"": ".weight", ".scale": ".scales", ".bias": ".biases"}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedArray:
    """One array of a network: its name for mlx-lm, its dtype, and the expression that it is.

    ``suffix``: which stored array of each tensor the expression moves; None for values. ``tensor``:
    one of the tensors. ``factors``: what each row of the array is multiplied by, in float32.
    """

    name: str
    dtype: DType
    expression: Expression
    suffix: str | None
    tensor: str
    factors: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.expression.shape


def planned_arrays(plan: NetworkPlan) -> Iterator[PlannedArray]:
    """Yield the arrays of all parameters, but for global scales and what is `Computed`.

    Raises: UnsupportedSourceError when MLX has no such dtype.
    """
    for parameter in plan.parameters:
        if isinstance(parameter.expression, Computed):
            continue
        for array in _arrays_of(parameter, plan.tensors):
            if not fits_mlx(array.dtype, array.shape):
                message = f"MLX has no {array.dtype} arrays of shape {list(array.shape)}: {quoted(array.tensor)}"
                raise UnsupportedSourceError(message, tensor=array.tensor)
            yield array


def check_arrays(plan: NetworkPlan) -> None:
    """Raise UnsupportedSourceError when MLX has no such array as one of a network's."""
    for _ in planned_arrays(plan):
        pass


def _arrays_of(
    parameter: Parameter, tensors: Mapping[str, LogicalTensor]
) -> Iterator[PlannedArray]:
    expression, quantization = parameter.expression, parameter.quantization
    first = tensors[next(leaves(expression))]
    if quantization is None:
        yield PlannedArray(parameter.name, first.dtype, expression, None, first.name)
        return
    for part in quantization.parts(expression.shape, first.dtype):
        unit = (
            quantization.group_size if part.suffix else _WORD_BITS // quantization.quant_type.bits
        )
        moved = in_units(expression, quantization.group_size, unit)
        if moved is None:
            raise AssertionError(
                f"{parameter.name}: planned with codes whose groups do not stay together"
            )
        name, factors = (
            parameter.module + _SUFFIXES[part.suffix],
            parameter.factors if part.suffix else None,
        )
        yield PlannedArray(name, part.dtype, moved, part.suffix, first.name, factors)


class OpenTensors:
    """The arrays of an open model's tensors, by name: views of its maps, or values."""

    def __init__(self, tensors: Mapping[str, Tensor], facts: Mapping[str, LogicalTensor]) -> None:
        self._tensors = tensors
        self._facts = facts

    def source(self, suffix: str | None) -> Callable[[str], Array]:
        """Return what gives the stored arrays of that suffix by their tensors' names, or, for None, values."""
        return (
            self.values
            if suffix is None
            else lambda name: _part(self._tensors[name].numpy(), suffix)
        )

    def values(self, name: str) -> Array:
        """Return a tensor's values: a view, or dequantized to the dtype that its facts have."""
        tensor, fact = self._tensors[name], self._facts[name]
        array = tensor.numpy()
        if isinstance(array, QuantizedArray) or tensor.dtype is not fact.dtype:
            return tensor.dequantize(fact.dtype)
        return array

    def made(self, array: PlannedArray) -> Array:
        """Return an array of a network in new memory."""
        out = np.empty(array.shape, numpy_dtype(array.dtype))
        self.fill(out, array)
        return out

    def fill(self, out: Array, array: PlannedArray) -> None:
        """Write an array of a network into ``out``, contiguous and of its dtype."""
        fill(out, array.expression, self.source(array.suffix))
        if array.factors is not None:
            out[...] = out.astype(np.float32) * array.factors[..., None]

    def mlx(self, array: PlannedArray) -> Any:
        """Return an array of a network for MLX: as `Tensor.mlx` gives it where it is stored so, else in MLX's memory."""
        expression, tensor = array.expression, self._tensors[array.tensor]
        is_stored = (
            isinstance(expression, Stored)
            and array.factors is None
            and (array.suffix is not None or tensor.dtype is array.dtype)
        )
        if is_stored:
            return _part(tensor.mlx(), array.suffix or "")
        return mlx_array(array, self)

    def global_scale(self, parameter: Parameter) -> Any:
        """Return the global scale of a parameter's codes, one or one an expert, as an mlx array; None without one."""
        import mlx.core as mx

        if not self._facts[next(leaves(parameter.expression))].global_scale:
            return None
        scale = self.source(".global_scale")
        if len(set(leaves(parameter.expression))) == 1 and len(parameter.expression.shape) == 2:  # noqa: PLR2004  # a matrix
            return mx.array(np.array(scale(next(leaves(parameter.expression)))))
        scales = [
            np.broadcast_to(scale(name).reshape(-1), count)
            for name, count in global_scales_of(parameter.expression)
        ]
        return mx.array(np.concatenate(scales))


def mlx_array(array: PlannedArray, tensors: OpenTensors) -> Any:
    """Return the array in memory of MLX's own: no value is copied twice, also when experts are stacked."""
    import mlx.core as mx

    kind = numpy_dtype(array.dtype)
    made = mx.zeros(array.shape, getattr(mx, f"uint{8 * kind.itemsize}"))
    if made.size:
        mx.eval(made)
        # The buffer protocol gives MLX's own memory, writable; the array is not shared with any
        # other yet.
        tensors.fill(np.asarray(made).view(kind), array)
    return made.view(mlx_dtype(array.dtype))


def computed_arrays(plan: NetworkPlan, tensors: OpenTensors) -> dict[str, Any]:
    """Return the parameters that ``sanitize`` computes, as mlx arrays that are not evaluated, from the values they need."""
    import mlx.core as mx

    names = {
        one.name: one.expression.of
        for one in plan.parameters
        if isinstance(one.expression, Computed)
    }
    needed = {leaf for of in names.values() for leaf in of}
    if not names:
        return {}
    weights = {
        name: _offered(evaluate(one.expression, tensors.values), mx)
        if name in needed
        else stand_in(one)
        for name, one in plan.offered.items()
    }
    made = plan.make_network().sanitize(weights)
    return {name: made[name] for name in names}


def _offered(values: Array, mx: Any) -> Any:
    kind = values.dtype
    if kind.name == "bfloat16":
        return mx.array(values.view(np.uint16)).view(mx.bfloat16)
    return mx.array(values.view(np.uint8) if kind.kind == "V" else values)


def _part(array: Any, suffix: str) -> Any:
    if not isinstance(array, QuantizedArray):
        return array
    return {
        "": array.weight,
        ".scale": array.scale,
        ".bias": array.bias,
        ".global_scale": array.global_scale,
    }[suffix]


def build_network(plan: NetworkPlan, tensors: Mapping[str, Tensor], model: str) -> Any:
    """Return the network of ``plan`` with the weights of ``tensors``.

    Weights that MLX can read later are not read yet.

    Raises: UnsupportedSourceError, naming ``model``, for arrays that MLX does not have, or that
    mlx-lm refuses; errors of reading blobs.
    """
    opened = OpenTensors(tensors, plan.tensors)
    network = plan.network
    with mlx_lm_errors("build", model):
        arrays = computed_arrays(plan, opened)
        quantize_modules(plan)
        arrays.update((array.name, opened.mlx(array)) for array in planned_arrays(plan))
        network.load_weights(list(arrays.items()), strict=True)
        modules = dict(network.named_modules())
        for parameter in plan.parameters:
            if (
                parameter.quantization is not None
                and (scale := opened.global_scale(parameter)) is not None
            ):
                honour_global_scale(modules[parameter.module], scale)
    return network


def quantize_modules(plan: NetworkPlan) -> None:
    """Replace each module of the plan's network that gets codes by its quantized form."""
    from mlx import nn

    settings = {
        parameter.module: {
            "group_size": one.group_size,
            "bits": one.quant_type.bits,
            "mode": one.quant_type.mode,
        }
        for parameter in plan.parameters
        if (one := parameter.quantization) is not None
    }
    nn.quantize(plan.network, class_predicate=lambda path, _: settings.get(path, False))
