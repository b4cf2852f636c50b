"""Network plan: which array of mlx-lm's network is made of which stored tensors, and how.

No weight is read.

mlx-lm makes a Python object for each layer that config.json counts, before it sees a weight: a
billion layers would fill all memory. So the counts of config.json are checked against the tensors
first.

``import mlx_lm`` imports transformers, and PyTorch where that is installed: 1.9 seconds of a
processor and 150 MB of memory. Its networks are modules without either (mlx_lm/models), but Python
runs the code of a package before any module of it, unless that is prevented
(`without_package_code`).

Codes go into a quantized module when the network moves whole groups of them; otherwise the module
gets values. What ``sanitize`` computes (norms that count from zero, products with a multiplier) is
computed by it again, from values.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import with_floats
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.kernels.arrays import Array
from blobstore.model.expressions import (
    Computed,
    Expression,
    Joined,
    Stored,
    in_units,
    leaves,
)
from blobstore.model.facts import TensorFacts
from blobstore.model.on_mlx_lm import VERSION, module_for
from blobstore.model.sanitize import Offered, layouts, row_factors, trace

_PACKAGE = "mlx_lm"
_CLAIMS = ("quantization", "quantization_config")
_SHOWN = 3
_LONGEST = 300
"""Characters of an error of mlx-lm's in a message."""
_FEW = 1000
"""So many of anything are made at once, whatever the tensors are."""
_LAYERS = re.compile(r"(?:[a-z]+_)*(?:n|num)_(?:[a-z]+_)*(?:layers?|loops|inputs)", re.ASCII)
_OTHERS = re.compile(
    r"[a-z_]*(?:experts|heads?|window_pattern|_neighbor_num|_split_num|sinkhorn_iters)", re.ASCII
)


def import_mlx_lm() -> Any:
    """Return mlx-lm's ``utils``. Raises: UsageError without the ``lm`` extra."""
    require_mlx_lm()
    from mlx_lm import utils

    return utils


def require_mlx_lm() -> None:
    """Raise UsageError without the ``lm`` extra. Nothing is imported."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UsageError(
            "mlx-lm is not installed", hint="Install the extra: pip install 'blobstore[lm]'."
        )


def network_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a config.json: that of the network, and that of its settings.

    Raises: UsageError without the ``lm`` extra; what mlx-lm raises, ValueError among it for an
    unknown type.
    """
    # Where its version is not that of our table, its own is asked.
    name = module_for(config) if importlib.metadata.version("mlx-lm") == VERSION else None
    if name is not None:
        module = importlib.import_module(f"{_PACKAGE}.models.{name}")
        return module.Model, module.ModelArgs
    # load_model itself insists on files in a folder; its default is the table of architectures.
    options = inspect.signature(import_mlx_lm().load_model).parameters
    model_class, args_class = options["get_model_classes"].default(config)
    return model_class, args_class


def without_package_code() -> None:
    """Let mlx-lm's modules be imported without the code of the package itself.

    Nothing happens if it is imported already, or missing. Only for a process of our own, before it
    has threads; names that the package's code defines are missing then.
    """
    spec = importlib.util.find_spec(_PACKAGE) if _PACKAGE not in sys.modules else None
    if spec is not None:
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)


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
    """mlx-lm's network for a stored model, its weights not made, and the source of each parameter.

    ``offered``: the tensors as ``sanitize`` sees them. ``tensors``: the stored ones by name.
    ``make_network`` returns another such network: a ``sanitize`` may change the one that it is of,
    so each is used once.
    """

    network: Any
    make_network: Callable[[], Any]
    parameters: tuple[Parameter, ...]
    offered: Mapping[str, Offered]
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


@contextmanager
def mlx_lm_errors(doing: str, model: str | None) -> Iterator[None]:
    """Raise UnsupportedSourceError, naming ``model``, for any error of mlx-lm.

    SystemExit too: OLMo's module ends the process where the package ``ai2-olmo`` is missing
    (mlx_lm/models/olmo.py, 0.32.2).
    """
    try:
        yield
    except BlobStoreError as error:
        if model is None:
            raise
        raise error.at(f"model {model}", model=model) from error
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        what = "it" if model is None else f"model {model}"
        raise UnsupportedSourceError(
            f"mlx-lm can't {doing} {what}: {in_one_line(reason)}", model=model
        ) from error


def in_one_line(text: str) -> str:
    """Return an error's text for a message.

    It may repeat values of a hostile config.json, or list a function's forms.
    """
    line = " ".join(text.split())
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line[:_LONGEST])
    return shown if len(line) <= _LONGEST else f"{shown}…"


def plan_network(
    config: Mapping[str, Any],
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
    settings = with_floats({key: value for key, value in config.items() if key not in _CLAIMS})
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


def check_counts(config: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> None:
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


_HEAD_MARK = Offered("lm_head.scales", Stored("lm_head.scales", ()), DType.F32)
"""A tensor by which ``sanitize`` knows that mlx-lm normalised the head before.

Without it the head would be divided by its norms once more. Source: mlx_lm 0.32.2
models/baichuan_m1.py `sanitize`.
"""


def _has_normalised_head(config: Mapping[str, Any], stored: Mapping[str, TensorFacts]) -> bool:
    head = stored.get("lm_head.weight")
    is_quantized = head is not None and head.quantization is not None
    by_mlx_lm = isinstance(config.get("quantization"), Mapping)
    return is_quantized and by_mlx_lm and config.get("model_type") == "baichuan_m1"


def _fitting(
    make_network: Callable[[], Any], candidates: Iterable[list[Offered]]
) -> tuple[Any, dict[str, Offered], dict[str, Expression]]:
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


def _sanitized(network: Any, offered: Mapping[str, Offered]) -> dict[str, Expression]:
    given = {name: one.expression for name, one in offered.items()}
    if not hasattr(network, "sanitize"):
        return given
    stand_ins = {name: one.stand_in for name, one in offered.items()}
    made = trace(network.sanitize, stand_ins, given)
    return {name: one for name, one in made.items() if one != _HEAD_MARK.expression}


def _check(made: Mapping[str, Expression], network: Any) -> None:
    from mlx.utils import tree_flatten

    wanted = {name: tuple(array.shape) for name, array in tree_flatten(network.parameters())}
    for what, names in (
        ("needs", wanted.keys() - made.keys()),
        ("has no place for", made.keys() - wanted.keys()),
    ):
        if names:
            shown = ", ".join(map(quoted, sorted(names)[:_SHOWN]))
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise UnsupportedSourceError(
                f"mlx-lm's network {what} {shown}{more}", tensor=min(names)
            )
    for name, shape in wanted.items():
        if made[name].shape != shape:
            found = list(made[name].shape)
            raise UnsupportedSourceError(
                f"{quoted(name)} is {found}, and mlx-lm's network needs {list(shape)}", tensor=name
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
    is_stack = isinstance(expression, Joined) and expression.axis == 0
    parts = expression.parts if isinstance(expression, Joined) and is_stack else (expression,)
    found = [(set(leaves(part)), part.shape[0]) for part in parts]
    if any(len(names) != 1 for names, _ in found):
        return []
    return [(names.pop(), count) for names, count in found]


def _scaled_rows(
    made: Mapping[str, Expression],
    offered: Mapping[str, Offered],
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
