"""FP8 matrices and stacks of them: any part of their values, from few reads of its scales."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import BF16, LLAMA_CONFIG, write_checkpoint
from support.producers import FP8_CONFIG, block_fp8

from blobstore.io.ranges import FileReader
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders


@pytest.mark.parametrize(
    ("shape", "dtype", "start", "count", "first", "read"),
    [
        pytest.param((4096, 1, 1), "f4", 1000, 10, 1000, 10, id="ten matrices of one value"),
        pytest.param((64, 2, 1), "f2", 0, 128, 0, 64, id="many small matrices"),
        pytest.param((2, 640, 640), "f4", 640 * 300 + 5, 9, 2 * 5, 1, id="within a block"),
        pytest.param((2, 640, 640), BF16, 640 * 640 + 120, 9, 5 * 5, 2, id="two blocks"),
        pytest.param((2, 640, 600), "f4", 600 * 127, 600 * 2, 0, 10, id="two rows of blocks"),
        pytest.param((640, 640), "f4", 640 * 127 + 639, 2, 4, 2, id="from one row to the next"),
    ],
)
def test_values_need_only_their_own_scales(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    dtype: Any,
    start: int,
    count: int,
    first: int,
    read: int,
) -> None:
    reads: list[tuple[int, int]] = []
    real = FileReader.readinto

    def readinto(reader: FileReader, offset: int, buffer: memoryview) -> None:
        reads.append((offset, len(buffer)))
        real(reader, offset, buffer)

    stored = block_fp8(dtype=np.dtype(dtype)).make("model.layers.0.mlp.w", shape)
    source = write_checkpoint(tmp_path, stored.tensors, {**LLAMA_CONFIG, **FP8_CONFIG})
    (weight,) = read_inventory(source).weights
    monkeypatch.setattr(FileReader, "readinto", readinto)
    readers = SourceReaders()
    try:
        values = readers.values(weight, start, count)
    finally:
        readers.close()
    wanted = stored.values.reshape(-1)[start : start + count]
    np.testing.assert_array_equal(values.astype(np.float32).reshape(-1), wanted)
    scale, size = weight.parts[".scale"], np.dtype(dtype).itemsize
    places = range(scale.offset, scale.offset + scale.nbytes)
    of_scales = [(offset - scale.offset, nbytes) for offset, nbytes in reads if offset in places]
    assert len(of_scales) <= 8
    assert min(offset for offset, _ in of_scales) == first * size
    assert sum(nbytes for _, nbytes in of_scales) == read * size
