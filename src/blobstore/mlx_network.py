"""A model of mlx-lm from a config.json and arrays: what `mlx_lm.load` and the export of folders for mlx-lm have in common.

Each layer's type and group size come from its arrays, so a model may mix them. Experts are stacked as mlx-lm's
``SwitchLinear`` wants them, whether they come packed or stacked. Nothing is evaluated here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError

_PARTS = "weight|scales|biases|global_scale"
_NUMBERED = re.compile(rf"(?P<parent>.+)\.experts\.(?P<expert>[0-9]+)\.(?P<projection>[^.]+)\.(?P<part>{_PARTS})")
_STACKED = re.compile(rf"(?P<parent>.+)\.experts\.(?P<projection>[^.]+)\.(?P<part>{_PARTS})")
_EXPERT_MODULES = ("switch_mlp", "experts.switch_glu", "experts")
_CLAIMS = ("quantization", "quantization_config")


def import_utils() -> Any:
    """Return mlx-lm's ``utils``. Raises: UsageError without the ``lm`` extra."""
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise UsageError("mlx-lm is not installed", hint="Install the extra: pip install 'blobstore[lm]'.") from error
    return utils


def build_network(config: Mapping[str, Any], weights: Mapping[str, Any], model: str) -> Any:
    """Return the model that ``config`` describes, holding ``weights``: mlx arrays by mlx-lm's names, not evaluated.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError, naming ``model``, when mlx-lm does not know the
    architecture, or the arrays are not those that it needs.
    """
    utils = import_utils()
    # How layers are quantized is a fact of the arrays; the settings of a source would speak of others.
    config = {key: value for key, value in config.items() if key not in _CLAIMS}
    try:
        # Private in mlx-lm 0.32, but the only table of its architectures; load_model insists on files in a folder.
        model_class, args_class = utils._get_classes(config)  # noqa: SLF001
        network = model_class(args_class.from_dict(config))
        arrays = _with_stacked_experts(weights, module_paths(network))
        if hasattr(network, "sanitize"):
            arrays = network.sanitize(arrays)
        _quantize_layers(network, arrays, utils)
        network.eval()
        _honour_global_scales(network, arrays)
        network.load_weights(list(arrays.items()), strict=True)
    except BlobStoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedSourceError(f"mlx-lm can't build model {model}: {error}", model=model) from error
    return network


def module_paths(network: Any) -> set[str]:
    """Return the paths of all modules of a network."""
    return {path for path, _ in network.named_modules()}


def stacking(names: Iterable[str], modules: Collection[str]) -> dict[str, str | list[str]]:
    """Return, by the names that arrays have for mlx-lm, which of ``names`` each is: one, or its experts in order.

    Experts go under the module that holds them all, as ``[experts, ...]``. Names for which the network has no such module
    stay as they are: its own ``sanitize`` may know them.
    """
    result: dict[str, str | list[str]] = {}
    numbered: dict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        if (match := _NUMBERED.fullmatch(name)) and (target := _expert_module(match, modules)):
            numbered[f"{target}.{match['part']}"][int(match["expert"])] = name
        elif (match := _STACKED.fullmatch(name)) and (target := _expert_module(match, modules)):
            result[f"{target}.{match['part']}"] = name
        else:
            result[name] = name
    return result | {target: [experts[number] for number in sorted(experts)] for target, experts in numbered.items()}


def _expert_module(match: re.Match[str], modules: Collection[str]) -> str | None:
    candidates = (f"{match['parent']}.{module}.{match['projection']}" for module in _EXPERT_MODULES)
    return next((path for path in candidates if path in modules), None)


def _with_stacked_experts(weights: Mapping[str, Any], modules: Collection[str]) -> dict[str, Any]:
    import mlx.core as mx

    return {
        target: weights[source] if isinstance(source, str) else mx.stack([weights[name] for name in source])
        for target, source in stacking(weights, modules).items()
    }


def _quantize_layers(network: Any, weights: Mapping[str, Any], utils: Any) -> None:
    """Replace each layer whose scales are stored by its quantized form, with the bits and groups that its arrays have."""
    from mlx import nn

    def settings(path: str, module: Any) -> Any:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return utils.infer_quant_config(path, module, weights)

    nn.quantize(network, class_predicate=settings)


def _honour_global_scales(network: Any, weights: dict[str, Any]) -> None:
    """Give the double-scaled layers a forward pass of their own: MLX multiplies by no global scale on a CPU (0.32.4).

    It is float32, because products without the global scale may be beyond what float16 holds.
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
            products = mx.gather_qmm(*arrays, rhs_indices=indices, sorted_indices=sorted_indices, **options)
            products = products * self.global_scale[indices][..., None, None]
            return (products + self.bias[indices][..., None, :] if "bias" in self else products).astype(x.dtype)

    scaled = {nn.QuantizedLinear: ScaledLinear, QuantizedSwitchLinear: ScaledSwitchLinear}
    for path, module in network.named_modules():
        name = f"{path}.global_scale"
        if name not in weights:
            continue
        if type(module) not in scaled:
            raise UnsupportedSourceError(f"{name!r}: mlx-lm has no double-scaled {type(module).__name__}", tensor=path)
        if type(module) is QuantizedSwitchLinear:
            weights[name] = mx.broadcast_to(weights[name].reshape(-1), (module.num_experts,))
        module.global_scale = weights[name]
        module.__class__ = scaled[type(module)]  # a new module would quantize random weights first
