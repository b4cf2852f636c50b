"""Target: types for a size. What quantizing each tensor would lose is measured, and the plan loses least of those that fit.

Read (measuring.py), decide (allocation.py); the result is a plan with an explicit rule for every tensor that was chosen for,
so that it can be repeated without measuring. What makes errors of tensors comparable is in docs/quantization.md, "Targets".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from blobstore.errors import UsageError
from blobstore.importer.options import ImportOptions, Target
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.targets.allocation import NEAR, Choice, allocate, least_bytes
from blobstore.importer.targets.candidates import Candidate, candidates_of
from blobstore.importer.targets.measuring import SAMPLE, Progress, Question, measure
from blobstore.quant import Quantization
from blobstore.source.inventory import Inventory

_ROUNDS = 8
_COUNTS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("lm_head", "embed"), 4.0),
    ((".v_proj", ".k_proj", "down_proj"), 3.0),
)
"""How often the weights of tensors of such names count: docs/quantization.md, "Targets", has what this was taken from."""

Bar = Callable[[int], AbstractContextManager[Progress | None]]
"""Gives what is told of progress, for a number of bytes."""
Errors = Mapping[Quantization | None, float]
"""Relative squared errors by type; keeping has none."""


def plan_for_target(
    inventory: Inventory,
    options: ImportOptions,
    target: Target,
    draft: Inventory | None = None,
    *,
    jobs: int = 1,
    bar: Bar | None = None,
) -> ImportPlan:
    """Return the plan of at most ``target`` whose weights lose least; they are read for it when not all can be kept.

    Raises: UsageError that says what is possible, when nothing fits; as `make_plan` and `measure`.
    """
    task = _Task(inventory, options, target, draft, tuple(candidates_of(inventory, options)))
    kept = task.plan([None for _ in task.candidates])
    budget = target.budget(kept.parameters)
    if task.size(kept) <= budget:
        plan = replace(kept, relative_errors={tensor.name: 0.0 for one in task.candidates for tensor in one.tensors})
    else:
        overhead = task.size(kept) - sum(candidate.nbytes[None] for candidate in task.candidates)
        task.check_possible(budget, overhead)
        plan = _chosen(task, _measured(task.candidates, options, jobs, bar), budget, overhead)
    size = task.size(plan)
    if size >= NEAR * budget:
        return plan
    what = "everything is kept, and that" if size == task.size(kept) else "no choice of types is nearer to the target: it"
    return replace(plan, notes=(*plan.notes, f"{what} is {size:,} bytes of {budget:,}"))


@dataclass(frozen=True, slots=True)
class _Task:
    """What is planned, and for what."""

    inventory: Inventory
    options: ImportOptions
    target: Target
    draft: Inventory | None
    candidates: tuple[Candidate, ...]

    def plan(self, chosen: Sequence[Quantization | None]) -> ImportPlan:
        """Return the plan with those types for the candidates."""
        pairs = zip(self.candidates, chosen, strict=True)
        rules = tuple(rule for candidate, kind in pairs for rule in candidate.rules(kind))
        return make_plan(self.inventory, replace(self.options, rules=(*rules, *self.options.rules)), self.draft)

    def size(self, plan: ImportPlan) -> int:
        """Return the bytes that the target counts."""
        return plan.stored_bytes if self.target.nbytes is not None else sum(blob.data_size for blob in plan.blobs)

    def check_possible(self, budget: int, overhead: int) -> None:
        """Raise UsageError when even the smallest types take more than the budget; ``overhead``: about what comes beside."""
        smallest = [candidate.smallest for candidate in self.candidates]
        nbytes = sum(candidate.nbytes[kind] for candidate, kind in zip(self.candidates, smallest, strict=True))
        if nbytes + 2 * overhead < budget:
            return  # planning a large model takes seconds
        least = self.plan(smallest)
        if self.size(least) > budget:
            possible = f"{least.stored_bytes:,} bytes, {math.ceil(1000 * least.bits_per_weight) / 1000:.3f} bits per weight"
            raise UsageError(
                f"the target can't be met: with the smallest types the model has {possible}",
                hint="Ask for that or more; --rule gives types to tensors that are kept.",
            )


@dataclass(frozen=True, slots=True)
class _Item:
    """A candidate and the errors of its tensors, in their order, by type: only types that all of them can have."""

    candidate: Candidate
    errors: tuple[Errors, ...]

    @property
    def types(self) -> tuple[Quantization | None, ...]:
        """The types to choose from."""
        return tuple(self.errors[0])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What each type takes and loses: relative errors, times the numbers of weights, times what these count."""
        return tuple(
            Choice(
                self.candidate.nbytes[kind],
                math.fsum(
                    errors[kind] * tensor.parameters * _count(tensor.name)
                    for tensor, errors in zip(self.candidate.tensors, self.errors, strict=True)
                ),
            )
            for kind in self.types
        )

    def relative_errors(self, kind: Quantization | None) -> dict[str, float]:
        """Return the relative root mean square error of each tensor with that type, by name."""
        pairs = zip(self.candidate.tensors, self.errors, strict=True)
        return {tensor.name: math.sqrt(errors[kind]) for tensor, errors in pairs}


def _count(name: str) -> float:
    return next((times for words, times in _COUNTS if any(word in name for word in words)), 1.0)


def _measured(candidates: Sequence[Candidate], options: ImportOptions, jobs: int, bar: Bar | None) -> list[_Item]:
    questions = [
        Question(tensor, candidate.types, max(1, SAMPLE // len(candidate.tensors)))
        for candidate in candidates
        for tensor in candidate.tensors
    ]
    total = sum(source.nbytes for question in questions for source in question.tensor.sources)
    with bar(total) if bar is not None else nullcontext() as progress:
        found = iter(measure(questions, options, jobs, progress))
    items = []
    for candidate in candidates:
        measured = [next(found) for _ in candidate.tensors]
        types = [kind for kind in candidate.types if all(kind in errors for errors in measured)]
        items.append(_Item(candidate, tuple({None: 0.0, **{kind: errors[kind] for kind in types}} for errors in measured)))
    return items


def _chosen(task: _Task, items: Sequence[_Item], budget: int, overhead: int) -> ImportPlan:
    """Return the plan of at most ``budget`` bytes whose weights lose least.

    What a plan takes beside the candidates (kept tensors, headers, padding, our document) depends on their types, a
    little: types are chosen for what the ``overhead`` of the plan before leaves.
    """
    choices = [item.choices for item in items]
    least = least_bytes(choices)
    best: tuple[int, ImportPlan] | None = None
    for _ in range(_ROUNDS):
        indices = allocate(choices, max(least, budget - overhead))
        chosen = [item.types[index] for item, index in zip(items, indices, strict=True)]
        plan = task.plan(chosen)
        size = task.size(plan)
        if size <= budget and (best is None or size > best[0]):
            errors = [item.relative_errors(kind) for item, kind in zip(items, chosen, strict=True)]
            best = size, replace(plan, relative_errors={name: error for one in errors for name, error in one.items()})
        if NEAR * budget <= size <= budget:
            break
        overhead = size - sum(of[index].nbytes for of, index in zip(choices, indices, strict=True))
    if best is None:
        raise UsageError(f"the target can't be met: {budget:,} bytes are too few by what headers and padding take")
    return best[1]
