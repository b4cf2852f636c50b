"""Plan: which array of mlx-lm's network is made of which stored tensors, and how.

No weight is read.

Codes go into a quantized module when the network moves whole groups of them; otherwise the module
gets values. What ``sanitize`` computes (norms that count from zero, products with a multiplier) is
computed by it again, from values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import with_floats
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.model.network.expressions import (
    Array,
    Computed,
    Expression,
    Stored,
    in_units,
    leaves,
    substituted,
)
from blobstore.model.network.layouts import (
    LogicalTensor,
    Offered,
    check_counts,
    layouts,
    row_factors,
    takes_global_scale,
)
from blobstore.model.network.tracing import trace

_CLAIMS = ("quantization", "quantization_config")
_HEAD = "lm_head.weight"
_HEAD_MARKS = {"baichuan_m1": "lm_head.scales"}
"""A name that tells a ``sanitize`` that a head is quantized, so that it was normalised before (mlx_lm/models, 0.32.2)."""
_SHOWN = 3
_LONGEST = 300
"""Characters of an error of mlx-lm's in a message."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One parameter of the network: an expression over stored tensors, by their shapes before packing.

    ``quantization``: that of the codes that move into it; None when it gets values. ``factors``:
    what the scales and biases of each row are multiplied by, float32 ``[..., rows]``.
    """

    name: str
    expression: Expression
    quantization: Quantization | None = None
    factors: Array | None = None

    @property
    def module(self) -> str:
        """The path of the module that it belongs to."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """mlx-lm's network for a stored model, its weights not made, and what each of its parameters is made of.

    ``offered``: the tensors as ``sanitize`` sees them. ``tensors``: the stored ones by name.
    ``make_network`` returns another such network: a ``sanitize`` may change the one that it is of,
    so each is used once.
    """

    network: Any
    make_network: Callable[[], Any]
    parameters: tuple[Parameter, ...]
    offered: Mapping[str, Offered]
    tensors: Mapping[str, LogicalTensor]

    @property
    def dequantized(self) -> list[str]:
        """The quantized tensors of which a parameter holds values, sorted."""
        names = {
            name
            for parameter in self.parameters
            if parameter.quantization is None
            for name in self.sources(parameter)
        }
        return sorted(name for name in names if self.tensors[name].quantization is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence that names what is dequantized.

        Nothing if every code is used as it is stored.
        """
        names = self.dequantized
        if not names:
            return ()
        others = {1: "", 2: " and another tensor"}.get(
            len(names), f" and {len(names) - 1:,} other tensors"
        )
        return (f"{quoted(names[0])}{others} dequantized: mlx-lm can't use the stored codes",)

    def sources(self, parameter: Parameter) -> set[str]:
        """Return the stored tensors that a parameter is made of."""
        if isinstance(parameter.expression, Computed):
            return {
                name
                for one in parameter.expression.of
                for name in leaves(self.offered[one].expression)
            }
        return set(leaves(parameter.expression))


def import_mlx_lm() -> Any:
    """Return mlx-lm's ``utils``. Raises: UsageError without the ``lm`` extra."""
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise UsageError(
            "mlx-lm is not installed", hint="Install the extra: pip install 'blobstore[lm]'."
        ) from error
    return utils


@contextmanager
def mlx_lm_errors(doing: str, model: str | None) -> Iterator[None]:
    """Raise UnsupportedSourceError, naming ``model``, for whatever mlx-lm raises: its models have no errors of their own.

    SystemExit too: OLMo's ends the process where the package ``ai2-olmo`` is missing
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
        reason = _in_one_line(
            str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        )
        what = "it" if model is None else f"model {model}"
        raise UnsupportedSourceError(
            f"mlx-lm can't {doing} {what}: {reason}", model=model
        ) from error


def _in_one_line(text: str) -> str:
    """Return an error's text for a message: it may repeat what a hostile config.json says, or list a function's forms."""
    line = " ".join(text.split())
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in line[:_LONGEST]
    )
    return shown if len(line) <= _LONGEST else f"{shown}…"


def plan_network(
    config: Mapping[str, Any],
    tensors: Iterable[LogicalTensor],
    model: str | None,
    source_names: Container[str] | None = None,
) -> NetworkPlan:
    """Return how ``tensors`` become the parameters of the network that ``config`` describes.

    ``model``: its name for messages. ``source_names``: the names of the tensors of the checkpoint
    that was imported, where they are known.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError, naming ``model``, when
    mlx-lm does not know the architecture, or the tensors are not those that it needs.
    """
    utils = import_mlx_lm()
    # How layers are quantized is a fact of what is stored; the settings of a source would speak of
    # others.
    settings = with_floats({key: value for key, value in config.items() if key not in _CLAIMS})
    stored = {tensor.name: tensor for tensor in tensors}
    with mlx_lm_errors("build", model):
        check_counts(settings, (tensor.shape for tensor in stored.values()))
        # Private in mlx-lm 0.32, but the only table of its architectures; load_model insists on
        # files in a folder.
        model_class, args_class = utils._get_classes(settings)  # noqa: SLF001

        def make_network() -> Any:
            return model_class(args_class.from_dict(settings))

        marks = _marks(config, stored)
        network, offered, made = _fitting(
            make_network, layouts(stored.values(), source_names), marks
        )
        network.eval()
    modules = dict(network.named_modules())
    parameters = [
        _parameter(name, expression, modules, stored) for name, expression in sorted(made.items())
    ]
    with mlx_lm_errors("build", model):
        parameters = _multiplied(parameters, offered, modules, stored, make_network)
    return NetworkPlan(network, make_network, tuple(parameters), offered, stored)


def mlx_dtype(dtype: DType) -> Any:
    """Return the dtype that MLX has for values: uint8 where it has none of its own."""
    import mlx.core as mx

    return getattr(mx, dtype.mlx_name or "uint8")


def stand_in(offered: Offered) -> Any:
    """Return an mlx array of that shape and dtype that is never made: MLX makes arrays when they are evaluated."""
    import mlx.core as mx

    return mx.zeros(offered.expression.shape, mlx_dtype(offered.dtype))


def _marks(config: Mapping[str, Any], stored: Mapping[str, LogicalTensor]) -> list[str]:
    """Return the names by which ``sanitize`` knows what mlx-lm had changed before it quantized the source."""
    mark = _HEAD_MARKS.get(str(config.get("model_type")))
    by_mlx = isinstance(config.get("quantization"), Mapping)
    return (
        [mark]
        if mark and by_mlx and _HEAD in stored and stored[_HEAD].quantization is not None
        else []
    )


def _fitting(
    make_network: Callable[[], Any], candidates: Iterable[list[Offered]], marks: Sequence[str]
) -> tuple[Any, dict[str, Offered], dict[str, Expression]]:
    """Return a network, the first layout of which its ``sanitize`` makes its parameters, and what it makes of it.

    Raises: UnsupportedSourceError with what is wrong with the first layout, the source's own; what
    ``sanitize`` raises.
    """
    first: Exception | None = None
    for layout in candidates:
        network, offered = make_network(), {one.name: one for one in layout}
        try:
            made = _sanitized(network, offered, marks)
            _check(made, network)
        except Exception as error:  # noqa: BLE001  # a layout that sanitize was not written for
            first = first or error
            continue
        whole = {
            name: substituted(one, lambda leaf: offered[leaf].expression)  # noqa: B023
            for name, one in made.items()
        }
        return network, offered, whole
    raise first or AssertionError("there is always a layout")


def _sanitized(
    network: Any, offered: Mapping[str, Offered], marks: Sequence[str]
) -> dict[str, Expression]:
    if hasattr(network, "sanitize"):
        import mlx.core as mx

        stand_ins = {name: stand_in(one) for name, one in offered.items()}
        made = trace(network.sanitize, stand_ins | {mark: mx.zeros(()) for mark in marks})
        return {name: one for name, one in made.items() if name not in marks}
    return {name: Stored(name, one.expression.shape) for name, one in offered.items()}


def _check(made: Mapping[str, Expression], network: Any) -> None:
    """Raise UnsupportedSourceError when names or shapes are not those of the network's parameters."""
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
            message = f"{quoted(name)} is {list(made[name].shape)}, and mlx-lm's network needs {list(shape)}"
            raise UnsupportedSourceError(message, tensor=name)


def _parameter(
    name: str,
    expression: Expression,
    modules: Mapping[str, Any],
    tensors: Mapping[str, LogicalTensor],
) -> Parameter:
    """Return the parameter, with codes where its module can hold them and every group stays together."""
    plain = Parameter(name, expression)
    sources = (
        [] if isinstance(expression, Computed) else [tensors[leaf] for leaf in leaves(expression)]
    )
    quantization = sources[0].quantization if sources else None
    module = modules.get(plain.module)
    if quantization is None or not name.endswith(".weight") or not _takes_codes(module):
        return plain
    if any(
        one.quantization != quantization or one.dtype is not sources[0].dtype for one in sources
    ):
        return plain
    if in_units(expression, quantization.group_size, quantization.group_size) is None:
        return plain
    if any(one.global_scale for one in sources) and not takes_global_scale(
        module, expression, sources
    ):
        return plain
    return Parameter(name, expression, quantization)


def _multiplied(
    parameters: Iterable[Parameter],
    offered: Mapping[str, Offered],
    modules: Mapping[str, Any],
    tensors: Mapping[str, LogicalTensor],
    make_network: Callable[[], Any],
) -> list[Parameter]:
    """Return the parameters.

    Those that are affine weights times a factor a row keep their codes.
    """
    weights: dict[str, str] = {}
    for one in parameters:
        leaf = (
            next(iter(one.expression.of))
            if isinstance(one.expression, Computed) and len(one.expression.of) == 1
            else None
        )
        whole = offered[leaf].expression if leaf is not None else None
        if leaf is None or not isinstance(whole, Stored) or not one.name.endswith(".weight"):
            continue
        quantization = tensors[whole.name].quantization
        if (
            quantization is not None
            and quantization.quant_type.is_affine
            and _takes_codes(modules.get(one.module))
        ):
            weights[one.name] = leaf
    factors = row_factors(
        make_network, {name: stand_in(one) for name, one in offered.items()}, weights
    )
    return [
        Parameter(one.name, whole, tensors[whole.name].quantization, factors[one.name])
        if one.name in factors
        and isinstance(whole := offered[weights[one.name]].expression, Stored)
        else one
        for one in parameters
    ]


def _takes_codes(module: Any) -> bool:
    """Return True when mlx-lm can give the module codes of any mode.

    Those of afm7 take only affine ones (mlx-lm 0.32.2).
    """
    method = getattr(module, "to_quantized", None)
    return method is not None and "mode" in inspect.signature(method).parameters
