"""Candidates: the tensors of a model that types are chosen for, and the types. Pure; no weight is read.

A candidate is one tensor, or all weights of a packed group of experts, which get one type together. It is what a policy
quantizes, but for its name tests' one exception: token embeddings, which are a large part of a small model. Tensors matched
by a user's rule are excluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.experts import group_of
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.importer.planning.plan import plan_blobs
from blobstore.importer.policies.architectures import policy_for
from blobstore.importer.policies.layouts import inputs_first
from blobstore.importer.policies.rules import Rule, RuleBook, escaped
from blobstore.importer.policies.runtimes import form_of_experts
from blobstore.importer.profiles import Experts
from blobstore.quant import Quantization, QuantType
from blobstore.source.assembly import source_weights
from blobstore.source.inventory import Inventory

_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight", "wte.weight")
_MIN_ELEMENTS = 1024
_NO_TOKENS = ("per_layer", "vision", "visual", "audio")


@dataclass(frozen=True)
class Candidate:
    """Tensors that get one type together, the patterns that name them all, and what each type takes: bytes by type.

    None keeps them as their sources are.
    """

    tensors: tuple[OutputTensor, ...]
    patterns: tuple[str, ...]
    nbytes: Mapping[Quantization | None, int]

    @property
    def types(self) -> tuple[Quantization, ...]:
        """The types to choose from, besides keeping."""
        return tuple(kind for kind in self.nbytes if kind is not None)

    @property
    def smallest(self) -> Quantization | None:
        """The type that takes least."""
        return min(self.nbytes, key=lambda kind: self.nbytes[kind])

    def rules(self, quantization: Quantization | None) -> Iterator[Rule]:
        """Yield the rules that give the tensors that type."""
        return (Rule.of(pattern, quantization) for pattern in self.patterns)


def candidates_of(inventory: Inventory, options: ImportOptions) -> list[Candidate]:
    """Return the candidates of a checkpoint, in the order of its blobs. Raises: as `plan_blobs`."""
    undecided = replace(options, quant_type=None, group_size=None, rules=(), importance=None)
    wanted = _Wanted(inventory, options)
    types = tuple(_types(options))
    found = []
    weights = source_weights(inventory)
    turned = inputs_first(weights, inventory.config, options.profile)
    for blob in plan_blobs(inventory, weights, undecided):
        laid_out = (tensor.laid_out(turned) for tensor in blob.tensors)
        tensors = tuple(tensor for tensor in laid_out if wanted.includes(tensor))
        together = form_of_experts(inventory.config, options) is Experts.PACKED
        for members in [tensors] if together and tensors else [(tensor,) for tensor in tensors]:
            fitting = [kind for kind in types if all(_fits(kind, tensor, options) for tensor in members)]
            nbytes = {kind: sum(_output(tensor, kind, options).nbytes for tensor in members) for kind in (None, *fitting)}
            found.append(Candidate(members, _patterns(blob, members), nbytes))
    return found


class _Wanted:
    """Says which tensors types are chosen for."""

    def __init__(self, inventory: Inventory, options: ImportOptions) -> None:
        self._options = options
        self._rules = RuleBook(options.rules)
        # Without a type asked for, the general one: which tensors are wanted hardly depends on it.
        self._policy = policy_for(inventory.config, options.quant_type or QuantType.INT4, options)

    def includes(self, tensor: OutputTensor) -> bool:
        """Return True for a float matrix that the policy quantizes, or that embeds tokens, and that no rule decides."""
        rule = self._rules.rule_for(tensor.name)
        if rule is not None and self._options.can_follow(rule, tensor.dtype, tensor.shape):
            return False
        wanted = self._policy.wants(tensor.name, tensor.shape) or _embeds_tokens(tensor.name, tensor.shape)
        return wanted and tensor.sources[0].dtype.is_float


def _embeds_tokens(name: str, shape: tuple[int, ...]) -> bool:
    embeds = name.endswith(_EMBEDDINGS) and not any(word in name for word in _NO_TOKENS)
    return embeds and len(shape) == 2 and math.prod(shape) >= _MIN_ELEMENTS  # noqa: PLR2004  # a matrix


def _types(options: ImportOptions) -> Iterator[Quantization]:
    """Yield the types of the asked family, or of both, in all groups that the user leaves open."""
    asked = options.quant_type
    for kind in QuantType:
        if asked is None or kind.is_affine is asked.is_affine:
            fixed = kind in options.groups or (kind is asked and options.group_size is not None)
            sizes: Sequence[int] = (options.quantization(kind).group_size,) if fixed else kind.group_sizes
            yield from (Quantization(kind, size) for size in sizes)


def _fits(quantization: Quantization, tensor: OutputTensor, options: ImportOptions) -> bool:
    if options.global_scale and quantization.quant_type is QuantType.NVFP4 and _embeds_tokens(tensor.name, tensor.shape):
        return False  # mlx_lm.py runs no embedding that has one
    aligned_to = options.profile.aligned_to.get(quantization.quant_type, 1)
    return tensor.shape[-1] % math.lcm(quantization.group_size, aligned_to) == 0


def _output(tensor: OutputTensor, quantization: Quantization | None, options: ImportOptions) -> OutputTensor:
    """Return the tensor, which is as it is kept, quantized so."""
    if quantization is None:
        return tensor
    double = options.global_scale and quantization.quant_type is QuantType.NVFP4
    dtype = options.dtype or tensor.sources[0].dtype
    scale = (1,) if double else None
    return replace(tensor, quantization=quantization, dtype=dtype, global_scale=scale, copies_codes=False)


def _patterns(blob: PlannedBlob, members: tuple[OutputTensor, ...]) -> tuple[str, ...]:
    """Return one pattern for a whole packed group, where that names nothing else that it could quantize; else the names."""
    names = {tensor.name for tensor in members}
    grouped = len(members) > 1 and all(group_of(name) == blob.name for name in names)
    if grouped and all(tensor.name in names or len(tensor.shape) < 2 for tensor in blob.tensors):  # noqa: PLR2004
        return (f"{escaped(blob.name)}.*",)
    return tuple(escaped(tensor.name) for tensor in members)
