"""What blobstore's table says mlx-lm holds as values, beside what mlx-lm's own network holds.

No weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def disagreement(folder: Path, quant: str | None) -> str:
    """Return a tensor on which the table and the network differ as ``quant``; "" if they agree.

    They are asked for the weights that the policy quantizes, for all that can be, and with global
    scales.
    """
    from blobstore.errors import UsageError

    for options in _options(quant):
        try:
            if found := _disagreement(folder, options):
                return found
        except UsageError:  # nothing can be quantized so
            continue
    return ""


def _options(quant: str | None) -> Iterator[dict[str, Any]]:
    yield {"quant": quant}
    if quant is not None:
        yield {"quant": quant, "rules": [f"*={quant}"]}
    if quant == "nvfp4":
        yield {"quant": quant, "rules": [f"*={quant}"], "global_scale": True}


def _disagreement(folder: Path, options: dict[str, Any]) -> str:
    import blobstore
    from blobstore.errors import UnsupportedSourceError
    from blobstore.model.expressions import leaves
    from blobstore.model.on_mlx_lm import dequantized, module_of

    plan = blobstore.plan_import(folder, **options)
    try:
        network = blobstore.mlx_lm.planned_network(plan)
    except UnsupportedSourceError:
        return ""
    held = set(network.dequantized)
    said = set(dequantized(plan.facts, str(module_of(plan.facts))))
    used = {name for parameter in network.parameters for name in leaves(parameter.expression)}
    odd = sorted(held ^ (said & used)) or (sorted(said) if not held else [])
    return (
        f"{odd[0]} is {'' if odd[0] in held else 'not '}dequantized, and the table says otherwise"
        if odd
        else ""
    )
