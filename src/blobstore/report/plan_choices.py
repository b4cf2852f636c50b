"""Choices: the plans of one checkpoint with every type and group size, made without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import NamedTuple

from blobstore.errors import BlobStoreError
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.targets import target_range
from blobstore.model.facts import Verdict
from blobstore.plots.specification import Specification
from blobstore.plots.treemap import treemap

_MOST_RECTANGLES = 300
"""Of a plan, because a page has about ten."""
_MOST_ROWS = 30


class PlannedTensor(NamedTuple):
    """A tensor as it would be stored: its type in words, shape before packing, stored bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan for a type (None: unquantized) and a group size: its numbers and its pictures.

    The plan itself is not kept: a page has ten, each of up to 100,000 tensors. ``largest``: its
    largest tensors, ``tensors`` of them all and ``quantized`` are numbers. ``is_asked``: this is
    the plan that the user asked for.
    """

    quant_type: QuantType | None
    group_size: int | None
    is_asked: bool
    stored_bytes: int
    bits_per_weight: float
    blobs: int
    tensors: int
    quantized: int
    runs_in: tuple[Verdict, ...]
    notes: tuple[str, ...]
    treemap: Specification
    largest: tuple[PlannedTensor, ...]

    @classmethod
    def of(
        cls,
        plan: ImportPlan,
        quant_type: QuantType | None,
        group_size: int | None,
        *,
        is_asked: bool = False,
    ) -> PlanChoice:
        """Return what a page shows of a plan."""
        tensors = [
            PlannedTensor(one.name, str(one.quantization or one.dtype), one.shape, one.nbytes)
            for one in plan.tensors
        ]
        return cls(
            quant_type=quant_type,
            group_size=group_size,
            is_asked=is_asked,
            stored_bytes=plan.stored_bytes,
            bits_per_weight=plan.bits_per_weight,
            blobs=len(plan.blobs),
            tensors=len(tensors),
            quantized=sum(one.quantization is not None for one in plan.tensors),
            runs_in=plan.runs_in,
            notes=plan.notes,
            treemap=treemap(tensors, _MOST_RECTANGLES),
            largest=tuple(nsmallest(_MOST_ROWS, tensors, key=lambda one: (-one.nbytes, one.name))),
        )

    @property
    def label(self) -> str:
        """What a person calls it: ``int4/64``, or ``unquantized``."""
        return f"{self.quant_type}/{self.group_size}" if self.quant_type else "unquantized"

    @property
    def key(self) -> str:
        """A word for it that is unique on its page."""
        return self.label.replace("/", "-")


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """All plans that can be made of a checkpoint, and the one that was asked for.

    ``refused``: why other types can't be had, by label. ``reach``: bytes of the smallest and of the
    largest plan that a target can lead to; None if a target is refused.
    """

    asked: ImportPlan
    plans: tuple[PlanChoice, ...]
    refused: dict[str, str]
    reach: tuple[int, int] | None

    @property
    def chosen(self) -> PlanChoice | None:
        """The plan with the asked type and groups; None if types were chosen for a target."""
        return next((one for one in self.plans if one.is_asked), None)


def plan_choices(asked: ImportPlan, options: ImportOptions) -> PlanChoices:
    """Return the plans of the checkpoint of a plan, with all types and group sizes.

    ``options``: those that the user gave; their rules are in every plan. Nothing is read.
    """
    options = replace(options, target=None)
    draft = asked.inventories[1] if len(asked.inventories) > 1 else None
    plans, refused = [], {}
    for kind, size in _kinds():
        if (kind, size) == _kind_of(asked):
            plans.append(PlanChoice.of(asked, kind, size, is_asked=True))
            continue
        wanted = replace(options, quant_type=kind, group_size=size)
        if kind is not QuantType.NVFP4:
            wanted = replace(wanted, global_scale=False)
        try:
            plan = make_plan(asked.inventory, wanted, draft)
        except BlobStoreError as error:
            refused[f"{kind}/{size}" if kind else "unquantized"] = error.message
            continue
        plans.append(PlanChoice.of(plan, kind, size))
    try:
        reach = target_range(asked.inventory, replace(options, quant_type=None), draft)
    except BlobStoreError:
        reach = None
    return PlanChoices(asked, tuple(plans), refused, reach)


def _kind_of(plan: ImportPlan) -> tuple[QuantType | None, int | None] | None:
    """Return the type and groups of a plan; None if types were chosen for a target."""
    options = plan.options
    if options.target is not None:
        return None
    kind = options.quant_type
    return kind, None if kind is None else options.quantization(kind).group_size


def _kinds() -> Iterator[tuple[QuantType | None, int | None]]:
    for kind in QuantType:
        for size in kind.group_sizes:
            yield kind, size
    yield None, None
