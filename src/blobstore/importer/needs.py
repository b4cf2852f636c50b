"""Needs: which bytes of which files the steps of a blob are made from. Pure.

They are the bytes that `RunMaker` reads, by the rules of `SourceReaders.values`, or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from blobstore.formats.quant import Quantization
from blobstore.importer.making import Copy, GlobalScale, Step, Values
from blobstore.importer.planning.outputs import OutputTensor
from blobstore.kernels.arrays import numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.weights import Form, SourceTensor, SourceWeight


class Need(NamedTuple):
    """Bytes of a file, by its path: from ``begin`` to ``end``. A plan may have a million."""

    path: str
    begin: int
    end: int


def needed_by(step: Step) -> Iterator[Need]:
    """Yield the bytes that a step is made from; nothing for known ones."""
    match step:
        case Copy(tensor, start, nbytes):
            yield _part(tensor, start, start + nbytes)
        case GlobalScale(output):
            yield from _global_scale(output)
        case Values(output, source, start, count):
            if output.global_scale is not None:
                yield from _global_scale(output)
            else:
                yield from needed_for(source, start, count)


def whole(tensor: SourceTensor) -> Need:
    """Return all bytes of a tensor."""
    return _part(tensor, 0, tensor.nbytes)


def _part(tensor: SourceTensor, begin: int, end: int) -> Need:
    return Need(tensor.file.path, tensor.offset + begin, tensor.offset + end)


def _global_scale(output: OutputTensor) -> Iterator[Need]:
    """Yield what a global scale is found in: the source's own, else all values."""
    for source in output.sources:
        if output.copies_codes:
            yield whole(source.companions[".global_scale"])
        else:
            yield from map(whole, source.parts.values())


def needed_for(source: SourceWeight, start: int, count: int) -> Iterator[Need]:
    """Yield the bytes that ``count`` values of a weight from index ``start`` on are read from."""
    match source.form:
        case Form.PLAIN:
            yield _plain(source, start, count)
        case Form.BLOCK_FP8:
            yield _part(source.tensor, start, start + count)
            *_, rows, cols = source.shape
            scales = BlockRun(rows=rows, cols=cols, first=start, count=count).scales
            yield _items(source.companions[".scale"], scales.start, scales.stop)
        case Form.CODES:
            if source.quantization is None:
                raise AssertionError("codes are quantized")
            yield from _codes(source, source.quantization, start, count)


def _plain(source: SourceWeight, start: int, count: int) -> Need:
    """Return the values; of a transposed weight its whole matrices, where columns are rows."""
    if source.transposed:
        one = math.prod(source.shape[-2:])
        start, end = start // one * one, -(-(start + count) // one) * one
    else:
        end = start + count
    return _items(source.tensor, start, end)


def _codes(
    source: SourceWeight, quantization: Quantization, start: int, count: int
) -> Iterator[Need]:
    for part in quantization.parts((count,), source.companions[".scale"].dtype):
        items = math.prod(part.shape)
        first, nbytes = start * items // count, numpy_dtype(part.dtype).itemsize
        yield _part(source.parts[part.suffix], first * nbytes, (first + items) * nbytes)
    if ".global_scale" in source.companions:
        yield whole(source.companions[".global_scale"])


def _items(tensor: SourceTensor, first: int, stop: int) -> Need:
    """Return elements of a tensor; those narrower than a byte are counted in bytes."""
    nbytes = max(1, tensor.dtype.bits // 8)
    return _part(tensor, first * nbytes, stop * nbytes)
