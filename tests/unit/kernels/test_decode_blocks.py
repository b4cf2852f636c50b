"""Every kernel decodes block FP8 to the bits of a computation with ml_dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.blocks import decode_blocks
from support.weights import BF16, F16, F32, TARGETS, TWIN, every_16_bit_value, raw

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.kernels import _native
from blobstore.kernels.scales import BlockRun

Array = np.ndarray[Any, Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN = 0x7FC0
# Blocks of one row or column and more, whole and cut ones, rows shorter than a block or than any
# vector.
SHAPES = [
    (1, 1),
    (300, 1),
    (129, 3),
    (257, 33),
    (5, 127),
    (130, 128),
    (129, 129),
    (3, 513),
    (300, 260),
    (128, 384),
]

any_kernel = pytest.mark.parametrize(
    "kernel", [*TARGETS.values(), TWIN], ids=lambda kernel: kernel.name
)
# Stacks ``[matrices, rows, cols]`` from one value a scale to matrices of several blocks, cut at
# both edges.
STACKS = [
    (700, 1, 1),
    (350, 1, 2),
    (350, 2, 1),
    (5, 4, 128),
    (9, 3, 31),
    (9, 2, 33),
    (3, 1, 300),
    (3, 257, 2),
    (2, 130, 129),
]

any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
any_stack = pytest.mark.parametrize("stack", STACKS, ids=str)
any_scale_dtype = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


def expected_bits(codes: Array, scales: Array) -> Array:
    """Return the BF16 bits of ``[rows, cols]`` codes.

    Exact products in float64 are rounded to float32, then to BF16.
    """
    rows, cols = codes.shape
    with np.errstate(all="ignore"):
        of_each = np.kron(scales.astype(np.float64), np.ones((128, 128)))[:rows, :cols]
        values = (codes.view(E4M3).astype(np.float64) * of_each).astype(np.float32).astype(BF16)
    return np.where(np.isnan(values), np.uint16(NAN), raw(values))


def matrix(shape: tuple[int, int], number: int = 0) -> tuple[Array, Array]:
    """Return random codes, all 256 of them, and scales that make usual weights."""
    generator = np.random.default_rng((*shape, number))
    codes = generator.integers(0, 256, shape, dtype=np.uint8)
    blocks = tuple(-(-size // 128) for size in shape)
    scales = (10.0 ** generator.uniform(-7, 1, blocks)).astype(np.float32)
    codes.flags.writeable = scales.flags.writeable = False  # as they are when a file is mapped
    return codes, scales


def stacked(stack: tuple[int, int, int], dtype: np.dtype[Any] = F32) -> tuple[Array, Array, Array]:
    """Return a stack's codes and scales, and the bits expected of it, each matrix's by itself.

    All flat.
    """
    count, *shape = stack
    pairs = [matrix((shape[0], shape[1]), number) for number in range(count)]
    pairs = [(codes, scales.astype(dtype)) for codes, scales in pairs]
    expected = [expected_bits(codes, scales.astype(F32)) for codes, scales in pairs]
    codes, scales = (np.concatenate([pair[part].reshape(-1) for pair in pairs]) for part in (0, 1))
    return codes, scales, np.concatenate([bits.reshape(-1) for bits in expected])


def whole(codes: Array) -> BlockRun:
    """Return the run of one matrix."""
    return BlockRun(rows=codes.shape[0], cols=codes.shape[1], first=0, count=codes.size)


def assert_every_code_decodes(scales: Array, kernel: kernels.Kernel) -> None:
    """Fail unless all codes for each scale have the expected bits; ``scales``: ``[blocks]``."""
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(2, 128), len(scales))
    expected = expected_bits(codes, scales.astype(F32)[None])
    values = decode_blocks(codes.reshape(-1), scales, whole(codes), kernel=kernel)
    np.testing.assert_array_equal(raw(values).reshape(codes.shape), expected)
    # The same codes one after the other, each a matrix of its own: a vector then has many scales.
    run = BlockRun(rows=1, cols=1, first=0, count=codes.size)
    values = decode_blocks(
        codes.reshape(-1), np.tile(np.repeat(scales, 128), 2), run, kernel=kernel
    )
    np.testing.assert_array_equal(raw(values).reshape(codes.shape), expected)


@any_kernel
def test_every_code_with_scales_at_the_corners_of_float32(kernel: kernels.Kernel) -> None:
    corners = [
        0,
        1,
        2,
        3,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x3F800000,
        0x3F808000,
        0x7F000000,
        0x7F7F7FFF,
        0x7F7F8000,
    ]
    corners += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    bits = np.array([corner | sign for corner in corners for sign in (0, 2**31)], np.uint32)
    assert_every_code_decodes(bits.view(np.float32), kernel)


@any_kernel
def test_every_code_with_scales_of_every_exponent_and_random_bits(kernel: kernels.Kernel) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1024, dtype=np.uint32)
    exponents = np.arange(1024, dtype=np.uint32) % 512 << 23
    assert_every_code_decodes((bits & 0x7FFFFF | exponents).view(np.float32), kernel)


@any_kernel
def test_every_code_with_scales_that_are_bf16_or_halfway_between_two(
    kernel: kernels.Kernel,
) -> None:
    # Products with powers of two are then ties, which go to the even neighbour, in the subnormals
    # too.
    bits = every_16_bit_value(BF16)[::97].view(np.uint16).astype(np.uint32) << 16
    assert_every_code_decodes(np.concatenate([bits, bits | 0x8000]).view(np.float32), kernel)


@any_kernel
def test_every_code_with_scales_that_are_stored_in_16_bits(kernel: kernels.Kernel) -> None:
    for dtype in (BF16, F16):
        assert_every_code_decodes(every_16_bit_value(dtype)[::89].copy(), kernel)


@any_kernel
@pytest.mark.parametrize(
    ("code", "scale", "bits"),
    [
        pytest.param(0x38, 1.0, 0x3F80, id="one"),
        pytest.param(0xB8, 0.5, 0xBF00, id="minus a half"),
        pytest.param(0x7E, 1.0, 0x43E0, id="448"),
        pytest.param(0x80, 1.0, 0x8000, id="minus zero"),
        pytest.param(0x00, -1.0, 0x8000, id="zero by a negative scale"),
        pytest.param(0x38, 1 + 2.0**-8, 0x3F80, id="tie to the even value below"),
        pytest.param(0x38, 1 + 3 * 2.0**-8, 0x3F82, id="tie to the even value above"),
        pytest.param(
            0x39,
            float.fromhex("0x1.d38e38p-1"),
            0x3F84,
            id="rounded to float32 first, then to BF16",
        ),
        pytest.param(0x01, 1.0, 0x3B00, id="smallest code, 2^-9"),
        pytest.param(0x01, 2.0**-124, 0x0001, id="smallest BF16"),
        pytest.param(0x01, 2.0**-125, 0x0000, id="half of it"),
        pytest.param(0x03, 2.0**-125, 0x0002, id="one and a half of it"),
        pytest.param(0x81, 2.0**-149, 0x8000, id="below float32"),
        pytest.param(0x7E, 2.0**-149, 0x0000, id="448 of the smallest float32"),
        pytest.param(0x7E, 2.0**-140, 0x0004, id="three and a half of the smallest BF16"),
        pytest.param(0x7E, 1e38, 0x7F80, id="beyond float32"),
        pytest.param(0xFE, 1e38, 0xFF80, id="beyond float32, negative"),
        pytest.param(0x38, 3.4e38, 0x7F80, id="finite in float32, beyond BF16"),
        pytest.param(0x38, 3.39e38, 0x7F7F, id="rounds to the largest BF16"),
        pytest.param(0x38, -np.inf, 0xFF80, id="infinite scale"),
        pytest.param(0x00, np.inf, NAN, id="zero times infinity"),
        pytest.param(0x7F, 1.0, NAN, id="NaN code"),
        pytest.param(0xFF, 1.0, NAN, id="negative NaN code"),
        pytest.param(0xFF, 0.0, NAN, id="NaN times zero"),
        pytest.param(0x38, np.nan, NAN, id="NaN scale"),
        pytest.param(0xB8, -np.nan, NAN, id="negative NaN scale"),
    ],
)
def test_values_computed_by_hand(
    code: int, scale: float, bits: int, kernel: kernels.Kernel
) -> None:
    codes = np.full(70, code, np.uint8)
    for shape in ((1, 70), (1, 1)):
        run = BlockRun(rows=shape[0], cols=shape[1], first=0, count=70)
        scales = np.full(len(run.scales), scale, np.float32)
        assert set(raw(decode_blocks(codes, scales, run, kernel=kernel)).tolist()) == {bits}


@any_kernel
@any_shape
def test_a_matrix_of_any_shape(shape: tuple[int, int], kernel: kernels.Kernel) -> None:
    codes, scales = matrix(shape)
    values = decode_blocks(codes.reshape(-1), scales.reshape(-1), whole(codes), kernel=kernel)
    assert (values.dtype, values.shape) == (BF16, (codes.size,))
    np.testing.assert_array_equal(raw(values).reshape(shape), expected_bits(codes, scales))


@any_kernel
@any_scale_dtype
@any_stack
def test_a_stack_of_matrices_in_one_call(
    stack: tuple[int, int, int], dtype: np.dtype[Any], kernel: kernels.Kernel
) -> None:
    codes, scales, expected = stacked(stack, dtype)
    run = BlockRun(rows=stack[1], cols=stack[2], first=0, count=codes.size)
    np.testing.assert_array_equal(raw(decode_blocks(codes, scales, run, kernel=kernel)), expected)


def runs_of(size: int, rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Yield ranges around rows, blocks, columns and matrices, then random ones."""
    near = {
        start + by
        for start in (0, cols, 128, 128 * cols, rows * cols, size)
        for by in (-1, 0, 1, 33)
    }
    ends = sorted(end for end in near if 0 <= end <= size)
    yield from ((start, stop) for start in ends for stop in ends if start <= stop)
    generator = np.random.default_rng(size)
    for longest in (70, size):
        for start in generator.integers(0, size, 10).tolist():
            yield start, min(size, start + int(generator.integers(0, longest + 1)))


@any_kernel
@pytest.mark.parametrize("stack", [*((1, *shape) for shape in SHAPES), *STACKS], ids=str)
def test_a_run_has_the_bits_of_the_whole_and_nothing_around_it_is_written(
    stack: tuple[int, int, int], kernel: kernels.Kernel
) -> None:
    codes, scales, expected = stacked(stack)
    buffer = np.empty(2 * (codes.size + 128), np.uint8)
    for start, stop in runs_of(codes.size, stack[1], stack[2]):
        buffer.fill(0x55)
        out = buffer.view(BF16)[64 : 64 + stop - start]
        run = BlockRun(rows=stack[1], cols=stack[2], first=start, count=stop - start)
        kernels.decode_blocks_into(
            codes[start:stop], scales[run.scales.start : run.scales.stop], out, run, kernel=kernel
        )
        np.testing.assert_array_equal(raw(out), expected[start:stop], err_msg=f"{start}:{stop}")
        around = np.delete(buffer, slice(128, 128 + 2 * (stop - start)))
        assert (around == 0x55).all(), f"{start}:{stop}"


@any_kernel
@pytest.mark.parametrize("most", [3, 40])
@any_stack
def test_the_pieces_of_a_run_have_the_bits_of_the_whole(
    stack: tuple[int, int, int], most: int, kernel: kernels.Kernel
) -> None:
    codes, scales, expected = stacked(stack)
    out = np.empty(codes.size, BF16)

    def decode(run: BlockRun) -> None:
        place = slice(run.first, run.first + run.count)
        needed = scales[run.scales.start : run.scales.stop]
        kernels.decode_blocks_into(codes[place], needed, out[place], run, kernel=kernel)

    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                decode,
                BlockRun(rows=stack[1], cols=stack[2], first=0, count=codes.size).pieces(most),
            )
        )
    np.testing.assert_array_equal(raw(out), expected)


@any_kernel
@pytest.mark.parametrize(
    ("shape", "first"), [((2, 3), 0), ((2, 3), 1), ((0, 3), 0), ((0, 0), 0), ((2, 0), 0)]
)
def test_an_empty_run_has_no_values(
    shape: tuple[int, int], first: int, kernel: kernels.Kernel
) -> None:
    run = BlockRun(rows=shape[0], cols=shape[1], first=first, count=0)
    values = decode_blocks(np.empty(0, np.uint8), np.empty(0, np.float32), run, kernel=kernel)
    assert (values.dtype, values.shape) == (BF16, (0,))


def test_the_kernel_in_use_decodes_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(type(TWIN), "decode_blocks", lambda self, *_: used.append(self.name))
    monkeypatch.setattr("blobstore.kernels.native._active", TWIN)
    decode_blocks(
        np.zeros(4, np.uint8), np.ones(1, np.float32), BlockRun(rows=1, cols=4, first=0, count=4)
    )
    assert used == ["reference"]


U8 = np.uint8
RUN = BlockRun(rows=300, cols=200, first=0, count=300)  # two rows of the first blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros(300, np.int8)}, "codes is int8 of shape"),
        ({"codes": np.zeros(300, E4M3)}, "codes is float8_e4m3fn"),
        (
            {"codes": np.zeros((2, 150), U8)},
            r"codes is uint8 of shape \[2, 150\], not uint8 of shape \[300\]",
        ),
        ({"codes": np.zeros(299, U8)}, r"codes is uint8 of shape \[299\]"),
        ({"codes": np.zeros(600, U8)[::2]}, "codes is not a contiguous"),
        ({"codes": np.zeros(300, U8)[::-1]}, "codes is not a contiguous"),
        ({"codes": bytes(300)}, "codes is bytes, not an array"),
        ({"scales": np.ones(2, np.float64)}, "scales is float64 of shape"),
        ({"scales": np.ones(2, np.dtype(">f4"))}, "scales is >f4"),
        ({"scales": np.ones((1, 2), F32)}, r"not float32 or float16 or bfloat16 of shape \[2\]"),
        ({"scales": np.ones(4, F32)[::2]}, "scales is not a contiguous"),
        ({"scales": np.zeros(9, U8)[1:].view(F32)}, "scales is not a contiguous, aligned"),
        ({"scales": np.ones(1, F32)}, r"of shape \[1\], not"),
        ({"scales": np.ones(3, F32)}, r"of shape \[3\], not"),
        ({"scales": None}, "scales is NoneType"),
        (
            {"out": np.zeros(299, BF16)},
            r"out is bfloat16 of shape \[299\], not bfloat16 of shape \[300\]",
        ),
        ({"out": np.zeros(300, F16)}, "out is float16"),
        ({"out": np.zeros(300, np.uint16)}, "out is uint16"),
        ({"out": np.zeros(600, BF16)[::2]}, "out is not a contiguous"),
        ({"out": np.zeros(601, U8)[1:].view(BF16)}, "out is not a contiguous, aligned"),
        ({"out": np.frombuffer(bytes(600), BF16)}, "out is read-only"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    fits: dict[str, Any] = {
        "codes": np.zeros(300, U8),
        "scales": np.ones(2, F32),
        "out": np.zeros(300, BF16),
        "run": RUN,
    }
    kernels.decode_blocks_into(**fits)
    with pytest.raises(UsageError, match=message):
        kernels.decode_blocks_into(**{**fits, **changes})


def test_values_are_not_written_over_what_they_are_made_of() -> None:
    buffer = np.zeros(900, U8)
    scales = np.ones(2, F32)
    kernels.decode_blocks_into(buffer[:300], scales, buffer[300:].view(BF16), RUN)
    with pytest.raises(UsageError, match="shares memory"):
        kernels.decode_blocks_into(buffer[:300], scales, buffer[298:898].view(BF16), RUN)
    with pytest.raises(UsageError, match="shares memory"):
        kernels.decode_blocks_into(
            buffer[:4], scales[:1], scales.view(BF16), BlockRun(rows=1, cols=4, first=0, count=4)
        )


def native_decode(**changes: Any) -> None:
    """Call the binding for a run of 300 codes of 200 columns, or what ``changes`` say."""
    arguments = {
        "target": "plain",
        "scale_type": "F32",
        "codes": np.zeros(300, U8),
        "scales": np.ones(2, np.uint32),
        "first": 0,
        "rows": 300,
        "cols": 200,
        "out": np.zeros(300, np.uint16),
    }
    _native.decode_blocks(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "reference"}, "unknown target"),
        ({"scale_type": "F64"}, "unknown name"),
        ({"scale_type": "BF16"}, "scales"),
        ({"out": np.zeros(299, np.uint16)}, "out"),
        ({"scales": np.ones(1, np.uint32)}, "scales"),
        ({"scales": np.ones(3, np.uint32)}, "scales"),
        ({"scales": np.ones(2, np.uint16)}, "scales"),
        ({"rows": 1}, "scales"),
        ({"cols": 300}, "scales"),
        ({"first": 127 * 200}, "scales"),
        ({"first": 299 * 200}, "scales"),
        ({"rows": 0}, "matrices are empty"),
        ({"cols": 0}, "matrices are empty"),
        ({"cols": 2**64 - 1}, "scales"),
        ({"first": 2**64 - 301, "rows": 1, "cols": 1}, "scales"),
        ({"first": 2**64 - 300}, "too long"),
        ({"first": 2**64 - 1}, "too long"),
    ],
)
def test_native_refuses_arrays_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    native_decode()
    with pytest.raises(ValueError, match=message):
        native_decode(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": np.zeros(300, np.int8)},
        {"codes": np.zeros(600, U8)[::2]},
        {"scales": np.ones((2, 1), np.uint32)},
        {"scales": np.ones(4, np.uint32)[::2]},
        {"out": np.zeros(300, np.int16)},
        {"out": np.frombuffer(bytes(600), np.uint16)},
        {"first": -1},
        {"rows": 1.0},
        {"cols": 2**64},
    ],
    ids=str,
)
def test_native_converts_nothing_silently(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        native_decode(**changes)
