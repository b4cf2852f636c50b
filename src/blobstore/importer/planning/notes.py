"""Notes: what a user should know of a plan before it is carried out: what makes it larger than what was asked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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

_FAR = 0.5
"""A plan that misses more than this share of what the asked type could save is explained."""
_NAMED = 3
"""Kinds of tensors that are named at most."""
_LARGE = 0.05
"""The share of all bytes that makes a kind worth naming."""
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Unquantized tensors whose names differ in numbers only, and why they are kept."""

    name: str
    reason: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        count = f"{self.count:,} tensors, " if self.count > 1 else ""
        return f"{quoted(self.name)} ({count}{self.nbytes:,} bytes) {self.reason}"


def plan_notes(
    blobs: Sequence[PlannedBlob], options: ImportOptions, config: SourceConfig | None, asked: Experts | None
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


def _size_note(blobs: Sequence[PlannedBlob], options: ImportOptions) -> Iterator[str]:
    """Yield why the blobs take far more bits a weight than the asked type does; nothing where they do not."""
    if options.quant_type is None or options.target is not None:
        return
    asked = options.quantization(options.quant_type)
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    weights, nbytes = max(1, sum(tensor.parameters for tensor in tensors)), sum(blob.data_size for blob in blobs)
    bits, wanted = 8 * nbytes / weights, _bits(asked)
    unquantized = sum(tensor.parameters * tensor.dtype.bits for tensor in tensors) / weights
    if bits - wanted <= _FAR * (unquantized - wanted):
        return
    kinds = sorted(_kept(tensors), key=lambda kind: (-kind.nbytes, kind.name))
    large = [kind for kind in kinds if kind.nbytes >= _LARGE * nbytes] or kinds
    reasons = "; ".join(map(str, large[:_NAMED]))
    yield f"{bits:.1f} bits per weight, and {asked} has {wanted:.1f}: {reasons}"


def _bits(quantization: Quantization) -> float:
    """Return the bits a weight that a type takes with its scales, of BF16 weights."""
    parts = quantization.parts((quantization.group_size,), DType.BF16)
    return 8 * sum(part.nbytes for part in parts) / quantization.group_size


def _kept(tensors: Iterable[OutputTensor]) -> Iterator[_Kind]:
    """Yield the tensors that are not quantized, by what their names have in common and why they are kept."""
    kinds: dict[tuple[str, str], _Kind] = {}
    for tensor in tensors:
        if tensor.quantization is None and tensor.kept is not None:
            key = _NUMBER.sub("N", tensor.name), tensor.kept
            found = kinds.get(key)
            name, count, nbytes = (key[0], found.count, found.nbytes) if found is not None else (tensor.name, 0, 0)
            kinds[key] = _Kind(name, tensor.kept, count + 1, nbytes + tensor.nbytes)
    yield from kinds.values()
