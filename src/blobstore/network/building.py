"""Building: mlx-lm's network with the weights of an open model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blobstore.network.arrays import OpenTensors, computed_arrays, planned_arrays
from blobstore.network.global_scales import honour_global_scale
from blobstore.network.planning import NetworkPlan, mlx_lm_errors
from blobstore.tensors import Tensor


def build_network(plan: NetworkPlan, tensors: Mapping[str, Tensor], model: str) -> Any:
    """Return the network of ``plan`` with the weights of ``tensors``. Weights that MLX can read later are not read yet.

    Raises: UnsupportedSourceError, naming ``model``, for arrays that MLX does not have, or that mlx-lm refuses; errors of
    reading blobs.
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
            if parameter.quantization is not None and (scale := opened.global_scale(parameter)) is not None:
                honour_global_scale(modules[parameter.module], scale)
    return network


def quantize_modules(plan: NetworkPlan) -> None:
    """Replace each module of the plan's network that gets codes by its quantized form."""
    from mlx import nn

    settings = {
        parameter.module: {"group_size": one.group_size, "bits": one.quant_type.bits, "mode": one.quant_type.mode}
        for parameter in plan.parameters
        if (one := parameter.quantization) is not None
    }
    nn.quantize(plan.network, class_predicate=lambda path, _: settings.get(path, False))
