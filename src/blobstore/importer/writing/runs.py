"""Runs: a planned blob cut into consecutive ranges of bytes, each made by one thread in one buffer. Pure.

A run holds whole tensors when they are small, and a part of one when it is large. The scales and biases of a large tensor
lie behind its weight, in a gap between two runs: they are written as its weight's runs are made, and hashed later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.source.inventory import SourceTensor
from blobstore.source.weights import SourceWeight

CHUNK = 4 * 2**20
"""Bytes of a run at most, and of source values that are read at a time."""
_VALUE_BYTES = 2
"""Values are not read in larger chunks than BF16's would be, however few bits they are stored in."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that are known: the header. ``at`` is an offset in the blob."""

    data: bytes
    at: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of a source tensor, from its byte ``start`` on."""

    tensor: SourceTensor
    start: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Values:
    """``count`` values of a source from index ``start`` on, decoded, cast, quantized; ``at``: offsets by array suffix."""

    output: OutputTensor
    source: SourceWeight
    start: int
    count: int
    at: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GlobalScale:
    """The one F32 of a double-scaled tensor."""

    output: OutputTensor
    at: int


Step = Constant | Copy | Values | GlobalScale


@dataclass(frozen=True, slots=True)
class Run:
    """The bytes from ``begin`` to ``end`` of a blob, and the ``gap`` behind them that is filled by earlier steps."""

    begin: int
    end: int
    gap: int
    steps: tuple[Step, ...]
    source_bytes: int


@dataclass(frozen=True, slots=True)
class _Atom:
    """What a run can't be cut within."""

    steps: tuple[Step, ...]
    nbytes: int
    source_bytes: int
    gap: int = 0


def runs_of(blob: PlannedBlob) -> Iterator[Run]:
    """Yield the runs of a blob, in the order of their bytes; with their gaps they cover it exactly once."""
    begin = size = source_bytes = 0
    steps: list[Step] = []
    for atom in _atoms(blob):
        if steps and size + atom.nbytes > CHUNK:
            yield Run(begin, begin + size, 0, tuple(steps), source_bytes)
            begin, size, source_bytes, steps = begin + size, 0, 0, []
        size += atom.nbytes
        source_bytes += atom.source_bytes
        steps.extend(atom.steps)
        if atom.gap:
            yield Run(begin, begin + size, atom.gap, tuple(steps), source_bytes)
            begin, size, source_bytes, steps = begin + size + atom.gap, 0, 0, []
    if steps:
        yield Run(begin, begin + size, 0, tuple(steps), source_bytes)


def _atoms(blob: PlannedBlob) -> Iterator[_Atom]:
    header, entries = blob.header, blob.entries
    for start in range(0, len(header), CHUNK):
        part = header[start : start + CHUNK]
        yield _Atom((Constant(part, start),), len(part), 0)
    for tensor in blob.tensors:
        begins = {part.suffix: len(header) + entries[tensor.name + part.suffix].begin for part in tensor.parts}
        if tensor.copies:
            yield from _copies(tensor, begins)
        elif tensor.nbytes <= CHUNK:
            steps = _values(tensor, begins)
            scale = (GlobalScale(tensor, begins[".global_scale"]),) if ".global_scale" in begins else ()
            yield _Atom((*steps, *scale), tensor.nbytes, sum(source.nbytes for source in tensor.sources))
        else:
            yield from _large(tensor, begins)


def _copies(tensor: OutputTensor, begins: Mapping[str, int]) -> Iterator[_Atom]:
    for suffix, begin in begins.items():
        if suffix == ".global_scale":
            yield _Atom((GlobalScale(tensor, begin),), 4, 4)
            continue
        at = begin
        for source in tensor.sources:
            part = source.parts[suffix]
            for start in range(0, part.nbytes, CHUNK):
                nbytes = min(CHUNK, part.nbytes - start)
                yield _Atom((Copy(part, start, nbytes, at + start),), nbytes, nbytes)
            at += part.nbytes


def _values(tensor: OutputTensor, begins: Mapping[str, int]) -> Iterator[Values]:
    at = {suffix: begin for suffix, begin in begins.items() if suffix != ".global_scale"}
    for source in tensor.sources:
        most = source.values_at_once(CHUNK // max(_VALUE_BYTES, source.tensor.dtype.bits // 8, tensor.dtype.bits // 8))
        elements = source.elements
        for start in range(0, elements, most):
            count = min(most, elements - start)
            yield Values(tensor, source, start, count, dict(at))
            for suffix, nbytes in tensor.part_bytes(count).items():
                at[suffix] += nbytes


def _large(tensor: OutputTensor, begins: Mapping[str, int]) -> Iterator[_Atom]:
    """Yield a tensor that no run holds: its weight in parts, its companions in the gap behind the last of them."""
    values = list(_values(tensor, begins))
    gap = tensor.nbytes - sum(tensor.part_bytes(step.count)[""] for step in values)
    for number, step in enumerate(values):
        is_last = number == len(values) - 1
        scale = (GlobalScale(tensor, begins[".global_scale"]),) if is_last and ".global_scale" in begins else ()
        read, elements = step.source.nbytes, step.source.elements
        source_bytes = read * (step.start + step.count) // elements - read * step.start // elements
        yield _Atom((step, *scale), tensor.part_bytes(step.count)[""], source_bytes, gap if is_last else 0)
