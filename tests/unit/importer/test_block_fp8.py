"""Stacks of FP8 matrices are decoded in few calls, and read only the scales that they need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits, bits_of_parts
from support.checkpoints import BF16, LLAMA_CONFIG, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.producers import DECODED, E4M3, FP8_CONFIG

import blobstore
from blobstore import QuantizedArray
from blobstore.importer.making import CHUNK
from blobstore.io.ranges import FileReader
from blobstore.kernels.quantize import quantize
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders, SourceWeight
from blobstore.store.local.store import Store

LAYER = "model.layers.0.mlp.w"
CONFIG = {**LLAMA_CONFIG, **FP8_CONFIG}
VALUES = CHUNK // 2
"""The values of a run of a tensor that is not quantized."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The ranges that are read of files."""
    found: list[range] = []
    real = FileReader.readinto

    def readinto(reader: FileReader, offset: int, buffer: memoryview) -> None:
        found.append(range(offset, offset + len(buffer)))
        real(reader, offset, buffer)

    monkeypatch.setattr(FileReader, "readinto", readinto)
    return found


def read_values(folder: Path, shape: tuple[int, ...], start: int, count: int) -> SourceWeight:
    """Write a weight of all codes, read some of its values, and return it."""
    scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    tensors = {
        f"{LAYER}.weight": np.resize(np.arange(256, dtype=np.uint8), shape).view(E4M3),
        f"{LAYER}.weight_scale_inv": np.linspace(1, 2, math.prod(scales), dtype=np.float32).reshape(
            scales
        ),
    }
    (weight,) = read_inventory(write_checkpoint(folder, tensors, CONFIG)).weights
    readers = SourceReaders()
    try:
        assert readers.values(weight, start, count).size == count
    finally:
        readers.close()
    return weight


def scale_reads(weight: SourceWeight, reads: list[range]) -> list[range]:
    """Return which of the reads were of scales, as ranges of their numbers."""
    scale = weight.parts[".scale"]
    return [
        range((part.start - scale.offset) // 4, (part.stop - scale.offset) // 4)
        for part in reads
        if scale.offset <= part.start < scale.offset + scale.nbytes
    ]


@pytest.mark.parametrize(
    "stack", [(VALUES, 1, 1), (VALUES // 2, 2, 1), (VALUES // 512, 4, 128), (128, 128, 128)]
)
def test_a_run_reads_scales_in_few_pieces_whatever_the_matrices(
    tmp_path: Path, reads: list[range], stack: tuple[int, ...]
) -> None:
    weight = read_values(tmp_path, stack, 0, VALUES)
    scales = scale_reads(weight, reads)
    assert len(scales) <= 8
    assert 4 * sum(map(len, scales)) == weight.parts[".scale"].nbytes


@pytest.mark.parametrize(
    ("shape", "start", "count", "first", "read"),
    [
        pytest.param((4096, 1, 1), 1000, 10, 1000, 10, id="ten matrices of one value"),
        pytest.param((2, 1280, 1280), 1280 * 300 + 5, 9, 2 * 10, 1, id="within a block"),
        pytest.param((2, 1280, 1280), 1280 * 1280 + 120, 9, 10 * 10, 2, id="two blocks"),
        pytest.param((2, 1280, 1280), 1280 * 127, 1280 * 2, 0, 20, id="two rows of blocks"),
        pytest.param((1, 1280, 1280), 1280 * 127 + 1279, 2, 9, 2, id="from one row to the next"),
    ],
)
def test_only_the_scales_that_a_run_needs_are_read(
    tmp_path: Path,
    reads: list[range],
    shape: tuple[int, ...],
    start: int,
    count: int,
    first: int,
    read: int,
) -> None:
    scales = scale_reads(read_values(tmp_path, shape, start, count), reads)
    assert (min(part.start for part in scales), sum(map(len, scales))) == (first, read)


@pytest.mark.parametrize(
    ("kind", "shape", "jobs", "chunk"),
    [
        ("fp8 _scale_inv float32", (1100, 1, 1), 1, CHUNK),
        ("fp8 _scale_inv bfloat16", (3, 2, 130, 33), 3, LEAST),
        ("fp8 _scale_inv float16", (2, 129, 160), 3, LEAST),
        ("fp8 _scale float32", (40, 2, 64), 1, LEAST),
    ],
)
def test_a_stack_is_imported_with_the_values_of_its_matrices(
    store: Store, tmp_path: Path, kind: str, shape: tuple[int, ...], jobs: int, chunk: int
) -> None:
    stored = DECODED[kind].make(LAYER, shape)
    source = write_checkpoint(tmp_path / "m", stored.tensors, CONFIG)
    with chunks_of(chunk):
        blobstore.import_model(source, "m", store=store, jobs=jobs)
    values: Any = stored.values.astype(BF16)
    with blobstore.open_model("m", store=store, verify=True) as model:
        array = model[stored.name].numpy()
        if isinstance(array, QuantizedArray):
            assert bits_of_parts(array) == bits_of_parts(quantize(values, array.quant_type))
        else:
            assert bits(array) == bits(values)
