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
from support.producers import E4M3, FP8_CONFIG, block_fp8

import blobstore
from blobstore import QuantizedArray
from blobstore.io.ranges import FileReader
from blobstore.kernels.quantize import quantize
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders
from blobstore.store.local.store import Store

LAYER = "model.layers.0.mlp.w"
CONFIG = {**LLAMA_CONFIG, **FP8_CONFIG}


@pytest.mark.parametrize(
    ("shape", "start", "count", "first", "read"),
    [
        pytest.param((4096, 1, 1), 1000, 10, 1000, 10, id="ten matrices of one value"),
        pytest.param((4096, 2, 1), 0, 8192, 0, 4096, id="many small matrices"),
        pytest.param((2, 1280, 1280), 1280 * 300 + 5, 9, 2 * 10, 1, id="within a block"),
        pytest.param((2, 1280, 1280), 1280 * 1280 + 120, 9, 10 * 10, 2, id="two blocks"),
        pytest.param((2, 1280, 1280), 1280 * 127, 1280 * 2, 0, 20, id="two rows of blocks"),
        pytest.param((1, 1280, 1280), 1280 * 127 + 1279, 2, 9, 2, id="from one row to the next"),
    ],
)
def test_only_the_scales_that_values_need_are_read_and_in_few_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    start: int,
    count: int,
    first: int,
    read: int,
) -> None:
    reads: list[range] = []
    real = FileReader.readinto

    def readinto(reader: FileReader, offset: int, buffer: memoryview) -> None:
        reads.append(range(offset, offset + len(buffer)))
        real(reader, offset, buffer)

    scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    tensors = {
        f"{LAYER}.weight": np.zeros(shape, np.uint8).view(E4M3),
        f"{LAYER}.weight_scale_inv": np.ones(math.prod(scales), np.float32).reshape(scales),
    }
    (weight,) = read_inventory(write_checkpoint(tmp_path, tensors, CONFIG)).weights
    monkeypatch.setattr(FileReader, "readinto", readinto)
    readers = SourceReaders()
    try:
        assert readers.values(weight, start, count).size == count
    finally:
        readers.close()
    scale = weight.parts[".scale"]
    of_scales = [part for part in reads if scale.offset <= part.start < scale.offset + scale.nbytes]
    assert len(of_scales) <= 8
    assert (min(part.start for part in of_scales) - scale.offset) // 4 == first
    assert sum(map(len, of_scales)) // 4 == read


@pytest.mark.parametrize(
    ("suffix", "dtype", "shape"),
    [
        ("_scale_inv", np.float32, (300, 1, 1)),
        ("_scale_inv", BF16, (3, 2, 130, 33)),
        ("_scale_inv", np.float16, (2, 129, 160)),
        ("_scale", np.float32, (40, 2, 64)),
    ],
)
def test_a_stack_is_imported_with_the_values_of_its_matrices(
    store: Store, tmp_path: Path, suffix: str, dtype: Any, shape: tuple[int, ...]
) -> None:
    stored = block_fp8(suffix, dtype).make(LAYER, shape)
    source = write_checkpoint(tmp_path / "m", stored.tensors, CONFIG)
    with chunks_of(LEAST):
        blobstore.import_model(source, "m", store=store, jobs=3)
    values: Any = stored.values.astype(BF16)
    with blobstore.open_model("m", store=store, verify=True) as model:
        array = model[stored.name].numpy()
        if isinstance(array, QuantizedArray):
            assert bits_of_parts(array) == bits_of_parts(quantize(values, array.quant_type))
        else:
            assert bits(array) == bits(values)
