"""Stacks of FP8 matrices are decoded in few calls and read only the scales they need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import bits_of_parts
from support.checkpoints import BF16, LLAMA_CONFIG, write_checkpoint
from support.chunks import LEAST, chunks_of
from support.producers import DECODED, E4M3, FP8_CONFIG
from support.weights import raw

import blobstore
from blobstore import QuantizedArray
from blobstore.importer.making import CHUNK
from blobstore.io.ranges import FileReader
from blobstore.kernels import native as choice
from blobstore.kernels.native import active
from blobstore.kernels.quantize import quantize
from blobstore.kernels.scales import BlockRun
from blobstore.source.folders import SourceTensor
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders, SourceWeight
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
LAYER = "model.layers.0.mlp.w"
CONFIG = {**LLAMA_CONFIG, **FP8_CONFIG}
VALUES = CHUNK // 2
"""The values of a run of a tensor that is not quantized."""
STACKS = [
    (VALUES, 1, 1),
    (VALUES // 2, 1, 2),
    (VALUES // 2, 2, 1),
    (VALUES // 512, 4, 128),
    (128, 128, 128),
]

any_stack = pytest.mark.parametrize("stack", STACKS, ids=str)


class Watch:
    """The decoding calls of the kernel in use, and the bytes read of each file range."""

    name = "watch"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernel, self._readinto = active(), FileReader.readinto
        self.runs: list[BlockRun] = []
        self.read: list[range] = []
        monkeypatch.setattr(choice, "_active", self)
        watch = self

        def readinto(reader: FileReader, offset: int, buffer: memoryview) -> None:
            watch.read.append(range(offset, offset + len(buffer)))
            watch._readinto(reader, offset, buffer)

        monkeypatch.setattr(FileReader, "readinto", readinto)

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        """See `blobstore.kernels.Kernel`."""
        self.runs.append(run)
        self._kernel.decode_blocks(codes, scales, run, out)

    def reads_of(self, tensor: SourceTensor) -> list[range]:
        """Return what was read of a tensor, as ranges of its bytes."""
        begin, end = tensor.offset, tensor.offset + tensor.nbytes
        return [
            range(part.start - begin, part.stop - begin)
            for part in self.read
            if begin <= part.start < end
        ]


def block_weight(folder: Path, shape: tuple[int, ...]) -> SourceWeight:
    """Write a checkpoint of one weight with all codes and return the weight."""
    scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    tensors = {
        f"{LAYER}.weight": np.resize(np.arange(256, dtype=np.uint8), shape).view(E4M3),
        f"{LAYER}.weight_scale_inv": np.linspace(
            1e-4, 1e-2, math.prod(scales), dtype=np.float32
        ).reshape(scales),
    }
    (weight,) = read_inventory(write_checkpoint(folder, tensors, CONFIG)).weights
    return weight


@any_stack
def test_a_run_takes_few_calls_whatever_the_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: tuple[int, ...]
) -> None:
    weight, readers, watch = block_weight(tmp_path, stack), SourceReaders(), Watch(monkeypatch)
    try:
        assert readers.values(weight, 0, VALUES).size == VALUES
    finally:
        readers.close()
    assert len(watch.runs) <= 8
    scales = watch.reads_of(weight.parts[".scale"])
    assert sum(map(len, scales)) == weight.parts[".scale"].nbytes
    assert max(map(len, scales)) <= 4 * 2**18


@pytest.mark.parametrize(
    ("shape", "start", "count", "first", "read"),
    [
        pytest.param((4096, 1, 1), 1000, 10, 1000, 10, id="ten matrices of one value"),
        pytest.param((2, 1280, 1280), 1280 * 300 + 5, 9, 2 * 10, 1, id="within a block"),
        pytest.param(
            (2, 1280, 1280), 1280 * 1280 + 120, 9, 10 * 10, 2, id="two blocks of the second matrix"
        ),
        pytest.param((2, 1280, 1280), 1280 * 127, 1280 * 2, 0, 20, id="two rows of blocks"),
        pytest.param((1, 1280, 1280), 1280 * 127 + 1279, 2, 9, 2, id="from one row to the next"),
    ],
)
def test_only_the_scales_that_a_run_needs_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    start: int,
    count: int,
    first: int,
    read: int,
) -> None:
    weight, readers, watch = block_weight(tmp_path, shape), SourceReaders(), Watch(monkeypatch)
    try:
        readers.values(weight, start, count)
    finally:
        readers.close()
    parts = watch.reads_of(weight.parts[".scale"])
    assert min(part.start for part in parts) == 4 * first
    assert sum(map(len, parts)) == 4 * read


@pytest.mark.parametrize(("jobs", "chunk"), [(1, CHUNK), (3, LEAST)])
@pytest.mark.parametrize("kind", [kind for kind in DECODED if "_inv" in kind])
@pytest.mark.parametrize(
    "shape", [(1100, 1, 1), (3, 2, 130, 33), (40, 2, 64), (2, 129, 160)], ids=str
)
def test_a_stack_is_imported_with_the_values_of_its_matrices(
    store: Store, tmp_path: Path, kind: str, shape: tuple[int, ...], jobs: int, chunk: int
) -> None:
    stored = DECODED[kind].make(LAYER, shape)
    source = write_checkpoint(tmp_path / "m", stored.tensors, CONFIG)
    with chunks_of(chunk):
        blobstore.import_model(source, "m", store=store, jobs=jobs)
    values = stored.values.astype(BF16)
    with blobstore.open_model("m", store=store, verify=True) as model:
        array = model[stored.name].numpy()
        if isinstance(array, QuantizedArray):
            assert bits_of_parts(array) == bits_of_parts(quantize(values, array.quant_type))
        else:
            np.testing.assert_array_equal(raw(array), raw(values))
