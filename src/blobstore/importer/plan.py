"""Plan: which blobs an import writes, and what is in each.

Pure functions that make values of outputs.py; no weight is read.

The writer (writing.py) carries a plan out and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.checkpoint import CONFIG_NAME, DRAFT_FOLDER, DRAFT_PREFIX, group_of
from blobstore.formats.documents import MAX_LAYERS, OWN_DOCUMENT
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.formats.safetensors.header import Header
from blobstore.importer.notes import (
    coverage_of,
    describe_model,
    experts_note,
    fp8_note,
    gguf_note,
    own_document,
    rounding_note,
    size_note,
    storable,
)
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
    PlannedLayer,
)
from blobstore.importer.policy import Policy, policy_for
from blobstore.importer.roles import NUMBERED, form_of_experts, inputs_first, stacked_group_of
from blobstore.importer.rules import Rule, RuleBook
from blobstore.source.inventory import FLOAT, Inventory, kind_of
from blobstore.source.producers import OWN
from blobstore.source.weights import SourceWeight, named_twice
from blobstore.store.stored import stored_tensors

_MAX_DIGITS = 9
# Characters from which on the name of an array may be beyond `Header.check_limits`.
_LONG_NAME = 10_000


def packed_order(group: str, weights: Iterable[SourceWeight]) -> list[SourceWeight]:
    """Return a group's weights by expert number, then by projection name.

    Unnumbered ones after them.

    The numbers have passed `projections`.
    """

    def key(weight: SourceWeight) -> tuple[float, str]:
        rest = weight.name[len(group) + 1 :]
        match = NUMBERED.fullmatch(rest)
        return (int(match["expert"]), match["projection"]) if match else (float("inf"), rest)

    return sorted(weights, key=key)


def projections(
    group: str, weights: Iterable[SourceWeight], *, one_type: bool = True
) -> dict[str, tuple[SourceWeight, ...]]:
    """Return the numbered experts of a group, in their order, by the name of their projection.

    Names are sorted; unnumbered weights are ignored.

    Raises: UnsupportedSourceError when a number is written in another way than "12", when a
    projection has not the same experts 0 to N-1 as the others, or when experts of one projection
    differ in shape, or, of ``one_type``, in dtype or quantization.
    """
    by_projection: dict[str, dict[int, SourceWeight]] = defaultdict(dict)
    for weight in weights:
        match = NUMBERED.fullmatch(weight.name[len(group) + 1 :])
        if match is None:
            continue
        if len(match["expert"]) > _MAX_DIGITS or str(int(match["expert"])) != match["expert"]:
            raise UnsupportedSourceError(
                f"{quoted(weight.name)} has no plain expert number", tensor=weight.name
            )
        by_projection[match["projection"]][int(match["expert"])] = weight
    _check_numbers(group, by_projection)
    result = {
        name: tuple(experts[number] for number in sorted(experts))
        for name, experts in sorted(by_projection.items())
    }
    for experts in result.values():
        _check_layout(group, experts, one_type=one_type)
    return result


def _check_numbers(group: str, by_projection: Mapping[str, Mapping[int, SourceWeight]]) -> None:
    count = max((max(experts) + 1 for experts in by_projection.values()), default=0)
    for name, experts in sorted(by_projection.items()):
        # The first gap is within the first len(experts) + 1 numbers, however large the largest one
        # is.
        missing = next((number for number in range(count) if number not in experts), None)
        if missing is not None:
            raise UnsupportedSourceError(
                f"the expert group {group} has no {group}.{missing}.{name}: "
                f"experts 0 to {count - 1} must all exist",
                tensor=f"{group}.{missing}.{name}",
            )


def _check_layout(group: str, experts: Sequence[SourceWeight], *, one_type: bool) -> None:
    first = experts[0]
    for weight in experts:
        if weight.shape != first.shape or (one_type and weight.layout != first.layout):
            raise UnsupportedSourceError(
                f"experts of {group} differ: {first.name} is {_description(first)}, "
                f"{weight.name} is {_description(weight)} "
                f"({weight.file.path})",
                tensor=weight.name,
                path=weight.file.path,
            )


def _description(weight: SourceWeight) -> str:
    return f"{weight.quantization or weight.tensor.dtype} {list(weight.shape)}"


def check_names(blobs: Iterable[PlannedBlob]) -> None:
    """Raise UnsupportedSourceError when two blobs or two stored arrays would have one name."""
    blob_names: set[str] = set()
    tensors: dict[str, OutputTensor] = {}
    for blob in blobs:
        for tensor in blob.tensors:
            if tensor.name in tensors:
                raise named_twice(tensor.name, tensors[tensor.name].sources[0], tensor.sources[0])
            tensors[tensor.name] = tensor
        if blob.name in blob_names:
            raise UnsupportedSourceError(
                f"two blobs would have the name {quoted(blob.name)}", blob=blob.name
            )
        blob_names.add(blob.name)
    # No suffix ends in another: other arrays of one name are a tensor and one's companion.
    for tensor in tensors.values():
        for part in tensor.stored.parts[1:]:
            name = tensor.name + part.suffix
            if name in tensors:
                raise named_twice(name, tensor.sources[0], tensors[name].sources[0])


def check_readable(blobs: Iterable[PlannedBlob]) -> None:
    """Raise UnsupportedSourceError when a blob would be read back as other tensors.

    U32 values with a ``.scale`` look like quantized codes. How a blob of one tensor is read does
    not depend on its name, nor that of a group of experts on the group's: one of each kind is
    checked.
    """
    seen: set[object] = set()
    for blob in blobs:
        kind = _kind(blob)
        if kind is None or kind not in seen:
            _check_readable(blob)
            seen.add(kind)


def _kind(blob: PlannedBlob) -> object:
    """Return what decides how a blob is read; None if names do, too."""
    # Metadata with a dot in their key are about a tensor, and long names may be beyond a limit.
    is_long = any(len(tensor.name) > _LONG_NAME for tensor in blob.tensors)
    if is_long or any("." in key for key in blob.metadata):
        return None
    prefix = blob.name if blob.tensors[1:] else blob.tensors[0].name
    if blob.tensors[1:] and not all(
        tensor.name.startswith(f"{prefix}.") for tensor in blob.tensors
    ):
        return None
    forms = tuple((tensor.name[len(prefix) :], tensor.stored) for tensor in blob.tensors)
    return forms, tuple(blob.metadata.items())


def _check_readable(blob: PlannedBlob) -> None:
    planned = {tensor.name: (tensor.quantization, tensor.transposed) for tensor in blob.tensors}
    try:
        header = Header(blob.entries, blob.metadata, len(blob.header))
        header.check_limits(f"blob {blob.name[:80]}")
        read = {
            tensor.name: (tensor.quantization, tensor.transposed)
            for tensor in stored_tensors(header)
        }
    except CorruptDataError as error:
        raise UnsupportedSourceError(
            f"{blob.name!r} could not be read back: {error}", tensor=error.tensor
        ) from None
    if read != planned:
        name = min(name for name in planned | read if planned.get(name) != read.get(name))
        raise UnsupportedSourceError(
            f"{name!r} would be read back as part of a quantized tensor", tensor=name
        )


def _check_quantizable(blobs: tuple[PlannedBlob, ...], chooser: _Chooser) -> None:
    """Raise UsageError when the groups of the asked type divide none of the wanted tensors."""
    options, policy = chooser.options, chooser.policies[None]
    tensors = list(_tensors(blobs))
    if policy is None or any(tensor.quantization is not None for tensor in tensors):
        return
    for tensor in tensors:
        if chooser.rule(tensor) is not None:
            continue  # kept because a rule says so
        types, _ = policy.types(tensor.name, tensor.shape)
        if types and not options.fits(types[-1], tensor.shape):
            divisor = options.row_divisor(options.quantization(types[-1]))
            raise UsageError(
                f"nothing can be quantized to {options.quant_type}: the rows of {tensor.name!r} "
                f"{list(tensor.shape)} are not a multiple of {divisor}",
                tensor=tensor.name,
            )


def check_rules(blobs: Iterable[PlannedBlob], options: ImportOptions) -> None:
    """Raise UsageError for a rule that no tensor follows, by its name or because of its rows."""
    tensors = {tensor.name: tensor for blob in blobs for tensor in blob.tensors}
    for rule in options.rules:
        named = [tensors[name] for name in rule.matches(tensors)]
        if not named:
            raise UsageError(
                f"no tensor's name matches the rule {quoted(str(rule))}",
                hint="`blobstore plan SOURCE` shows the names.",
            )
        if rule.quant_type is not None and not any(
            options.can_follow(rule, tensor.dtype, tensor.shape) for tensor in named
        ):
            tensor = named[0]
            raise UsageError(
                f"the rule {quoted(str(rule))} matches no tensor that it can quantize: "
                f"{quoted(tensor.name)} is "
                f"{tensor.dtype} {list(tensor.shape)}",
                tensor=tensor.name,
            )


def make_plan(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None = None
) -> ImportPlan:
    """Return the plan for importing ``inventory``, and a draft model, with ``options``.

    Raises: UnsupportedSourceError (a packed format that is not imported, quantized weights with a
    type asked for, weights that can't be quantized, experts that don't fit together, two tensors of
    one name, no config.json in the ollama profile); UsageError when nothing can be quantized, or a
    rule is for no tensor; LimitExceededError for too many layers.
    """
    asked = options.experts
    options = replace(options, experts=form_of_experts(inventory.config, options))
    inventory = storable(inventory, options.profile, has_draft=draft is not None)
    draft = storable(draft, options.profile, has_draft=False) if draft is not None else None
    blobs = plan_blobs(inventory, options)
    draft_blobs = tuple(_plan_draft(draft, options)) if draft is not None else ()
    check_names((*blobs, *draft_blobs))
    check_rules((*blobs, *draft_blobs), options)
    coverage = coverage_of(inventory, _tensors(blobs), draft, _tensors(draft_blobs))
    _check_documents(inventory, options)
    layers: tuple[PlannedLayer, ...] = (
        *blobs,
        *_files(inventory),
        *(
            [PlannedFile(OWN_DOCUMENT, own_document(inventory, options, draft, coverage))]
            if not options.profile.is_ollama
            else []
        ),
        *draft_blobs,
        *(_files(draft, DRAFT_FOLDER) if draft is not None else ()),
        *(PlannedFile(None, data, media_type) for media_type, data in options.modelfile.layers()),
    )
    if len(layers) > MAX_LAYERS:
        raise LimitExceededError(
            f"limit exceeded: {inventory.path} needs {len(layers):,} layers, "
            f"at most {MAX_LAYERS:,}",
            path=inventory.path,
        )

    notes = (
        *experts_note(blobs, options, inventory.config, asked),
        *fp8_note(blobs, options),
        *gguf_note(blobs),
        *size_note(blobs, options),
        *rounding_note(blobs),
    )
    return ImportPlan(
        (inventory,) if draft is None else (inventory, draft),
        options,
        layers,
        describe_model(inventory, options, draft),
        coverage,
        notes=notes,
    )


def _plan_draft(inventory: Inventory, options: ImportOptions) -> Iterator[PlannedBlob]:
    for blob in plan_blobs(inventory, options.of_draft, prefix=DRAFT_PREFIX):
        tensors = (replace(tensor, name=DRAFT_PREFIX + tensor.name) for tensor in blob.tensors)
        yield PlannedBlob.of(DRAFT_PREFIX + blob.name, tensors, blob.options)


def plan_blobs(
    inventory: Inventory,
    options: ImportOptions,
    prefix: str = "",
) -> tuple[PlannedBlob, ...]:
    """Return the tensor blobs of a model, or of a draft, whose names rules see with ``prefix``.

    Raises: as `make_plan`, but for names, rules and documents; LimitExceededError for too many
    blobs.
    """
    chooser = _chooser(inventory, options, prefix)
    stacks = form_of_experts(inventory.config, options) is Experts.STACKED
    planner = _plan_stacked if stacks else _plan_packed
    blobs = tuple(
        islice(planner(inventory.weights, chooser), MAX_LAYERS + 1)
    )  # a plan of a million would only be refused
    if len(blobs) > MAX_LAYERS:
        raise LimitExceededError(
            f"limit exceeded: {inventory.path} needs more than {MAX_LAYERS:,} layers, "
            "one for each of its blobs",
            path=inventory.path,
        )
    check_readable(blobs)
    _check_quantizable(blobs, chooser)
    if options.importance is not None:
        # Of tensors that are searched, or that a rule keeps: their importance is not a mistake.
        sources = (
            source
            for tensor in _tensors(blobs)
            if (tensor.quantization is not None and not tensor.copies_codes)
            or chooser.keeps_by_rule(tensor)
            for source in tensor.sources
        )
        options.importance.check({source.name: source.shape for source in sources})
    return blobs


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses the quantization of output tensors.

    The user's rules come first, then the policy for what the source becomes.

    ``inputs_first``: the names of tensors that are transposed when they are quantized.
    """

    options: ImportOptions
    policies: Mapping[QuantType | None, Policy | None]
    prefix: str
    rules: RuleBook
    inputs_first: frozenset[str]

    def rule(self, tensor: OutputTensor) -> Rule | None:
        return self.rules.rule_for(self.prefix + tensor.name)

    def rule_for(self, tensor: OutputTensor) -> Rule | None:
        """Return the rule that decides about the tensor, if it has one that can be followed."""
        rule = self.rule(tensor)
        if rule is None or not self.options.can_follow(rule, tensor.dtype, tensor.shape):
            return None
        return rule

    def keeps_by_rule(self, tensor: OutputTensor) -> bool:
        rule = self.rule(tensor)
        return rule is not None and rule.quant_type is None

    def policy(self, tensor: OutputTensor) -> Policy | None:
        return self.policies[tensor.sources[0].becomes]

    def decide(self, tensor: OutputTensor) -> OutputTensor:
        laid_out, policy = tensor.as_quantized(self.inputs_first), self.policy(tensor)
        rule = self.rule_for(laid_out)
        if rule is not None:
            return self.quantize_tensor(tensor, self.options.quantization_of(rule))
        wanted = None if policy is None else policy.quantization(tensor.name, laid_out.shape)
        return self.quantize_tensor(tensor, wanted)

    def _why_kept(self, tensor: OutputTensor) -> str | None:
        if self.keeps_by_rule(tensor):
            return "is kept by a rule"
        policy, shape = self.policy(tensor), tensor.as_quantized(self.inputs_first).shape
        return None if policy is None else policy.reason(tensor.name, shape)

    def decide_group(self, tensors: list[OutputTensor]) -> list[OutputTensor]:
        """Give a packed group the asked type if groups divide the rows of every weight, else none.

        Rules come first, and may split the group.
        """
        laid_out = [tensor.as_quantized(self.inputs_first) for tensor in tensors]
        ruled = {tensor.name for tensor in laid_out if self.rule_for(tensor) is not None}
        weights = [
            (one, policy)
            for one in laid_out
            if one.name not in ruled
            and (policy := self.policy(one)) is not None
            and policy.wants(one.name, one.shape)
        ]
        wanted = {tensor.name for tensor, _ in weights}
        asked: Quantization | None = None
        for one, policy in weights:
            asked = policy.options.quantization(policy.asked)
            if policy.options.fits(policy.asked, one.shape):
                continue
            asked, why = None, policy.options.misfit(policy.asked, one.shape)
            why = f"is in a group with {quoted(one.name)}, which {why}"
            tensors = [
                replace(tensor, kept=why) if tensor.name in wanted else tensor for tensor in tensors
            ]
            break
        return [
            self.decide(tensor)
            if tensor.name in ruled
            else self.quantize_tensor(tensor, asked if tensor.name in wanted else None)
            for tensor in tensors
        ]

    def quantize_tensor(
        self, tensor: OutputTensor, quantization: Quantization | None
    ) -> OutputTensor:
        """Return the tensor quantized so; None leaves it as its source is, codes included."""
        source = tensor.sources[0]
        if quantization is None and source.quantization is not None:
            return replace(
                tensor,
                quantization=source.quantization,
                dtype=source.dtype,
                global_scale=source.global_scale_shape,
                copies_codes=all(one.holds_codes for one in tensor.sources),
            )
        if quantization is None:
            why = tensor.kept or self._why_kept(tensor)
            return tensor if why == tensor.kept else replace(tensor, kept=why)
        if not tensor.dtype.is_float:
            is_f64 = tensor.dtype is DType.F64
            raise UnsupportedSourceError(
                f"{tensor.name!r} is {tensor.dtype}: only BF16, F16 and F32 weights are quantized",
                tensor=tensor.name,
                hint="Import it without quant"
                + (', or convert it with dtype="float32".' if is_f64 else "."),
            )
        laid_out = tensor.as_quantized(self.inputs_first)
        return replace(
            laid_out,
            quantization=quantization,
            global_scale=self.options.global_scale_of(quantization),
        )


def _chooser(inventory: Inventory, options: ImportOptions, prefix: str) -> _Chooser:
    weights, asked = inventory.weights, options.quant_type
    kind = kind_of(weights)
    wants_types = asked is not None or options.rules or options.target is not None
    if kind != FLOAT and not options.requantize and wants_types:
        raise UnsupportedSourceError(
            f"{inventory.path} is quantized already ({kind})",
            path=inventory.path,
            hint="Import it without quant, rules and a target, or add requantize=True.",
        )
    find_policy = partial(policy_for, inventory.config, options=options, is_draft=bool(prefix))
    policy = find_policy(asked=asked) if asked is not None else None
    policies: dict[QuantType | None, Policy | None] = {None: policy}
    for usual in {one for weight in weights if (one := weight.becomes) is not None}:
        # No runtime of ours takes such weights: they become the nearest type.
        policies[usual] = policy or find_policy(asked=usual)
        if policy is None and usual is QuantType.INT8:
            # Of GGUF, which has groups of 32, and embeddings among them.
            own = replace(options, groups={QuantType.INT8: 32, **options.groups})
            policies[usual] = replace(
                find_policy(asked=usual, options=own), rules=[(lambda _, asked: (asked,), "")]
            )
    return _Chooser(
        options,
        policies,
        prefix,
        RuleBook(options.rules),
        inputs_first(weights, inventory.config, options.profile),
    )


def _plan_packed(weights: Iterable[SourceWeight], chooser: _Chooser) -> Iterator[PlannedBlob]:
    plain, groups = _split(weights, group_of)
    yield from (_plan_single(weight, chooser) for weight in plain)
    for group, members in sorted(groups.items()):
        # For its checks: gaps and unequal experts are errors in both forms, but a rule may have
        # split an exported group.
        projections(
            group, members, one_type=not any(weight.producer == OWN.name for weight in members)
        )
        tensors = chooser.decide_group(
            [_output(weight, chooser.options) for weight in packed_order(group, members)]
        )
        # Ollama takes every tensor of a blob for quantized whose metadata say so (x/server/show.go
        # at fb307609), and a blob's only tensor for the one that its layer names.
        quantized = [tensor for tensor in tensors if tensor.quantization is not None]
        others = [tensor for tensor in tensors if tensor.quantization is None]
        if quantized:
            yield PlannedBlob.of(group, quantized, chooser.options)
        if others:
            apart = others[0].name if len(others) == 1 else f"{group}.unquantized"
            yield PlannedBlob.of(apart if quantized else group, others, chooser.options)


def _plan_stacked(weights: Iterable[SourceWeight], chooser: _Chooser) -> Iterator[PlannedBlob]:
    plain, groups = _split(weights, stacked_group_of)
    stacks = {
        group: [
            chooser.decide(_stack(f"{group}.{name}", experts, chooser.options))
            for name, experts in projections(group, members).items()
        ]
        for group, members in sorted(groups.items())
    }
    # One stacked tensor has one global scale: experts that keep their own stay one blob each, as
    # Ollama leaves them.
    apart = {
        group
        for group, tensors in stacks.items()
        for tensor in tensors
        if tensor.copies_codes
        and any(source.global_scale_shape is not None for source in tensor.sources)
    }
    singles = [*plain, *(weight for group in apart for weight in groups[group])]
    yield from (
        _plan_single(weight, chooser) for weight in sorted(singles, key=lambda weight: weight.name)
    )
    for group, tensors in stacks.items():
        if group in apart:
            continue
        if len({tensor.quantization for tensor in tensors}) == 1:
            yield PlannedBlob.of(group, tensors, chooser.options)
        else:
            yield from (
                PlannedBlob.of(tensor.name, [tensor], chooser.options) for tensor in tensors
            )


def _stack(name: str, experts: tuple[SourceWeight, ...], options: ImportOptions) -> OutputTensor:
    first = _output(experts[0], options)
    return replace(first, name=name, sources=experts, shape=(len(experts), *first.shape))


def _split(
    weights: Iterable[SourceWeight], find_group: Callable[[str], str | None]
) -> tuple[list[SourceWeight], dict[str, list[SourceWeight]]]:
    plain: list[SourceWeight] = []
    groups: dict[str, list[SourceWeight]] = defaultdict(list)
    for weight in weights:
        group = find_group(weight.name)
        (plain if group is None else groups[group]).append(weight)
    return plain, groups


def _plan_single(weight: SourceWeight, chooser: _Chooser) -> PlannedBlob:
    return PlannedBlob.of(
        weight.name, [chooser.decide(_output(weight, chooser.options))], chooser.options
    )


def _output(weight: SourceWeight, options: ImportOptions) -> OutputTensor:
    casts = weight.dtype.is_float or weight.dtype is DType.F64
    dtype = (options.dtype if casts else None) or weight.stored_dtype or weight.dtype
    return OutputTensor(weight.name, (weight,), dtype, weight.shape)


def _tensors(blobs: Iterable[PlannedBlob]) -> Iterator[OutputTensor]:
    return (tensor for blob in blobs for tensor in blob.tensors)


def _files(inventory: Inventory, folder: str = "") -> Iterator[PlannedFile | PlannedCopy]:
    yield from (PlannedFile(folder + name, data) for name, data in inventory.documents.items())
    yield from (PlannedCopy(folder + file.name, file) for file in inventory.kept)


def _check_documents(inventory: Inventory, options: ImportOptions) -> None:
    if not options.profile.is_ollama and OWN_DOCUMENT in inventory.documents:
        raise UnsupportedSourceError(
            f"{inventory.path} contains a file named {OWN_DOCUMENT}, the name of our own record",
            path=inventory.path,
            hint="Rename the file, or move it away.",
        )
    if options.profile.is_ollama and CONFIG_NAME not in inventory.documents:
        raise UnsupportedSourceError(
            f"{inventory.path} has no config.json", hint='Only profile="default" works without it.'
        )
