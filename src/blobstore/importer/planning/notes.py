"""Notes: what a user should know of a plan before it is carried out: what makes it larger than what was asked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
"""Kinds of tensors that are named at most."""
_LARGE = 0.05
"""The share of all bytes that makes a kind worth naming."""
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors whose names differ in numbers only, with the reason why they take more than the asked type would."""

    name: str
    reason: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        count = f"{self.count:,} tensors, " if self.count > 1 else ""
        return f"{quoted(self.name)} ({count}{self.nbytes:,} bytes) {self.reason}"


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
    nominal, nbytes = _bits(asked), sum(tensor.nbytes for tensor in tensors)
    bits = 8 * nbytes / max(1, sum(tensor.parameters for tensor in tensors))
    if bits <= _FAR * nominal:
        return
    kinds = sorted(_larger(tensors, nominal), key=lambda kind: (-kind.nbytes, kind.name))
    large = [str(kind) for kind in kinds if kind.nbytes >= _LARGE * nbytes]
    yield f"{bits:.1f} bits per weight, and {asked} has {nominal:.1f}: {'; '.join(large[:_NAMED])}"


def _bits(quantization: Quantization) -> float:
    """Return the bits a weight that a type takes with its scales, of BF16 weights."""
    parts = quantization.parts((quantization.group_size,), DType.BF16)
    return 8 * sum(part.nbytes for part in parts) / quantization.group_size


def _larger(tensors: Iterable[OutputTensor], nominal: float) -> Iterator[_Kind]:
    """Yield the tensors that take far more than their share, by what their names have in common and why they do."""
    kinds: dict[tuple[str, str], _Kind] = {}
    for tensor in tensors:
        if 8 * tensor.nbytes > _FAR * nominal * tensor.parameters:
            key = _NUMBER.sub("N", tensor.name), tensor.kept or f"is {tensor.quantization}"
            found = kinds.get(key)
            name, count, nbytes = (key[0], found.count, found.nbytes) if found is not None else (tensor.name, 0, 0)
            kinds[key] = _Kind(name, key[1], count + 1, nbytes + tensor.nbytes)
    yield from kinds.values()
