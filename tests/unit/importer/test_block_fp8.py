"""FP8 matrices and stacks of them: any part of their values, from few reads of its scales."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, write_checkpoint
from support.producers import FP8_CONFIG, block_fp8

from blobstore.io.ranges import FileReader
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders

Run = tuple[int, int]


@pytest.mark.parametrize(
    ("shape", "run", "scales"),
    [
        pytest.param((512, 1, 1), (100, 10), (100, 10), id="ten matrices of one value"),
        pytest.param((2, 384, 384), (384 * 384 + 120, 9), (9, 2), id="two blocks"),
        pytest.param((2, 384, 300), (300 * 127, 600), (0, 6), id="two rows of blocks"),
        pytest.param((384, 384), (384 * 127 + 383, 2), (2, 2), id="from one row to the next"),
    ],
)
def test_values_need_only_their_own_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], run: Run, scales: Run
) -> None:
    """``run``, ``scales``: the first one and how many, of values and of scales that are read."""
    reads: list[Run] = []
    real = FileReader.readinto

    def readinto(reader: FileReader, offset: int, buffer: memoryview) -> None:
        reads.append((offset, len(buffer)))
        real(reader, offset, buffer)

    stored = block_fp8(dtype=np.dtype("f4")).make("model.layers.0.mlp.w", shape)
    source = write_checkpoint(tmp_path, stored.tensors, {**LLAMA_CONFIG, **FP8_CONFIG})
    (weight,) = read_inventory(source).weights
    monkeypatch.setattr(FileReader, "readinto", readinto)
    with closing(SourceReaders()) as readers:
        values = readers.values(weight, *run)
    wanted = stored.values.reshape(-1)[run[0] : sum(run)]
    np.testing.assert_array_equal(values.astype(np.float32).reshape(-1), wanted)
    scale = weight.parts[".scale"]
    places = range(scale.offset, scale.offset + scale.nbytes)
    of_scales = [(offset - scale.offset, nbytes) for offset, nbytes in reads if offset in places]
    assert len(of_scales) <= 8
    assert (min(of_scales)[0], sum(nbytes for _, nbytes in of_scales)) == (
        4 * scales[0],
        4 * scales[1],
    )
