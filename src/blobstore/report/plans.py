"""The page of a plan, before it is run: sizes by type and groups, and what a target can reach.

The plans of a checkpoint with every type and group size are made without its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from blobstore._version import __version__
from blobstore.errors import BlobStoreError
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.targets import target_range
from blobstore.plots.subjects import Weighed
from blobstore.plots.treemap import treemap
from blobstore.report.model import source_label
from blobstore.views.quantities import count, counted, shape, size
from blobstore.web.pages import markup_of, page_in_file, table

_MOST_RECTANGLES = 300
"""Of a plan, because a page has about ten."""
_MOST_ROWS = 30
_Kind = tuple[QuantType | None, int | None]


def plan_page(asked: ImportPlan, options: ImportOptions) -> bytes:
    """Return the page in HTML, UTF-8. The same plans give the same bytes.

    ``options``: those that the user gave; their rules are in every plan. Nothing is read.
    """
    data = _choices(asked, replace(options, target=None))
    readable = "".join(_readable(data))
    return page_in_file(f"{data['source']}: plan", ("plan",), data, readable)


def _choices(asked: ImportPlan, options: ImportOptions) -> dict[str, Any]:
    """Return what the page shows.

    ``asked``: the label of the plan that was asked for; None if types were chosen for a target,
    and that plan is ``target`` then. ``refused``: why other types can't be had. ``reach``: bytes
    of the smallest and of the largest plan that a target can lead to; None if it is refused.
    """
    draft = asked.inventories[1] if len(asked.inventories) > 1 else None
    chosen = _kind_of(asked)
    plans, refused = [], {}
    for kind, group_size in _kinds():
        wanted = replace(options, quant_type=kind, group_size=group_size)
        if kind is not QuantType.NVFP4:
            wanted = replace(wanted, global_scale=False)
        label = _label(kind, group_size)
        try:
            is_asked = (kind, group_size) == chosen
            plan = asked if is_asked else make_plan(asked.inventory, wanted, draft)
        except BlobStoreError as error:
            refused[label] = error.message
        else:
            plans.append(_choice(plan, kind, group_size))
    reach = None
    with suppress(BlobStoreError):
        reach = target_range(asked.inventory, replace(options, quant_type=None), draft)
    name = source_label(asked.inventory.folder)
    is_known = chosen in set(_kinds())
    bits = f"{asked.bits_per_weight:.2f} bits per weight"
    return {
        "source": name,
        "headline": f"{count(asked.parameters)} parameters, {size(asked.source_bytes)} in the"
        f" source; as asked {size(asked.stored_bytes)}, {bits}",
        "source_bytes": asked.source_bytes,
        "plans": plans,
        "asked": _label(*chosen) if chosen is not None and is_known else None,
        "target": None if is_known else _choice(asked, None, None),
        "refused": refused,
        "reach": reach,
        "made": {"Checkpoint": name, "blobstore": __version__},
    }


def _choice(plan: ImportPlan, kind: QuantType | None, group_size: int | None) -> dict[str, Any]:
    """Return what the page shows of a plan, which is not kept: it may have 100,000 tensors."""
    tensors = [
        Weighed(one.name, str(one.quantization or one.dtype), one.shape, one.nbytes)
        for one in plan.tensors
    ]
    return {
        "label": _label(kind, group_size),
        "type": str(kind or "unquantized"),
        "groups": str(group_size or ""),
        "bytes": plan.stored_bytes,
        "bits": f"{plan.bits_per_weight:.2f}",
        "blobs": len(plan.blobs),
        "tensors": len(tensors),
        "quantized": sum(one.quantization is not None for one in plan.tensors),
        "runs_in": [(one.runtime, one.sentence) for one in plan.runs_in],
        "notes": list(plan.notes),
        "largest": [
            (one.name, one.type_name, shape(one.shape), size(one.nbytes))
            for one in nsmallest(_MOST_ROWS, tensors, key=lambda one: (-one.nbytes, one.name))
        ],
        "treemap": treemap(tensors, _MOST_RECTANGLES),
    }


def _label(kind: QuantType | None, group_size: int | None) -> str:
    return f"{kind}/{group_size}" if kind else "unquantized"


def _kind_of(plan: ImportPlan) -> _Kind | None:
    """Return the type and groups of a plan; None if types were chosen for a target."""
    options = plan.options
    if options.target is not None:
        return None
    kind = options.quant_type
    return kind, None if kind is None else options.quantization(kind).group_size


def _kinds() -> Iterator[_Kind]:
    for kind in QuantType:
        for group_size in kind.group_sizes:
            yield kind, group_size
    yield None, None


def _readable(data: dict[str, Any]) -> Iterator[str]:
    yield f"<h1>Plan for {markup_of(data['source'])}</h1><p>{markup_of(data['headline'])}</p>"
    columns = ("plan", "size", "bits per weight", "quantized tensors")
    rows = [
        (one["label"], size(one["bytes"]), one["bits"], one["quantized"]) for one in data["plans"]
    ]
    yield table("Plans", columns, rows)
    yield table("Refused", ("plan", "why"), data["refused"].items())
    shown = data["plans"] if data["target"] is None else [data["target"], *data["plans"]]
    for plan in shown:
        title = plan["label"] if plan is not data["target"] else "The plan as asked"
        yield f"<h2>{markup_of(title)}</h2>"
        yield table(f"Where it runs ({title})", ("runtime", ""), plan["runs_in"])
        title = f"The largest of {counted(plan['tensors'], 'tensor')}"
        yield table(title, ("tensor", "type", "shape", "size"), plan["largest"])
