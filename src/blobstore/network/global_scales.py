"""Global scales: double-scaled nvfp4 in mlx-lm's modules, with a forward pass of their own.

MLX multiplies by no global scale on a CPU (0.32.4), so the products are multiplied here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blobstore.network.expressions import Expression, Joined, leaves
from blobstore.network.layouts import LogicalTensor


def takes_global_scale(module: Any, expression: Expression, sources: Sequence[LogicalTensor]) -> bool:
    """Return True when the module can multiply by the global scales of all ``sources``: one, or one an expert."""
    from mlx import nn
    from mlx_lm.models.switch_layers import SwitchLinear

    if not all(source.global_scale for source in sources):
        return False
    if type(module) is nn.Linear:
        return len(set(leaves(expression))) == 1
    return type(module) is SwitchLinear and list(_experts(expression)) != []


def _experts(expression: Expression) -> Iterator[tuple[str, int]]:
    """Yield the stored tensor of each run of experts, and how many they are; nothing when an expert has several."""
    parts = expression.parts if isinstance(expression, Joined) and expression.axis == 0 else (expression,)
    found = [(set(leaves(part)), part.shape[0]) for part in parts]
    if all(len(names) == 1 for names, _ in found):
        yield from ((names.pop(), count) for names, count in found)


def global_scales_of(expression: Expression) -> list[tuple[str, int]]:
    """Return the tensors whose global scales a stack of experts has, in order, and for how many experts each."""
    return list(_experts(expression))


def honour_global_scale(module: Any, scale: Any) -> None:
    """Let a quantized module multiply by ``scale``, one F32 or one an expert.

    It is computed in float32, because products without the global scale may be beyond what float16 holds.
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

    is_switch = type(module) is QuantizedSwitchLinear
    module.global_scale = scale.reshape(-1) if is_switch else scale
    module.__class__ = ScaledSwitchLinear if is_switch else ScaledLinear  # a new module would quantize random weights first
