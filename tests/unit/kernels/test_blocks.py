"""Block FP8: every kernel decodes runs of it to the bits of a computation with ml_dtypes."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.weights import BF16, DTYPES, F16, F32, KERNELS, every_16_bit_value, raw

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType
from blobstore.kernels.scales import BlockRun

Array = np.ndarray[Any, Any]

CODES = {
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
NAN = 0x7FC0
# Matrices ``[number, rows, cols]`` from one value a scale to several blocks, cut at both edges;
# rows shorter than a block or than any vector.
STACKS = [(70, 1, 1), (9, 3, 31), (3, 257, 33), (1, 300, 260)]

any_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def decoded(codes: Array, scales: Array, run: BlockRun, kernel: kernels.Kernel) -> Array:
    out = np.empty(run.count, BF16)
    kernels.decode_blocks_into(codes, scales, out, run, kernel=kernel)
    return out


def expected_bits(codes: Array, scales: Array, code: DType = DType.F8_E4M3) -> Array:
    """Return the BF16 bits of scaled codes: exact products, rounded to float32, then to BF16."""
    with np.errstate(all="ignore"):
        products = codes.view(CODES[code]).astype(np.float64) * scales.astype(np.float64)
        values = products.astype(np.float32).astype(BF16)
    return np.where(np.isnan(values), np.uint16(NAN), raw(values))


def stacked(
    stack: tuple[int, int, int],
    dtype: Any = F32,
    code: DType = DType.F8_E4M3,
    block: tuple[int, int] = (128, 128),
) -> tuple[Array, Array, Array]:
    """Return random codes, scales that make usual weights, and the bits of the values, all flat."""
    height, width = block
    number, rows, cols = stack
    generator = np.random.default_rng(stack)
    codes = generator.integers(0, 256, stack, dtype=np.uint8)
    blocks = number, -(-rows // height), -(-cols // width)
    scales = (10.0 ** generator.uniform(-7, 1, blocks)).astype(dtype)
    of_each = scales.repeat(height, axis=1).repeat(width, axis=2)[:, :rows, :cols]
    return codes.reshape(-1), scales.reshape(-1), expected_bits(codes, of_each, code).reshape(-1)


def decoding_scales() -> Array:
    """Return float32 scales of every exponent, corners, and those between BF16 neighbours."""
    corners = [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F808000, 0x7F000000]
    corners += [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000]
    positive = np.array([*corners, 0x7FFFFFFF], np.uint32)
    random = np.random.default_rng(0).integers(0, 2**23, 1024, dtype=np.uint32)
    exponents = np.arange(1024, dtype=np.uint32) % 512 << 23
    # Products of these with powers of two are ties, which go to the even neighbour.
    halves = np.arange(0, 2**16, 97, dtype=np.uint32) << 16
    bits = [positive, positive | 2**31, random | exponents, halves, halves | 0x8000]
    return np.concatenate(bits).view(np.float32)


@any_kernel
@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_code_with_scales_of_every_kind(kernel: kernels.Kernel, code: DType) -> None:
    sixteen_bits = (every_16_bit_value(dtype)[::89].copy() for dtype in (BF16, F16))
    for scales in (decoding_scales(), *sixteen_bits):
        codes = np.repeat(np.arange(256, dtype=np.uint8)[None], len(scales), axis=0)
        run = BlockRun(rows=1, cols=256, first=0, count=codes.size, dtype=code)  # two a matrix
        values = decoded(codes.reshape(-1), scales.repeat(2), run, kernel)
        found = raw(values).reshape(codes.shape)
        np.testing.assert_array_equal(found, expected_bits(codes, scales[:, None], code))
        run = BlockRun(rows=1, cols=1, first=0, count=codes.size, dtype=code)  # a scale each
        values = decoded(codes.reshape(-1), scales.repeat(256), run, kernel)
        np.testing.assert_array_equal(raw(values), found.reshape(-1))


@any_kernel
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_runs_have_the_bits_of_the_whole_and_nothing_around_them_is_written(
    stack: tuple[int, int, int], kernel: kernels.Kernel
) -> None:
    _, rows, cols = stack
    codes, scales, expected = stacked(stack, DTYPES[cols % 3])
    near = {start + by for start in (0, cols, 128 * cols, rows * cols) for by in (-1, 0, 1, 33)}
    ends = sorted(end for end in near if 0 <= end <= codes.size)
    buffer = np.empty(2 * (codes.size + 128), np.uint8)
    for start, stop in [(0, codes.size), *pairwise(ends), (ends[0], ends[-1])]:
        buffer.fill(0x55)
        out = buffer.view(BF16)[64 : 64 + stop - start]
        run = BlockRun(rows=rows, cols=cols, first=start, count=stop - start)
        needed = scales[run.scales.start : run.scales.stop]
        kernels.decode_blocks_into(codes[start:stop], needed, out, run, kernel=kernel)
        np.testing.assert_array_equal(raw(out), expected[start:stop], f"{start}:{stop}")
        assert (buffer[:128] == 0x55).all()
        assert (buffer[128 + 2 * (stop - start) :] == 0x55).all()


@any_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_and_whole_numbers(kernel: kernels.Kernel, dtype: Any) -> None:
    """Codes of 4 bits, the first in the high bits, and parts of 127, from anywhere in a block."""
    random = np.random.default_rng(5)
    codes = random.integers(0, 256, 1500, dtype=np.uint8)
    scales = random.standard_normal(100).astype(np.float32)
    table = random.standard_normal(16).astype(np.float32)
    nibbles = np.stack((codes >> 4, codes & 15), axis=-1).reshape(-1)
    whole = codes.view(np.int8).astype(np.float32)
    for first, count in ((0, 1500), (1, 1), (31, 33), (63, 1023)):
        form: Any = {"rows": 1, "cols": 2000, "first": first, "count": count, "block_cols": 64}
        blocks = scales[first // 64 : (first + count - 1) // 64 + 1]
        of_each = scales[np.arange(first, first + count) // 64]
        packed = BlockRun(**form, dtype=DType.U8, table=tuple(table))
        for run, values in (
            (packed, table[nibbles[:count]] * of_each),
            (BlockRun(**form, dtype=DType.I8), whole[:count] * of_each * np.float32(1 / 127)),
        ):
            out = np.empty(count, dtype)
            kernels.decode_blocks_into(codes[: run.nbytes], blocks, out, run, kernel=kernel)
            np.testing.assert_array_equal(raw(out), raw(values.astype(dtype)))
    with pytest.raises(UsageError, match="table has 0 values"):
        BlockRun(rows=1, cols=1, first=0, count=0, dtype=DType.U8)


# A matrix, a row, groups of one row, blocks of several rows, those cut at both edges, one value.
BLOCKS = [(67, 150), (1, 150), (1, 32), (1, 100), (3, 1), (16, 64), (50, 7), (1, 1)]


@any_kernel
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_other_shapes(block: tuple[int, int], kernel: kernels.Kernel) -> None:
    """Whole runs, and runs that begin and end anywhere, in pieces of few scales."""
    rows, cols = 67, 150
    codes, scales, expected = stacked((2, rows, cols), F32, DType.F8_E5M2, block)
    form: Any = {"block_rows": block[0], "block_cols": block[1], "dtype": DType.F8_E5M2}
    for first, stop in ((0, codes.size), (1, 40), (149, 151), (1234, 18_765)):
        run = BlockRun(rows=rows, cols=cols, first=first, count=stop - first, **form)
        for piece in (run, *run.pieces(300)):
            end = piece.first + piece.count
            needed = scales[piece.scales.start : piece.scales.stop]
            found = decoded(codes[piece.first : end], needed, piece, kernel)
            np.testing.assert_array_equal(raw(found), expected[piece.first : end])


sizes = st.integers(1, 400) | st.sampled_from([127, 128, 129, 256, 257, 5000])
runs = st.builds(
    BlockRun, rows=sizes, cols=sizes, first=st.integers(0, 10**6), count=st.integers(0, 3000)
)


@given(runs, st.sampled_from([1, 2, 16, 300, 10**6]))
def test_pieces_are_the_run_in_order_and_need_few_scales(run: BlockRun, most: int) -> None:
    end = run.first
    for piece in run.pieces(most):
        assert (piece.rows, piece.cols, piece.first) == (run.rows, run.cols, end)
        assert piece.count > 0
        assert len(piece.scales) <= most + piece.count // 16 + 4
        end += piece.count
    assert end == run.first + run.count


def test_a_run_that_can_not_be_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"first": -1}, "first is -1"),
        ({"first": 2**63 - 300}, "the run ends at"),
        ({"rows": 0}, r"300 codes, but its matrices \[0, 200\]"),
        ({"count": "300"}, "count is '300'"),
        ({"block_cols": 0}, "block_cols is 0"),
        ({"dtype": DType.F8_E4M3FNUZ}, "codes are F8_E4M3FNUZ"),
    ]
    for changes, message in wrong:
        with pytest.raises(UsageError, match=message):
            BlockRun(**{"rows": 3, "cols": 200, "first": 0, "count": 300, **changes})


U8 = np.uint8
BUFFER = np.zeros(900, U8)
FITS: dict[str, Any] = {
    "codes": BUFFER[:300],
    "scales": np.ones(2, F32),
    "out": BUFFER[300:].view(BF16),
    "run": BlockRun(rows=300, cols=200, first=0, count=300),  # two rows of the first blocks
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros(300, np.int8)}, "codes is int8 of shape"),
        ({"codes": np.zeros(299, U8)}, r"codes is uint8 of shape \[299\]"),
        ({"codes": bytes(300)}, "codes is bytes, not an array"),
        ({"scales": np.ones(2, np.float64)}, "scales is float64 of shape"),
        ({"scales": np.zeros(9, U8)[1:].view(F32)}, "scales is not a contiguous, aligned"),
        ({"scales": np.ones(1, F32)}, r"of shape \[1\], not"),
        ({"out": np.zeros(299, BF16)}, r"out is bfloat16 of shape \[299\]"),
        ({"out": np.frombuffer(bytes(600), BF16)}, "out is read-only"),
        ({"out": BUFFER[298:898].view(BF16)}, "shares memory"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    kernels.decode_blocks_into(**FITS)
    with pytest.raises(UsageError, match=message):
        kernels.decode_blocks_into(**{**FITS, **changes})
