"""Network: a stored model as mlx-lm's network: what each array is made of, and its weights.

mlx-lm makes a Python object for each layer that config.json counts, before it sees a weight: a
billion layers would fill all memory. So the counts of config.json are checked against the tensors
first.

``sanitize`` of mlx-lm is traced, not fed with codes: its changes to the tensors of a published
checkpoint become expressions (sanitize.py), and the same moves are made with codes and scales
wherever every group stays together. Codes go into a quantized module then; otherwise the module
gets values. What ``sanitize`` computes (norms that count from zero, products with a multiplier) is
computed by it again, from values.

A parameter with codes is several arrays (``….weight``, ``….scales``, ``….biases``); one with values
is one array.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.checkpoint import with_floats
from blobstore.formats.dtypes import DType, Quantization, fits_mlx
from blobstore.kernels.arrays import Array, QuantizedArray, numpy_dtype
from blobstore.model.facts import Config, TensorFacts
from blobstore.model.loader import Tensor, mlx_of, parts_of
from blobstore.model.on_mlx_lm import mlx_lm_errors, network_classes, require_mlx_lm
from blobstore.model.sanitize import (
    Computed,
    Concatenation,
    Expression,
    Offer,
    Stored,
    evaluate,
    fill,
    in_units,
    layouts,
    leaves,
    mlx_dtype,
    row_factors,
    trace,
)
from blobstore.names import shortened

_SHOWN = 3
_WORD_BITS = 32
_SUFFIXES = {"": ".weight", ".scale": ".scales", ".bias": ".biases"}
# The most of anything that is made at once, whatever the tensors are.
_FEW = 1000
_LAYERS = re.compile(r"(?:[a-z]+_)*(?:n|num)_(?:[a-z]+_)*(?:layers?|loops|inputs)", re.ASCII)
_OTHERS = re.compile(
    r"[a-z_]*(?:experts|heads?|window_pattern|_neighbor_num|_split_num|sinkhorn_iters)", re.ASCII
)


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One parameter of the network.

    ``expression``: over stored tensors, by their shapes before packing.
    ``quantization``: that of the codes that move into it; None when it gets values. ``factors``:
    what the scales and biases of each row are multiplied by, float32 ``[..., rows]``.
    """

    name: str
    expression: Expression
    quantization: Quantization | None = None
    factors: Array | None = None

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """mlx-lm's network for a stored model, without weights, and the source of each parameter.

    ``offered``: the tensors as ``sanitize`` sees them. ``tensors``: the stored ones by name.
    ``make_network`` returns another such network: a ``sanitize`` may change the one that it is of,
    so each is used once.
    """

    network: Any
    make_network: Callable[[], Any]
    parameters: tuple[Parameter, ...]
    offered: Mapping[str, Offer]
    tensors: Mapping[str, TensorFacts]

    @property
    def dequantized(self) -> list[str]:
        """The quantized tensors of which a parameter holds values, sorted."""
        names = {
            name
            for parameter in self.parameters
            if parameter.quantization is None
            for name in leaves(parameter.expression)
        }
        return sorted(name for name in names if self.tensors[name].quantization is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        names = self.dequantized
        if not names:
            return ()
        others = {1: "", 2: " and another tensor"}.get(
            len(names), f" and {len(names) - 1:,} other tensors"
        )
        return (f"{quoted(names[0])}{others} dequantized: mlx-lm can't use the stored codes",)


def plan_network(
    config: Config,
    tensors: Iterable[TensorFacts],
    model: str | None,
    source_names: Container[str] | None = None,
) -> NetworkPlan:
    """Return how ``tensors`` become the parameters of the network that ``config`` describes.

    ``model``: its name for messages. ``source_names``: the names of the tensors of the checkpoint
    that was imported, where they are known.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError, naming ``model``, when
    mlx-lm does not know the architecture, or the tensors are not those that it needs.
    """
    require_mlx_lm()
    # How layers are quantized is a fact of what is stored; the settings of a source would speak of
    # others.
    settings = with_floats(
        {
            key: value
            for key, value in config.items()
            if key not in ("quantization", "quantization_config")
        }
    )
    stored = {tensor.name: tensor for tensor in tensors}
    with mlx_lm_errors("build", model):
        check_counts(settings, (tensor.shape for tensor in stored.values()))
        model_class, args_class = network_classes(settings)

        def make_network() -> Any:
            return model_class(args_class.from_dict(settings))

        marks = [_HEAD_MARK] if _has_normalised_head(config, stored) else []
        candidates = ([*layout, *marks] for layout in layouts(stored.values(), source_names))
        network, offered, made = _fitting(make_network, candidates)
        network.eval()
        parameter = partial(_parameter, dict(network.named_modules()), stored)
        scaled = _scaled_rows(made, offered, parameter, make_network)
    parameters = tuple(scaled.get(name) or parameter(name, made[name]) for name in sorted(made))
    return NetworkPlan(network, make_network, parameters, offered, stored)


def check_counts(config: Config, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise UnsupportedSourceError when config.json counts more than the tensors can hold.

    Each layer has a tensor of its own; experts may be stacked, but a router has a row for each, and
    each head has rows.
    """
    given = list(shapes)
    layers = max(_FEW, len(given))
    others = max([layers, *(size for shape in given for size in shape)])
    limits = ((_LAYERS, layers), (_OTHERS, others))
    for key, value in _numbers(config):
        if value > next((most for pattern, most in limits if pattern.fullmatch(key)), value):
            raise UnsupportedSourceError(
                f"config.json: {quoted(key)} is {quoted(value)},"
                f" too many for {len(given):,} tensors"
            )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, name)


# A tensor by which ``sanitize`` knows that mlx-lm normalised the head before.
#
# Without it the head would be divided by its norms once more. Source: mlx_lm 0.32.2
# models/baichuan_m1.py `sanitize`.
_HEAD_MARK = Offer("lm_head.scales", Stored("lm_head.scales", ()), DType.F32)


def _has_normalised_head(config: Config, stored: Mapping[str, TensorFacts]) -> bool:
    head = stored.get("lm_head.weight")
    is_quantized = head is not None and head.quantization is not None
    by_mlx_lm = isinstance(config.get("quantization"), Mapping)
    return is_quantized and by_mlx_lm and config.get("model_type") == "baichuan_m1"


def _fitting(
    make_network: Callable[[], Any], candidates: Iterable[list[Offer]]
) -> tuple[Any, dict[str, Offer], dict[str, Expression]]:
    """Return a network, the first layout that fits it, and its parameters as expressions.

    Raises: UnsupportedSourceError with the fault of the first layout, the source's own; as
    ``sanitize``.
    """
    first: Exception | None = None
    for layout in candidates:
        network, offered = make_network(), {one.name: one for one in layout}
        try:
            made = _sanitized(network, offered)
            _check(made, network)
        except Exception as error:  # noqa: BLE001  # a layout that sanitize was not written for
            first = first or error
        else:
            return network, offered, made
    raise first or AssertionError("there is always a layout")


def _sanitized(network: Any, offered: Mapping[str, Offer]) -> dict[str, Expression]:
    given = {name: one.expression for name, one in offered.items()}
    if not hasattr(network, "sanitize"):
        return given
    made = trace(network.sanitize, {name: one.stand_in for name, one in offered.items()}, given)
    return {name: one for name, one in made.items() if one != _HEAD_MARK.expression}


def _check(made: Mapping[str, Expression], network: Any) -> None:
    from mlx.utils import tree_flatten

    wanted = {name: tuple(array.shape) for name, array in tree_flatten(network.parameters())}
    for what, names in (
        ("needs", wanted.keys() - made.keys()),
        ("has no place for", made.keys() - wanted.keys()),
    ):
        if names:
            raise UnsupportedSourceError(
                f"mlx-lm's network {what} {shortened([*map(quoted, sorted(names))], _SHOWN)}",
                tensor=min(names),
            )
    for name, shape in wanted.items():
        if made[name].shape != shape:
            raise UnsupportedSourceError(
                f"{quoted(name)} is {list(made[name].shape)},"
                f" and mlx-lm's network needs {list(shape)}",
                tensor=name,
            )


def _parameter(
    modules: Mapping[str, Any],
    tensors: Mapping[str, TensorFacts],
    name: str,
    expression: Expression,
) -> Parameter:
    """Return the parameter, with codes where its module can hold them."""
    plain = Parameter(name, expression)
    if isinstance(expression, Computed):
        return plain
    sources = [tensors[leaf] for leaf in leaves(expression)]
    quantization, module = sources[0].quantization, modules.get(plain.module)
    if (
        quantization is None
        or not name.endswith(".weight")
        or not _takes_codes(module)
        or any((one.quantization, one.dtype) != (quantization, sources[0].dtype) for one in sources)
        or in_units(expression, quantization.group_size, quantization.group_size) is None
        or not _takes_global_scales(module, expression, sources)
    ):
        return plain
    return Parameter(name, expression, quantization)


def _takes_global_scales(
    module: Any, expression: Expression, sources: Sequence[TensorFacts]
) -> bool:
    """Return True if the module can multiply by the global scales of ``sources``, if there are any.

    A linear layer has one, a stack of experts one for each.
    """
    from mlx import nn
    from mlx_lm.models.switch_layers import SwitchLinear

    scaled = [source.double_scaled for source in sources]
    if not any(scaled):
        return True
    if not all(scaled):
        return False
    if type(module) is nn.Linear:
        return len(set(leaves(expression))) == 1
    return type(module) is SwitchLinear and global_scales_of(expression) != []


def global_scales_of(expression: Expression) -> list[tuple[str, int]]:
    """Return the tensors whose global scales a stack has, in order, with their experts' number.

    Empty when an expert is made of several tensors.
    """
    parts: Sequence[Expression] = [expression]
    if isinstance(expression, Concatenation) and expression.axis == 0:
        parts = expression.parts
    scales = [(set(leaves(part)), part.shape[0]) for part in parts]
    if any(len(names) != 1 for names, _ in scales):
        return []
    return [(names.pop(), count) for names, count in scales]


def _scaled_rows(
    made: Mapping[str, Expression],
    offered: Mapping[str, Offer],
    parameter: Callable[[str, Expression], Parameter],
    make_network: Callable[[], Any],
) -> dict[str, Parameter]:
    """Return the parameters that are affine weights times factors of rows: these keep codes."""
    whole = {
        one.expression.name: one for one in offered.values() if isinstance(one.expression, Stored)
    }
    weights: dict[str, str] = {}
    with_codes: dict[str, Parameter] = {}
    for name, expression in made.items():
        if not isinstance(expression, Computed) or len(expression.of) != 1:
            continue
        (leaf,) = expression.of
        if leaf in whole:
            kept = parameter(name, whole[leaf].expression)
            if kept.quantization is not None and kept.quantization.quant_type.is_affine:
                weights[name], with_codes[name] = whole[leaf].name, kept
    stand_ins = {name: one.stand_in for name, one in offered.items()}
    factors = row_factors(make_network, stand_ins, weights)
    return {name: replace(with_codes[name], factors=own) for name, own in factors.items()}


def _takes_codes(module: Any) -> bool:
    """Return True if the module can be quantized in any mode; afm7's only in affine (0.32.2)."""
    method = getattr(module, "to_quantized", None)
    return method is not None and "mode" in inspect.signature(method).parameters


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
                raise UnsupportedSourceError(
                    f"MLX has no {array.dtype} arrays of shape {list(array.shape)}:"
                    f" {quoted(array.tensor)}",
                    tensor=array.tensor,
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
        parameter.name: parameter.expression.of
        for parameter in plan.parameters
        if isinstance(parameter.expression, Computed)
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
        (parameter.module, _with_scale(modules[parameter.module], scale))
        for parameter in plan.parameters
        if parameter.quantization is not None
        and (scale := tensors.global_scale(parameter)) is not None
    ]
    plan.network.update_modules(tree_unflatten(scaled))


def _with_scale(module: Any, scale: Any) -> Any:
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


def quantize_modules(plan: NetworkPlan) -> dict[str, dict[str, Any]]:
    """Replace each module of the plan's network that is given codes by its quantized form.

    Return their settings by their paths.
    """
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
    return settings
