"""Which implementation of the kernels runs."""

import platform
import sys
from pathlib import Path

import pytest
from support.weights import TARGETS, TWIN

from blobstore import kernels
from blobstore.errors import UsageError

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
