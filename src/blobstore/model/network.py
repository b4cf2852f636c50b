"""Network: a stored model as mlx-lm's network.

``sanitize`` of mlx-lm is traced, not fed with codes: its changes to the tensors of a published
checkpoint become expressions (sanitize.py), and the same moves are made with codes and scales
wherever every group stays together (network_plan.py). Here the network gets its weights.

A parameter with codes is several arrays (``….weight``, ``….scales``, ``….biases``); one with values
is one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.dtypes import DType, fits_mlx
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.model.expressions import (
    Computed,
    Expression,
    Stored,
    evaluate,
    fill,
    in_units,
    leaves,
)
from blobstore.model.facts import TensorFacts
from blobstore.model.network_plan import (
    NetworkPlan,
    Parameter,
    global_scales_of,
    mlx_lm_errors,
)
from blobstore.model.sanitize import mlx_dtype
from blobstore.model.tensors import Tensor, mlx_of, parts_of

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
        return self.expression.shape


def planned_arrays(plan: NetworkPlan) -> Iterator[PlannedArray]:
    """Yield the arrays of all parameters, but for global scales and `Computed` values.

    Raises: UnsupportedSourceError when MLX has no such dtype.
    """
    for parameter in plan.parameters:
        if isinstance(parameter.expression, Computed):
            continue
        for array in _arrays_of(parameter, plan.tensors):
            if not fits_mlx(array.dtype, array.shape):
                shape, tensor = list(array.shape), array.tensor
                raise UnsupportedSourceError(
                    f"MLX has no {array.dtype} arrays of shape {shape}: {quoted(tensor)}",
                    tensor=tensor,
                )
            yield array


def _arrays_of(parameter: Parameter, tensors: Mapping[str, TensorFacts]) -> Iterator[PlannedArray]:
    expression, quantization = parameter.expression, parameter.quantization
    first = tensors[next(leaves(expression))]
    if quantization is None:
        yield PlannedArray(parameter.name, first.dtype, expression, None, first.name)
        return
    for part in quantization.parts(expression.shape, first.dtype):
        is_weight = part.suffix == ""
        codes = _WORD_BITS // quantization.quant_type.bits
        unit = codes if is_weight else quantization.group_size
        moved = in_units(expression, quantization.group_size, unit)
        if moved is None:
            raise AssertionError(f"{parameter.name}: planned with codes whose groups are split")
        name = parameter.module + _SUFFIXES[part.suffix]
        factors = None if is_weight else parameter.factors
        yield PlannedArray(name, part.dtype, moved, part.suffix, first.name, factors)


@dataclass(frozen=True, slots=True)
class OpenTensors:
    """The arrays of an open model's tensors, by name: views of its maps, or values."""

    tensor: Callable[[str], Tensor]
    facts: Mapping[str, TensorFacts]

    def source(self, suffix: str | None) -> Callable[[str], Array]:
        """Return a function from a tensor's name to its stored array; for None, to its values."""
        if suffix is None:
            return self.values
        return lambda name: parts_of(self.tensor(name).numpy())[suffix]

    def values(self, name: str) -> Array:
        """Return a tensor's values: a view, or dequantized to the dtype of its facts."""
        tensor, fact = self.tensor(name), self.facts[name]
        array = tensor.numpy()
        if isinstance(array, QuantizedArray) or tensor.dtype is not fact.dtype:
            return tensor.dequantize(fact.dtype)
        return array

    def fill(self, out: Array, array: PlannedArray) -> None:
        """Write an array of a network into ``out``, contiguous and of its dtype."""
        fill(out, array.expression, self.source(array.suffix))
        if array.factors is not None:
            out[...] = out.astype(np.float32) * array.factors[..., None]

    def mlx(self, array: PlannedArray) -> Any:
        """Return an array of a network for MLX, as it is stored if it can be, else in new memory.

        No value is copied twice, also when experts are stacked.
        """
        import mlx.core as mx

        if isinstance(array.expression, Stored) and array.factors is None:
            return mlx_of(self.source(array.suffix)(array.tensor))
        kind = numpy_dtype(array.dtype)
        made = mx.zeros(array.shape, getattr(mx, f"uint{8 * kind.itemsize}"))
        if made.size:
            mx.eval(made)
            # The buffer protocol gives MLX's own memory, writable; no other array shares it yet.
            self.fill(np.asarray(made).view(kind), array)
        return made.view(mlx_dtype(array.dtype))

    def global_scale(self, parameter: Parameter) -> Any:
        """Return the global scale of a parameter's codes, as an mlx array; None without one.

        It is one number, or one for each expert.
        """
        import mlx.core as mx

        names = list(leaves(parameter.expression))
        if not self.facts[names[0]].double_scaled:
            return None
        scale = self.source(".global_scale")
        if len(set(names)) == 1 and len(parameter.expression.shape) == 2:  # noqa: PLR2004  # a matrix
            return mx.array(np.array(scale(names[0])))
        scales = [
            np.broadcast_to(scale(name).reshape(-1), count)
            for name, count in global_scales_of(parameter.expression)
        ]
        return mx.array(np.concatenate(scales))


def computed_arrays(plan: NetworkPlan, tensors: OpenTensors) -> dict[str, Any]:
    """Return the parameters that ``sanitize`` computes, as mlx arrays that are not evaluated."""
    computed = {
        one.name: one.expression.of
        for one in plan.parameters
        if isinstance(one.expression, Computed)
    }
    if not computed:
        return {}
    needed = frozenset[str]().union(*computed.values())
    weights = {
        name: one.stand_in
        if needed.isdisjoint(leaves(one.expression))
        else mlx_of(evaluate(one.expression, tensors.values))
        for name, one in plan.offered.items()
    }
    made = plan.make_network().sanitize(weights)
    return {name: made[name] for name in computed}


def build_network(plan: NetworkPlan, tensors: Mapping[str, Tensor], model: str) -> Any:
    """Return the network of ``plan`` with the weights of ``tensors``.

    Weights are read, but what ``sanitize`` computes is not evaluated.

    Raises: UnsupportedSourceError, naming ``model``, for arrays that MLX does not have, or that
    mlx-lm refuses; errors of reading blobs.
    """
    import mlx.core as mx

    opened = OpenTensors(tensors.__getitem__, plan.tensors)
    network = plan.network
    with mlx_lm_errors("build", model):
        arrays = computed_arrays(plan, opened)
        quantize_modules(plan)
        planned = list(planned_arrays(plan))
    with mlx_lm_errors("load", model):
        made = {array.name: opened.mlx(array) for array in planned}
        mx.eval(list(made.values()))
    with mlx_lm_errors("build", model):
        network.load_weights([*arrays.items(), *made.items()], strict=True)
        _add_global_scales(plan, opened)
    return network


def _add_global_scales(plan: NetworkPlan, tensors: OpenTensors) -> None:
    from mlx.utils import tree_unflatten

    modules = dict(plan.network.named_modules())
    scaled = [
        (parameter.module, _scaled(modules[parameter.module], scale))
        for parameter in plan.parameters
        if parameter.quantization is not None
        and (scale := tensors.global_scale(parameter)) is not None
    ]
    plan.network.update_modules(tree_unflatten(scaled))


def _scaled(module: Any, scale: Any) -> Any:
    """Return a quantized module that multiplies by ``scale``, one F32 or one for each expert.

    mlx-lm's modules have a forward pass of their own for double-scaled nvfp4, and MLX multiplies by
    no global scale on a CPU (0.32.4), so the products are multiplied here. It is computed in
    float32, because products without the global scale may exceed the range of float16.
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
            if "bias" in self:
                products = products + self.bias[indices][..., None, :]
            return products.astype(x.dtype)

    is_switch = type(module) is QuantizedSwitchLinear
    kind: Any = ScaledSwitchLinear if is_switch else ScaledLinear
    scaled = kind.__new__(kind)
    nn.Module.__init__(scaled)  # its own would quantize random weights
    scaled.__dict__.update(module.__dict__)
    dict.update(scaled, module)  # Module.update is another method
    scaled.global_scale = scale.reshape(-1) if is_switch else scale
    return scaled


def quantize_modules(plan: NetworkPlan) -> None:
    """Replace each module of the plan's network that is given codes by its quantized form."""
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
