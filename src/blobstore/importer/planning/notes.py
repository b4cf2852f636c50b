"""Notes: what a user should know of a plan before it is carried out: what makes it larger than what was asked. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from blobstore.checkpoint import SourceConfig
from blobstore.dtypes import DType
from blobstore.errors import quoted
from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.experts import stacked_group_of
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.importer.policies.runtimes import needs_stacked_experts
from blobstore.importer.profiles import Experts
from blobstore.quant import Quantization

_FAR = 1.5
"""A plan with this many times the bits of the asked type is explained."""
_NAMED = 3
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


@dataclass(slots=True)
class _Kind:
    """Tensors whose names differ in numbers only, which are larger than they would be in the asked type."""

    reason: str
    tensors: int = 0
    nbytes: int = 0
    names: set[str] = field(default_factory=set)


def plan_notes(
    blobs: Iterable[PlannedBlob], options: ImportOptions, config: SourceConfig | None, asked: Experts | None
) -> Iterator[str]:
    """Yield the notes of a plan. ``asked``: the form of experts that the user asked for, if any."""
    yield from _experts_note(blobs, options, config, asked)
    yield from _size_note(blobs, options)


def _experts_note(
    blobs: Iterable[PlannedBlob], options: ImportOptions, config: SourceConfig | None, asked: Experts | None
) -> Iterator[str]:
    """Yield that experts are stacked because Ollama reads no others, or that they are not though it needs them to be."""
    if config is None or not needs_stacked_experts(config):
        return
    if not any(stacked_group_of(source.name) for blob in blobs for source in blob.sources):
        return
    if asked is Experts.PACKED:
        yield f"Ollama does not run {config.architecture} with packed experts: it needs --experts stacked"
    elif asked is None and options.profile.experts is Experts.PACKED:
        yield f"experts are stacked, because Ollama does not run {config.architecture} with packed ones"


def _size_note(blobs: Iterable[PlannedBlob], options: ImportOptions) -> Iterator[str]:
    """Yield what makes the blobs take far more bits a weight than the asked type does; nothing where they do not."""
    if options.quant_type is None or options.target is not None:
        return
    asked = options.quantization(options.quant_type)
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    nominal = _bits(asked)
    bits = 8 * sum(tensor.nbytes for tensor in tensors) / max(1, sum(tensor.parameters for tensor in tensors))
    if bits <= _FAR * nominal:
        return
    kinds = sorted(_larger(tensors, nominal).items(), key=lambda item: (-item[1].nbytes, item[0]))
    named = "; ".join(_described(name, kind) for name, kind in kinds[:_NAMED])
    others = len(kinds) - _NAMED
    more = f"; and {others} smaller kinds" if others > 1 else "; and one smaller kind" if others == 1 else ""
    yield f"{bits:.1f} bits per weight, and {asked} has {nominal:.1f}: {named}{more}"


def _bits(quantization: Quantization) -> float:
    """Return the bits a weight that a type takes with its scales, of BF16 weights."""
    parts = quantization.parts((quantization.group_size,), DType.BF16)
    return 8 * sum(part.nbytes for part in parts) / quantization.group_size


def _larger(tensors: Iterable[OutputTensor], nominal: float) -> dict[str, _Kind]:
    """Return the tensors that take more than their share, by what their names have in common."""
    kinds: defaultdict[tuple[str, str], _Kind] = defaultdict(lambda: _Kind(""))
    for tensor in tensors:
        if 8 * tensor.nbytes > _FAR * nominal * tensor.parameters:
            reason = tensor.kept or f"is {tensor.quantization}"
            kind = kinds[_NUMBER.sub("N", tensor.name), reason]
            kind.reason, kind.tensors, kind.nbytes = reason, kind.tensors + 1, kind.nbytes + tensor.nbytes
            kind.names.add(tensor.name)
    return {(min(kind.names) if kind.tensors == 1 else name): kind for (name, _), kind in kinds.items()}


def _described(name: str, kind: _Kind) -> str:
    count = f"{kind.tensors:,} tensors, " if kind.tensors > 1 else ""
    return f"{quoted(name)} ({count}{kind.nbytes:,} bytes) {kind.reason}"
