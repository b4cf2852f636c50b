"""Targets: each tensor gets the type that loses least, in a model of at most a given size.

The candidates are the tensors that types are chosen for. One candidate is one tensor, or all
weights of a packed group of experts, which get one type together. Candidates are the tensors that a
policy quantizes, and token embeddings, which are a large part of a small model. Tensors matched by
a user's rule are excluded.

allocation.py measures the errors and chooses. The result is a plan with a rule for every candidate,
so it can be repeated without measuring. docs/quantization.md, "Targets", says what makes errors of
tensors comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blobstore.errors import UsageError
from blobstore.formats.checkpoint import group_of
from blobstore.formats.dtypes import Quantization, QuantType
from blobstore.importer.allocation import (
    NEAR,
    SAMPLE,
    Choice,
    Question,
    allocate,
    least_bytes,
    measure,
)
from blobstore.importer.arguments import SizeTarget
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.outputs import ImportPlan, OutputTensor, PlannedBlob, StoredArrays
from blobstore.importer.plan import make_plan, plan_blobs
from blobstore.importer.policy import policy_for
from blobstore.importer.roles import (
    SENSITIVE,
    contains,
    embeds_tokens,
    form_of_experts,
    inputs_first,
)
from blobstore.importer.rules import Rule, RuleBook, escape_name
from blobstore.io.workers import Progress, start_progress
from blobstore.source.inventory import Inventory
from blobstore.source.weights import FetchOptions

Errors = Mapping[Quantization | None, float]
"""Relative squared errors by type; keeping loses nothing."""


@dataclass(frozen=True)
class Candidate:
    """Tensors that get one type together, the patterns that name them all, and bytes by type.

    None keeps them as their sources are. ``errors``: of each tensor, if they were measured.
    """

    tensors: tuple[OutputTensor, ...]
    patterns: tuple[str, ...]
    nbytes: Mapping[Quantization | None, int]
    errors: tuple[Errors, ...] = ()

    @property
    def smallest(self) -> Quantization | None:
        return min(self.nbytes, key=lambda kind: self.nbytes[kind])

    def rules(self, quantization: Quantization | None) -> Iterator[Rule]:
        if quantization is None:
            return (Rule(pattern, None) for pattern in self.patterns)
        kind, size = quantization.quant_type, quantization.group_size
        return (Rule(pattern, kind, size) for pattern in self.patterns)

    def with_errors(self, errors: Sequence[Mapping[Any, float]]) -> Candidate:
        nbytes = {
            kind: size
            for kind, size in self.nbytes.items()
            if kind is None or all(kind in of_tensor for of_tensor in errors)
        }
        return replace(self, nbytes=nbytes, errors=tuple({None: 0.0, **error} for error in errors))

    def choices(self) -> tuple[Choice, ...]:
        """Return what each type takes and loses: relative errors, times the weights' counts."""
        return tuple(
            Choice(
                nbytes,
                math.fsum(
                    errors[kind] * tensor.parameters * _count(tensor.name)
                    for tensor, errors in zip(self.tensors, self.errors, strict=True)
                ),
            )
            for kind, nbytes in self.nbytes.items()
        )

    def relative_errors(self, kind: Quantization | None) -> dict[str, float]:
        return {
            tensor.name: math.sqrt(errors[kind])
            for tensor, errors in zip(self.tensors, self.errors, strict=True)
        }


def _count(name: str) -> float:
    return next((times for words, times in _COUNTS if contains(name, words)), 1.0)


def candidates_of(inventory: Inventory, options: ImportOptions) -> list[Candidate]:
    """Return the candidates of a checkpoint, in the order of its blobs. Raises: as `plan_blobs`."""
    undecided = replace(options, quant_type=None, group_size=None, rules=(), importance=None)
    is_wanted = _selection(inventory, options)
    types = list(_types(options))
    turned = inputs_first(inventory.weights, inventory.config, options.profile)
    together = form_of_experts(inventory.config, options) is Experts.PACKED
    candidates = []
    for blob in plan_blobs(inventory, undecided):
        laid_out = (tensor.as_quantized(turned) for tensor in blob.tensors)
        tensors = tuple(tensor for tensor in laid_out if is_wanted(tensor))
        for members in [tensors] if together and tensors else [(tensor,) for tensor in tensors]:
            nbytes: dict[Quantization | None, int] = {
                None: sum(member.nbytes for member in members)
            }
            for kind in types:
                if all(_fits(kind, tensor, options) for tensor in members):
                    nbytes[kind] = sum(_nbytes(member, kind, options) for member in members)
            candidates.append(Candidate(members, _patterns(blob, members), nbytes))
    return candidates


def _selection(inventory: Inventory, options: ImportOptions) -> Callable[[OutputTensor], bool]:
    """Return the test for tensors that types are chosen for.

    These are float matrices that the policy quantizes, or that embed tokens, and that no rule of
    the user's decides.
    """
    rules = RuleBook(options.rules)
    # Without a type asked for, the general one: which tensors are wanted hardly depends on it.
    policy = policy_for(inventory.config, options.quant_type or QuantType.INT4, options)

    def is_wanted(tensor: OutputTensor) -> bool:
        name, shape, rule = tensor.name, tensor.shape, rules.rule_for(tensor.name)
        if rule is not None and options.can_follow(rule, tensor.dtype, shape):
            return False
        return tensor.sources[0].dtype.is_float and (
            policy.wants(name, shape) or embeds_tokens(name, shape)
        )

    return is_wanted


def _types(options: ImportOptions) -> Iterator[Quantization]:
    """Yield the types of the asked family, or of both, in all groups that the user leaves open."""
    asked = options.quant_type
    for kind in QuantType:
        if asked is None or kind.is_affine is asked.is_affine:
            if kind in options.groups or (kind is asked and options.group_size is not None):
                yield options.quantization(kind)
            else:
                yield from (Quantization(kind, size) for size in kind.group_sizes)


def _fits(quantization: Quantization, tensor: OutputTensor, options: ImportOptions) -> bool:
    scale = options.global_scale_of(quantization)
    if scale is not None and embeds_tokens(tensor.name, tensor.shape):
        return False  # mlx-lm runs no embedding that has one
    return tensor.shape[-1] % options.row_divisor(quantization) == 0


def _nbytes(tensor: OutputTensor, quantization: Quantization, options: ImportOptions) -> int:
    dtype, scale = options.dtype or tensor.sources[0].dtype, options.global_scale_of(quantization)
    return StoredArrays.of(dtype, tensor.shape, quantization, scale).nbytes


def _patterns(blob: PlannedBlob, members: tuple[OutputTensor, ...]) -> tuple[str, ...]:
    """Return one pattern for a whole packed group, else the names.

    The pattern must match nothing else that it could quantize.
    """
    names = {tensor.name for tensor in members}
    grouped = len(members) > 1 and all(group_of(name) == blob.name for name in names)
    if grouped and all(tensor.name in names or len(tensor.shape) < 2 for tensor in blob.tensors):  # noqa: PLR2004
        return (f"{escape_name(blob.name)}.*",)
    return tuple(escape_name(tensor.name) for tensor in members)


_ROUNDS = 8
# How often the weights of tensors of such names count (docs/quantization.md, "Targets").
_COUNTS = ((("lm_head", "embed"), 4.0), (SENSITIVE, 3.0))


def plan_for_target(
    inventory: Inventory,
    options: ImportOptions,
    target: SizeTarget,
    draft: Inventory | None = None,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    fetch: FetchOptions | None = None,
) -> ImportPlan:
    """Return the plan of at most ``target`` whose weights lose least.

    They are read for it when not all can be kept.

    Raises: UsageError that says what is possible, when nothing fits; as `make_plan` and `measure`.
    """
    task = _Task(inventory, options, target, draft, tuple(candidates_of(inventory, options)))
    kept = task.plan([None for _ in task.candidates])
    budget = target.budget(kept.parameters)
    if task.size(kept) <= budget:
        plan = replace(
            kept,
            relative_errors={
                tensor.name: 0.0 for candidate in task.candidates for tensor in candidate.tensors
            },
        )
    else:
        overhead = task.size(kept) - sum(candidate.nbytes[None] for candidate in task.candidates)
        task.check_possible(budget, overhead)
        measured = _measure(task.candidates, options, jobs, progress, fetch)
        plan = _choose(replace(task, candidates=measured), budget, overhead)
    size = task.size(plan)
    if size >= NEAR * budget:
        return plan
    what = (
        "everything is kept, and that"
        if size == task.size(kept)
        else "no choice of types comes closer to the target: it"
    )
    return replace(plan, notes=(*plan.notes, f"{what} is {size:,} bytes of {budget:,}"))


def target_range(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None = None
) -> tuple[int, int]:
    """Return the bytes of the smallest and the largest plan that a target can lead to.

    No weight is read, so it is not known which types a target in between leads to. Raises: as
    `make_plan`.
    """
    candidates = tuple(candidates_of(inventory, options))
    task = _Task(inventory, options, SizeTarget(1, None), draft, candidates)
    smallest = task.plan([candidate.smallest for candidate in candidates])
    return smallest.stored_bytes, task.plan([None for _ in candidates]).stored_bytes


@dataclass(frozen=True, slots=True)
class _Task:
    inventory: Inventory
    options: ImportOptions
    target: SizeTarget
    draft: Inventory | None
    candidates: tuple[Candidate, ...]

    def plan(self, chosen: Sequence[Quantization | None]) -> ImportPlan:
        rules = [
            rule
            for candidate, kind in zip(self.candidates, chosen, strict=True)
            for rule in candidate.rules(kind)
        ]
        return make_plan(
            self.inventory, replace(self.options, rules=(*rules, *self.options.rules)), self.draft
        )

    def size(self, plan: ImportPlan) -> int:
        return (
            plan.stored_bytes
            if self.target.nbytes is not None
            else sum(blob.data_size for blob in plan.blobs)
        )

    def check_possible(self, budget: int, overhead: int) -> None:
        """Raise UsageError when even the smallest types take more than the budget.

        ``overhead``: about the bytes apart from the candidates.
        """
        nbytes = sum(min(candidate.nbytes.values()) for candidate in self.candidates)
        if nbytes + 2 * overhead < budget:
            return  # planning a large model takes seconds
        least = self.plan([candidate.smallest for candidate in self.candidates])
        if self.size(least) > budget:
            bits = math.ceil(1000 * least.bits_per_weight) / 1000
            raise UsageError(
                "the target can't be met: with the smallest types the model takes"
                f" {least.stored_bytes:,} bytes, {bits:.3f} bits per weight",
                hint="Ask for at least that; rules can quantize tensors that are kept.",
            )


def _measure(
    candidates: Sequence[Candidate],
    options: ImportOptions,
    jobs: int,
    progress: Progress | None,
    fetch: FetchOptions | None,
) -> tuple[Candidate, ...]:
    questions = [
        Question(
            tensor,
            tuple(kind for kind in candidate.nbytes if kind is not None),
            max(1, SAMPLE // len(candidate.tensors)),
        )
        for candidate in candidates
        for tensor in candidate.tensors
    ]
    shown = start_progress(progress, sum(question.source_bytes for question in questions))
    errors = iter(measure(questions, options, jobs, shown, fetch))
    return tuple(
        candidate.with_errors([next(errors) for _ in candidate.tensors]) for candidate in candidates
    )


def _choose(task: _Task, budget: int, overhead: int) -> ImportPlan:
    """Return the plan of at most ``budget`` bytes whose weights lose least.

    What a plan takes besides the candidates (kept tensors, headers, padding, our document) depends
    on their types, a little: types are chosen for what the ``overhead`` of the plan before leaves.
    """
    choices = [candidate.choices() for candidate in task.candidates]
    least = least_bytes(choices)
    best: tuple[int, ImportPlan] | None = None
    for _ in range(_ROUNDS):
        indices = allocate(choices, max(least, budget - overhead))
        chosen = [
            tuple(candidate.nbytes)[index]
            for candidate, index in zip(task.candidates, indices, strict=True)
        ]
        plan = task.plan(chosen)
        size = task.size(plan)
        if size <= budget and (best is None or size > best[0]):
            errors: dict[str, float] = {}
            for candidate, kind in zip(task.candidates, chosen, strict=True):
                errors |= candidate.relative_errors(kind)
            best = (size, replace(plan, relative_errors=errors))
        if NEAR * budget <= size <= budget:
            break
        overhead = size - sum(of[index].nbytes for of, index in zip(choices, indices, strict=True))
    if best is None:
        raise UsageError(
            f"the target can't be met: {budget:,} bytes are too few for the headers and padding"
        )
    return best[1]
