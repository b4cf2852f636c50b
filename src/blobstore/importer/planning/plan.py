"""Plan: which blobs an import writes, and what is in each.

Pure functions that make values of outputs.py; no weight is read.

The writer (writing.py) carries a plan out and decides nothing.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from blobstore.errors import LimitExceededError, UnsupportedSourceError, quoted
from blobstore.formats.checkpoint import CONFIG_NAME
from blobstore.formats.documents import MAX_LAYERS
from blobstore.formats.dtypes import DType
from blobstore.formats.provenance import OWN_DOCUMENT
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.planning.experts import (
    Projection,
    check_names,
    check_quantizable,
    check_readable,
    check_rules,
    group_of,
    packed_order,
    projections,
    stacked_group_of,
)
from blobstore.importer.planning.notes import (
    DRAFT_FOLDER,
    coverage_of,
    describe_model,
    plan_notes,
    storable,
)
from blobstore.importer.planning.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
    PlannedLayer,
)
from blobstore.importer.planning.provenance import own_document
from blobstore.importer.policies.architectures import draft_policy_for, policy_for
from blobstore.importer.policies.options import Experts, ImportOptions
from blobstore.importer.policies.policy import Policy, form_of_experts
from blobstore.importer.policies.roles import inputs_first
from blobstore.importer.policies.rules import Rule, RuleBook
from blobstore.source.assembly import source_weights
from blobstore.source.inventory import Inventory
from blobstore.source.producers import OWN
from blobstore.source.weights import Form, SourceKind, SourceWeight, classify

DRAFT_PREFIX = "draft."
"""What the names of a draft model's tensors begin with (x/create/manifest.go, ollama/ollama@1d7605bf)."""


def make_plan(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None = None
) -> ImportPlan:
    """Return the plan for importing ``inventory``, and a draft model beside it, with ``options``.

    Raises: UnsupportedSourceError (a packed format that is not imported, quantized weights with a
    type asked for, weights that can't be quantized, experts that don't fit together, two tensors of
    one name, no config.json in the ollama profile); UsageError when nothing can be quantized, or a
    rule is for no tensor; LimitExceededError for too many layers.
    """
    form = form_of_experts(inventory.config, options)
    options, asked = replace(options, experts=form), options.experts
    inventory = storable(inventory, options.profile, has_draft=draft is not None)
    draft = storable(draft, options.profile, has_draft=False) if draft is not None else None
    weights = source_weights(inventory)
    blobs = plan_blobs(inventory, weights, options)
    draft_blobs = tuple(_drafted(draft, options)) if draft is not None else ()
    check_names((*blobs, *draft_blobs))
    check_rules((*blobs, *draft_blobs), options)
    coverage = coverage_of(inventory, _tensors(blobs), draft, _tensors(draft_blobs))
    _check_documents(inventory, options)
    layers: tuple[PlannedLayer, ...] = (
        *blobs,
        *_files(inventory),
        *(
            [PlannedFile(OWN_DOCUMENT, own_document(inventory, options, draft, coverage))]
            if options.profile.own_document
            else []
        ),
        *draft_blobs,
        *(_files(draft, DRAFT_FOLDER) if draft is not None else ()),
        *(PlannedFile(None, data, media_type) for media_type, data in options.modelfile.layers()),
    )
    if len(layers) > MAX_LAYERS:
        message = (
            f"limit exceeded: {inventory.path} needs {len(layers):,} layers, at most {MAX_LAYERS:,}"
        )
        raise LimitExceededError(message, path=inventory.path)
    inventories = (inventory,) if draft is None else (inventory, draft)
    notes = tuple(plan_notes(blobs, options, inventory.config, asked))
    config = describe_model(inventory, weights, options, draft)
    return ImportPlan(inventories, options, layers, config, coverage, notes=notes)


def _drafted(inventory: Inventory, options: ImportOptions) -> Iterator[PlannedBlob]:
    """Yield the blobs of a draft model, under the names that its tensors have beside a model's."""
    for blob in plan_blobs(
        inventory, source_weights(inventory), options.of_draft, prefix=DRAFT_PREFIX
    ):
        tensors = tuple(replace(tensor, name=DRAFT_PREFIX + tensor.name) for tensor in blob.tensors)
        yield _blob(DRAFT_PREFIX + blob.name, tensors, blob.options)


def plan_blobs(
    inventory: Inventory,
    weights: tuple[SourceWeight, ...],
    options: ImportOptions,
    prefix: str = "",
) -> tuple[PlannedBlob, ...]:
    """Return the tensor blobs of a model, or of a draft, whose names rules see with ``prefix``.

    Raises: as `make_plan`, but for names, rules and documents; LimitExceededError for too many
    blobs.
    """
    chooser = _chooser(inventory, weights, options, prefix)
    stacks = form_of_experts(inventory.config, options) is Experts.STACKED
    planner = _plan_stacked if stacks else _plan_packed
    blobs = tuple(
        islice(planner(weights, chooser), MAX_LAYERS + 1)
    )  # a plan of a million would only be refused
    if len(blobs) > MAX_LAYERS:
        message = f"limit exceeded: {inventory.path} needs more than {MAX_LAYERS:,} layers, one for each of its blobs"
        raise LimitExceededError(message, path=inventory.path)
    check_readable(blobs)
    check_quantizable(blobs, options, chooser.policies[Form.PLAIN])
    if options.importance is not None:
        kept = (
            tensor for blob in blobs for tensor in blob.tensors if chooser.keeps_by_rule(tensor)
        )
        sources = (
            *(source for blob in blobs for source in blob.weighed_sources),
            *(s for one in kept for s in one.sources),
        )
        options.importance.check({source.name: source.shape for source in sources})
    return blobs


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses the quantization of output tensors: by a rule of the user's, else by the policy for the source's form.

    ``inputs_first``: the names of tensors that are transposed when they are quantized.
    """

    options: ImportOptions
    policies: dict[Form, Policy | None]
    prefix: str
    rules: RuleBook
    inputs_first: frozenset[str]

    def rule(self, tensor: OutputTensor) -> Rule | None:
        """Return the user's rule for the tensor, if there is one."""
        return self.rules.rule_for(self.prefix + tensor.name)

    def followed(self, tensor: OutputTensor) -> Rule | None:
        """Return the rule that decides about the tensor, if it has one that can be followed."""
        rule = self.rule(tensor)
        return (
            rule
            if rule is not None and self.options.can_follow(rule, tensor.dtype, tensor.shape)
            else None
        )

    def keeps_by_rule(self, tensor: OutputTensor) -> bool:
        """Return True when a rule keeps the tensor: what is said about its quantization is then no mistake."""
        rule = self.rule(tensor)
        return rule is not None and rule.quant_type is None

    def decide(self, tensor: OutputTensor) -> OutputTensor:
        """Return the tensor with the quantization that it gets, or as it is."""
        laid_out = tensor.laid_out(self.inputs_first)
        rule = self.followed(laid_out)
        if rule is not None:
            return self.quantized(tensor, self.options.ruled(rule))
        policy = self.policies[tensor.sources[0].form]
        return self.quantized(
            tensor, policy.quantization(tensor.name, laid_out.shape) if policy is not None else None
        )

    def _why_kept(self, tensor: OutputTensor) -> str | None:
        """Return why the tensor is not quantized; None when nothing was asked for it."""
        if self.keeps_by_rule(tensor):
            return "is kept by a rule"
        policy = self.policies[tensor.sources[0].form]
        return (
            None
            if policy is None
            else policy.reason(tensor.name, tensor.laid_out(self.inputs_first).shape)
        )

    def decide_group(self, tensors: list[OutputTensor]) -> list[OutputTensor]:
        """Give a packed group one type: the asked one when groups divide the rows of every weight, else none.

        Rules come first, and may split the group.
        """
        laid_out = [tensor.laid_out(self.inputs_first) for tensor in tensors]
        ruled = {tensor.name for tensor in laid_out if self.followed(tensor) is not None}
        weights = [
            tensor for tensor in laid_out if tensor.name not in ruled and self._wants(tensor)
        ]
        # Without a type asked for, only FP8 is quantized.
        quant_type = self.options.quant_type or QuantType.MXFP8
        misfit = next(
            (tensor for tensor in weights if not self.options.fits(quant_type, tensor.shape)), None
        )
        wanted = {tensor.name for tensor in weights}
        if misfit is not None:
            why = f"is in a group with {quoted(misfit.name)}, which {self.options.misfit(quant_type, misfit.shape)}"
            kept = [replace(one, kept=why) if one.name in wanted else one for one in tensors]
            return [
                self.decide(one) if one.name in ruled else self.quantized(one, None) for one in kept
            ]
        asked = self.options.quantization(quant_type)
        return [
            self.decide(one)
            if one.name in ruled
            else self.quantized(one, asked if one.name in wanted else None)
            for one in tensors
        ]

    def _wants(self, tensor: OutputTensor) -> bool:
        policy = self.policies[tensor.sources[0].form]
        return policy is not None and policy.wants(tensor.name, tensor.shape)

    def quantized(self, tensor: OutputTensor, quantization: Quantization | None) -> OutputTensor:
        """Return the tensor quantized so; None leaves it as its source is, codes included."""
        source = tensor.sources[0]
        if quantization is None and source.form is Form.CODES:
            scale = source.global_scale_shape
            return replace(
                tensor,
                quantization=source.quantization,
                dtype=source.dtype,
                global_scale=scale,
                copies_codes=True,
            )
        if quantization is None:
            return (
                tensor if tensor.kept is not None else replace(tensor, kept=self._why_kept(tensor))
            )
        if not tensor.dtype.is_float:
            raise _unquantizable(tensor)
        double = self.options.global_scale and quantization.quant_type is QuantType.NVFP4
        laid_out = tensor.laid_out(self.inputs_first)
        return replace(laid_out, quantization=quantization, global_scale=(1,) if double else None)


def _chooser(
    inventory: Inventory, weights: tuple[SourceWeight, ...], options: ImportOptions, prefix: str
) -> _Chooser:
    kind, asked = classify(weights), options.quant_type
    wants_types = asked is not None or options.rules or options.target is not None
    if kind is not SourceKind.FLOAT and not options.requantize and wants_types:
        raise UnsupportedSourceError(
            f"{inventory.path} is quantized already ({kind.value})",
            path=inventory.path,
            hint="Import it without `quant`, `rules` and a target, or add `requantize=True` to quantize it again.",
        )
    find_policy = draft_policy_for if prefix else policy_for
    policy = find_policy(inventory.config, asked, options) if asked is not None else None
    policies: dict[Form, Policy | None] = dict.fromkeys(Form, policy)
    if policy is None and any(weight.form is Form.BLOCK_FP8 for weight in weights):
        # FP8 is for no runtime of ours: it becomes the nearest type. Everything else stays what it
        # is.
        policies[Form.BLOCK_FP8] = find_policy(inventory.config, QuantType.MXFP8, options)
    turned = inputs_first(weights, inventory.config, options.profile)
    return _Chooser(options, policies, prefix, RuleBook(options.rules), turned)


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
            yield _blob(group, quantized, chooser.options)
        if others:
            apart = others[0].name if len(others) == 1 else f"{group}.unquantized"
            yield _blob(apart if quantized else group, others, chooser.options)


def _plan_stacked(weights: Iterable[SourceWeight], chooser: _Chooser) -> Iterator[PlannedBlob]:
    plain, groups = _split(weights, stacked_group_of)
    stacks = {
        group: [
            chooser.decide(_stacked(group, projection, chooser.options))
            for projection in projections(group, members)
        ]
        for group, members in sorted(groups.items())
    }
    # One stacked tensor has one global scale: experts that keep their own stay one blob each, as
    # Ollama leaves them.
    apart = {
        group
        for group, tensors in stacks.items()
        if any(_has_own_scales(tensor) for tensor in tensors)
    }
    singles = [*plain, *(weight for group in apart for weight in groups[group])]
    yield from (
        _plan_single(weight, chooser) for weight in sorted(singles, key=lambda weight: weight.name)
    )
    for group, tensors in stacks.items():
        if group in apart:
            continue
        if len({tensor.quantization for tensor in tensors}) == 1:
            yield _blob(group, tensors, chooser.options)
        else:
            yield from (_blob(tensor.name, [tensor], chooser.options) for tensor in tensors)


def _stacked(group: str, projection: Projection, options: ImportOptions) -> OutputTensor:
    first = _output(projection.weights[0], options)
    shape = (len(projection.weights), *first.shape)
    return replace(
        first, name=f"{group}.{projection.name}", sources=projection.weights, shape=shape
    )


def _has_own_scales(tensor: OutputTensor) -> bool:
    return tensor.copies_codes and any(
        source.global_scale_shape is not None for source in tensor.sources
    )


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
    return _blob(weight.name, [chooser.decide(_output(weight, chooser.options))], chooser.options)


def _output(weight: SourceWeight, options: ImportOptions) -> OutputTensor:
    casts = options.dtype is not None and (weight.dtype.is_float or weight.dtype is DType.F64)
    return OutputTensor(
        weight.name,
        (weight,),
        options.dtype if casts and options.dtype else weight.dtype,
        weight.shape,
    )


def _unquantizable(tensor: OutputTensor) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{tensor.name!r} is {tensor.dtype}: only BF16, F16 and F32 weights are quantized",
        tensor=tensor.name,
        hint="Import it without `quant`, or convert it with `dtype`."
        if tensor.dtype is DType.F64
        else "Import it without `quant`.",
    )


def _blob(name: str, tensors: Iterable[OutputTensor], options: ImportOptions) -> PlannedBlob:
    members = tuple(tensors)
    return PlannedBlob(name, members, _metadata(members, options), options)


def _metadata(tensors: tuple[OutputTensor, ...], options: ImportOptions) -> Mapping[str, str]:
    """Return the blob's metadata: its quantization when all tensors agree, else each tensor's.

    And what is transposed.
    """
    turned = {f"{tensor.name}.transposed": "true" for tensor in tensors if tensor.transposed}
    described = {
        tensor.name: _described(tensor, options)
        for tensor in tensors
        if tensor.quantization is not None
    }
    if len({tuple(one.items()) for one in described.values()}) == 1:
        shared = _shared(*(next(iter(described.values())).items()))
        return {**shared, **turned} if turned else shared
    return {
        f"{name}.{key}": value for name, one in described.items() for key, value in one.items()
    } | turned


@functools.cache
def _shared(*items: tuple[str, str]) -> Mapping[str, str]:
    """Return the same mapping for the same items: a model has hundreds of thousands of blobs and a few quantizations."""
    return MappingProxyType(dict(items))


def _described(tensor: OutputTensor, options: ImportOptions) -> dict[str, str]:
    if tensor.quantization is None:
        return {}
    described = {
        "quant_type": tensor.quantization.quant_type.value,
        "group_size": str(tensor.quantization.group_size),
    }
    if tensor.copies_codes and tensor.sources[0].producer in options.profile.unstated_group_sizes:
        del described["group_size"]
    return described


def _tensors(blobs: Iterable[PlannedBlob]) -> Iterator[OutputTensor]:
    return (tensor for blob in blobs for tensor in blob.tensors)


def _files(inventory: Inventory, folder: str = "") -> Iterator[PlannedFile | PlannedCopy]:
    """Yield a checkpoint's documents, then its other files, each under its path."""
    yield from (PlannedFile(folder + name, data) for name, data in inventory.documents.items())
    yield from (PlannedCopy(folder + file.name, file) for file in inventory.kept)


def _check_documents(inventory: Inventory, options: ImportOptions) -> None:
    if options.profile.own_document and OWN_DOCUMENT in inventory.documents:
        raise UnsupportedSourceError(
            f"{inventory.path} contains a file named {OWN_DOCUMENT}, the name of blobstore's own record",
            path=inventory.path,
            hint="Rename the file, or move it away.",
        )
    if not options.profile.own_document and CONFIG_NAME not in inventory.documents:
        raise UnsupportedSourceError(
            f"{inventory.path} has no config.json", hint="Only `profile='default'` can do without."
        )
