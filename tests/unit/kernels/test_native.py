"""Which implementation of the kernels runs, and that the native ones check what they are given."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.weights import TARGETS, TWIN

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.kernels import _native

# The flags of /proc/cpuinfo for what each target is compiled for (x86-64 psABI: the levels of the
# processor).
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "fma"},
}


def test_the_targets_are_those_of_this_processor_the_best_first() -> None:
    best = next(iter(TARGETS.values()))
    assert kernels.KERNELS["native"] is best
    assert kernels.active() is best
    if platform.machine() not in {"x86_64", "AMD64"}:
        assert list(TARGETS) in (["neon", "plain"], ["plain"])
        return
    if sys.platform != "linux":
        pytest.skip("TARGETS NOT SHOWN: only Linux lists the processor's flags")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    assert list(TARGETS) == [*(name for name, needed in LEVELS.items() if needed <= flags), "plain"]


def test_a_kernel_is_chosen_by_its_name() -> None:
    try:
        for name in (*TARGETS, "reference"):
            kernels.use(name)
            assert kernels.active() is kernels.KERNELS[name]
            assert kernels.active().name == name
        with pytest.raises(UsageError, match="'nope'"):
            kernels.use("nope")
        assert kernels.active() is TWIN
    finally:
        kernels.use("native")


U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
# Two groups of 32 F32 weights.
PARTS: dict[str, Any] = {
    "target": "plain",
    "quant_type": "int4",
    "words": np.zeros(8, U32),
    "scales": np.zeros(2, U32),
    "biases": np.zeros(2, U32),
    "group_size": 32,
    "global_scale": 1.0,
}
QUANTIZE: dict[str, Any] = PARTS | {
    "method": "minmax",
    "float_type": "F32",
    "weights": np.zeros(64, U32),
    "importance": None,
    "first_column": 0,
    "factors": [1.0],
    "shifts": [0.0],
    "neighbours": False,
}
DEQUANTIZE = PARTS | {"scale_type": "F32", "out_type": "F32", "out": np.zeros(64, U32)}
COMPARE: dict[str, Any] = {
    "target": "plain",
    "float_type": "BF16",
    "read_type": "F64",
    "weights": np.zeros(64, U16),
    "read": np.zeros(64, U64),
}
STORED = PARTS | {"scale_type": "F32", "float_type": "BF16", "weights": np.zeros(64, U16)}
DECODE: dict[str, Any] = {
    "target": "plain",
    "scale_type": "F32",
    "codes": np.zeros(300, U8),
    "scales": np.ones(2, U32),
    "first": 0,
    "rows": 300,
    "cols": 200,
    "out": np.zeros(300, U16),
}
MXFP4 = {"quant_type": "mxfp4", "biases": None, "scales": np.zeros(2, U8)}
Refused = list[tuple[dict[str, Any], str]]
OF_PARTS: Refused = [
    ({"words": np.zeros(7, U32)}, "words"),
    ({"scales": np.zeros(1, U32)}, "scales"),
    ({"scales": np.zeros(2, U16)}, "scales"),
    ({"biases": None}, "only affine"),
    ({"group_size": 0}, "group_size"),
    ({"group_size": 128}, "whole number of groups"),
    ({**MXFP4, "scales": np.zeros(4, U8)}, "scales"),
    ({**MXFP4, "biases": np.zeros(2, U8)}, "only affine"),
    ({"quant_type": "fp4"}, "unknown name"),
    ({"target": "reference"}, "unknown target"),
]
OF_BLOCKS: Refused = [
    ({"scale_type": "BF16"}, "scales"),
    ({"out": np.zeros(299, U16)}, "out"),
    ({"scales": np.ones(1, U32)}, "scales"),
    ({"first": 299 * 200}, "scales"),
    ({"rows": 0}, "matrices are empty"),
    ({"cols": 2**64 - 1}, "scales"),
    ({"first": 2**64 - 300}, "too long"),
]


@pytest.mark.parametrize(
    ("call", "fitting", "refused"),
    [
        (_native.quantize, QUANTIZE, [*OF_PARTS, ({"weights": np.zeros(64, U64)}, "weights")]),
        (_native.dequantize, DEQUANTIZE, [*OF_PARTS, ({"out": np.zeros(96, U32)}, "words")]),
        (_native.compare, COMPARE, [({"read": np.zeros(63, U64)}, "read")]),
        (_native.compare_stored, STORED, [*OF_PARTS, ({"weights": np.zeros(65, U16)}, "groups")]),
        (_native.decode_blocks, DECODE, OF_BLOCKS),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    call: Any, fitting: dict[str, Any], refused: Refused
) -> None:
    call(**fitting)
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            call(**{**fitting, **changes})


@pytest.mark.parametrize(
    ("call", "fitting", "changes"),
    [
        (_native.quantize, QUANTIZE, {"weights": np.zeros(128, U32)[::2]}),
        (_native.quantize, QUANTIZE, {"weights": [0.0] * 64}),
        (_native.quantize, QUANTIZE, {"words": np.frombuffer(bytes(32), U32)}),
        (_native.quantize, QUANTIZE, {"first_column": -1}),
        (_native.dequantize, DEQUANTIZE, {"out": np.frombuffer(bytes(256), U32)}),
        (_native.decode_blocks, DECODE, {"scales": np.ones((2, 1), U32)}),
    ],
)
def test_native_converts_nothing_and_writes_to_no_read_only_array(
    call: Any, fitting: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        call(**{**fitting, **changes})
