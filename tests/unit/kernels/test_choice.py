"""Which implementation of the kernels runs, and that the native ones check what they are given."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.weights import TARGETS, TWIN

from blobstore import kernels
from blobstore.errors import UsageError
from blobstore.kernels import _native
from blobstore.kernels.reference import ReferenceKernel

Array = np.ndarray[Any, Any]

# The flags of /proc/cpuinfo for what each target is compiled for (x86-64 psABI: the levels of the
# processor).
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "fma"},
}


@pytest.fixture(autouse=True)
def kernel_in_use() -> Iterator[None]:
    before = kernels.active()
    yield
    kernels.use(next(name for name, kernel in kernels.KERNELS.items() if kernel is before))


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


def test_the_targets_are_those_of_this_processor_the_best_first() -> None:
    if platform.machine() in {"aarch64", "arm64"}:
        assert list(TARGETS) == ["neon", "plain"]
        return
    if platform.machine() not in {"x86_64", "AMD64"}:
        assert list(TARGETS) == ["plain"]
        return
    if sys.platform != "linux":
        pytest.skip("TARGETS NOT SHOWN: only Linux lists the processor's flags")
    flags = processor_flags()
    assert list(TARGETS) == [*(name for name, needed in LEVELS.items() if needed <= flags), "plain"]


def test_the_kernels_are_the_targets_under_their_names_the_best_also_as_native_and_the_twin() -> (
    None
):
    assert list(kernels.KERNELS) == ["native", *_native.targets(), "reference"]
    assert kernels.KERNELS["native"] is next(iter(TARGETS.values()))
    assert all(kernel.name == name for name, kernel in kernels.KERNELS.items() if name != "native")


def test_the_best_target_is_in_use_when_nothing_was_chosen() -> None:
    line = [sys.executable, "-c", "from blobstore import kernels; print(kernels.active().name)"]
    printed = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300).stdout
    assert printed == f"{next(iter(TARGETS))}\n"


def test_use_chooses_the_kernel_of_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recording(ReferenceKernel):
        name = "recording"

        def quantize(self, *arguments: Any) -> int:
            calls.append("quantize")
            return super().quantize(*arguments)

        def dequantize(self, *arguments: Any) -> None:
            calls.append("dequantize")
            super().dequantize(*arguments)

    monkeypatch.setitem(kernels.KERNELS, "recording", Recording())
    kernels.use("recording")
    assert kernels.active().name == "recording"
    kernels.dequantize(kernels.quantize(np.ones((2, 64), np.float32), "mxfp4"))
    assert calls == ["quantize", "dequantize"]
    kernels.use("native")
    kernels.dequantize(kernels.quantize(np.ones((2, 64), np.float32), "mxfp4"))
    assert calls == ["quantize", "dequantize"]


@pytest.mark.parametrize("name", [*TARGETS, "reference"])
def test_every_kernel_can_be_used_by_its_name(name: str) -> None:
    kernels.use(name)
    assert kernels.active() is kernels.KERNELS[name]


def test_an_unknown_kernel_is_a_usage_error_and_changes_nothing() -> None:
    kernels.use("reference")
    with pytest.raises(UsageError, match="unknown kernel 'nope'"):
        kernels.use("nope")
    assert kernels.active() is TWIN


def native_quantize(quant_type: str = "int4", **changes: Any) -> int:
    """Call the binding for two groups of 32 F32 weights (or what ``changes`` say)."""
    affine = quant_type.startswith("int")
    arguments = {
        "target": "plain",
        "method": "minmax",
        "quant_type": quant_type,
        "float_type": "F32",
        "weights": np.zeros(64, np.uint32),
        "group_size": 32,
        "words": np.zeros(
            64 * (4 if quant_type in {"int4", "mxfp4", "nvfp4"} else 8) // 32, np.uint32
        ),
        "scales": np.zeros(2, np.uint32 if affine else np.uint8),
        "biases": np.zeros(2, np.uint32) if affine else None,
        "global_scale": 1.0,
        "importance": None,
        "first_column": 0,
        "factors": [1.0],
        "shifts": [0.0],
        "neighbours": False,
    }
    return _native.quantize(**{**arguments, **changes})


def native_dequantize(quant_type: str = "int4", **changes: Any) -> None:
    """Call the binding for two groups of 32 F32 values (or what ``changes`` say)."""
    affine = quant_type.startswith("int")
    arguments = {
        "target": "plain",
        "quant_type": quant_type,
        "scale_type": "F32",
        "out_type": "F32",
        "words": np.zeros(
            64 * (4 if quant_type in {"int4", "mxfp4", "nvfp4"} else 8) // 32, np.uint32
        ),
        "scales": np.zeros(2, np.uint32 if affine else np.uint8),
        "biases": np.zeros(2, np.uint32) if affine else None,
        "group_size": 32,
        "global_scale": 1.0,
        "out": np.zeros(64, np.uint32),
    }
    _native.dequantize(**{**arguments, **changes})


@pytest.mark.parametrize("quant_type", ["int4", "int8", "mxfp4", "mxfp8"])
def test_native_takes_arrays_that_fit(quant_type: str) -> None:
    assert native_quantize(quant_type) == -1
    native_dequantize(quant_type)


U8, U16, U32 = np.uint8, np.uint16, np.uint32
BOTH_REFUSE = [
    ("int4", {"words": np.zeros(7, U32)}, "words"),
    ("int4", {"words": np.zeros(9, U32)}, "words"),
    ("int4", {"scales": np.zeros(1, U32)}, "scales"),
    ("int4", {"scales": np.zeros(2, U16)}, "scales"),
    ("int4", {"biases": np.zeros(3, U32)}, "biases"),
    ("int4", {"biases": np.zeros(2, U8)}, "biases"),
    ("int4", {"biases": None}, "only affine"),
    ("int4", {"group_size": 0}, "does not have that group_size"),
    ("int4", {"group_size": 4}, "does not have that group_size"),
    ("int4", {"group_size": 2**40}, "does not have that group_size"),
    ("int4", {"group_size": 128}, "whole number of groups"),
    ("int8", {"words": np.zeros(8, U32)}, "words"),
    ("mxfp4", {"scales": np.zeros(4, U8)}, "scales"),
    ("mxfp4", {"scales": np.zeros(2, U32)}, "scales"),
    ("mxfp4", {"biases": np.zeros(2, U8)}, "only affine"),
    ("mxfp4", {"group_size": 16}, "does not have that group_size"),
    ("mxfp8", {"words": np.zeros(8, U32)}, "words"),
    ("nvfp4", {"group_size": 32}, "does not have that group_size"),
    ("nvfp4", {"group_size": 16}, "scales"),
    ("fp4", {}, "unknown name"),
    ("int4", {"target": "native"}, "unknown target"),
    ("int4", {"target": "reference"}, "unknown target"),
]


@pytest.mark.parametrize(("quant_type", "changes", "message"), BOTH_REFUSE)
def test_native_refuses_arrays_that_do_not_fit(
    quant_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        native_quantize(quant_type, **changes)
    with pytest.raises(ValueError, match=message):
        native_dequantize(quant_type, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.zeros(63, U32)}, "whole number of groups"),
        ({"weights": np.zeros(96, U32)}, "words"),
        ({"weights": np.zeros(64, U16)}, "weights"),
        ({"weights": np.zeros(64, np.uint64)}, "weights"),
        ({"float_type": "BF16"}, "weights"),
        ({"float_type": "F64"}, "unknown name"),
        ({"method": "best"}, "unknown name"),
    ],
)
def test_native_quantize_refuses_weights_of_another_size(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        native_quantize(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": np.zeros(63, U32)}, "whole number of groups"),
        ({"out": np.zeros(96, U32)}, "words"),
        ({"out": np.zeros(64, U16)}, "out"),
        ({"out_type": "F16"}, "out"),
        ({"out_type": "F64"}, "unknown name"),
        ({"scale_type": "BF16"}, "scales"),
    ],
)
def test_native_dequantize_refuses_values_of_another_size(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        native_dequantize(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": np.zeros(128, U32)[::2]},
        {"weights": np.zeros((2, 32), U32)},
        {"words": np.zeros(16, U32)[::2]},
        {"words": np.zeros(8, np.float32)},
        {"words": np.zeros(16, U16)},
        {"scales": np.zeros((1, 2), U32)},
        {"scales": np.zeros(4, U32)[::2]},
        {"biases": np.zeros(4, U32)[::2]},
        {"importance": np.zeros(32, np.float64)},
        {"importance": np.zeros(64, np.float32)[::2]},
        {"importance": [1.0] * 32},
        {"weights": [0.0] * 64},
        {"first_column": -1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_native_converts_nothing_silently(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        native_quantize(**changes)


@pytest.mark.parametrize("name", ["words", "scales", "biases"])
def test_native_writes_to_no_read_only_array(name: str) -> None:
    read_only: Any = np.zeros(8 if name == "words" else 2, U32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        native_quantize(**{name: read_only})
