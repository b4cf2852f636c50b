"""Choices: the plans of one checkpoint with every type and group size, made without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from blobstore.errors import BlobStoreError
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.targets import target_range


class PlannedTensor(NamedTuple):
    """A tensor as it would be stored: its type in words, shape before packing, stored bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan for a type (None: unquantized) and a group size."""

    quant_type: QuantType | None
    group_size: int | None
    plan: ImportPlan

    @property
    def label(self) -> str:
        """What a person calls it: ``int4/64``, or ``unquantized``."""
        return f"{self.quant_type}/{self.group_size}" if self.quant_type else "unquantized"

    @property
    def key(self) -> str:
        """A word for it that is unique on its page."""
        return self.label.replace("/", "-")

    @property
    def tensors(self) -> list[PlannedTensor]:
        """Its tensors."""
        return [
            PlannedTensor(one.name, str(one.quantization or one.dtype), one.shape, one.nbytes)
            for one in self.plan.tensors
        ]


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
        options = self.asked.options
        kind = options.quant_type
        size = None if kind is None else options.quantization(kind).group_size
        found = ((one.quant_type, one.group_size) for one in self.plans)
        place = next((i for i, pair in enumerate(found) if pair == (kind, size)), None)
        return None if place is None or options.target is not None else self.plans[place]


def plan_choices(asked: ImportPlan, options: ImportOptions) -> PlanChoices:
    """Return the plans of the checkpoint of a plan, with all types and group sizes.

    ``options``: those that the user gave; their rules are in every plan. Nothing is read.
    """
    options = replace(options, target=None)
    draft = asked.inventories[1] if len(asked.inventories) > 1 else None
    plans, refused = [], {}
    for kind, size in _kinds():
        wanted = replace(options, quant_type=kind, group_size=size)
        if kind is not QuantType.NVFP4:
            wanted = replace(wanted, global_scale=False)
        try:
            plan = make_plan(asked.inventory, wanted, draft)
        except BlobStoreError as error:
            refused[f"{kind}/{size}" if kind else "unquantized"] = error.message
            continue
        plans.append(PlanChoice(kind, size, plan))
    try:
        reach = target_range(asked.inventory, replace(options, quant_type=None), draft)
    except BlobStoreError:
        reach = None
    return PlanChoices(asked, tuple(plans), refused, reach)


def _kinds() -> Iterator[tuple[QuantType | None, int | None]]:
    for kind in QuantType:
        for size in kind.group_sizes:
            yield kind, size
    yield None, None
