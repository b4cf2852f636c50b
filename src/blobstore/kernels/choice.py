"""The implementations of the kernels, and which of them runs.

Native ones are C++ for a level of the processor each; ``reference`` is their NumPy twin. All give the same bits for every
input. ``native`` is the best that runs here.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from blobstore.arrays import QuantizedArray
from blobstore.errors import UsageError
from blobstore.kernels.block_runs import BlockRun
from blobstore.kernels.native import NativeKernel, targets
from blobstore.kernels.reference import ReferenceKernel
from blobstore.kernels.scales import ScaleChoice

Array = np.ndarray[Any, Any]


@runtime_checkable
class Kernel(Protocol):
    """One implementation. All arrays are flat, contiguous and aligned.

    The arrays of quantized weights hold whole groups.
    """

    name: str

    def quantize(self, weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice) -> int:
        """Fill ``parts`` in place; return the index of the first non-finite weight, or -1.

        ``weights`` are BF16, F16 or F32; scale and bias of an affine type have their dtype.
        """

    def dequantize(self, parts: QuantizedArray[Array], global_scale: float, out: Array) -> None:
        """Write the values to ``out``, which is BF16, F16 or F32, each rounded from float32."""

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        """Write the BF16 values of a run of E4M3 codes, one at least, to ``out``.

        ``scales`` (BF16, F16 or F32) are those of ``run.scales``.
        """


_NATIVE: tuple[Kernel, ...] = tuple(NativeKernel(target) for target in targets())
KERNELS: dict[str, Kernel] = {
    "native": _NATIVE[0],
    **{kernel.name: kernel for kernel in (*_NATIVE, ReferenceKernel())},
}
_active: Kernel = KERNELS["native"]


def use(name: str) -> None:
    """Choose the implementation for this process by its name in `KERNELS`. Raises: UsageError for another word."""
    global _active  # noqa: PLW0603  # one choice a process, made before work starts
    if name not in KERNELS:
        raise UsageError(f"unknown kernel {name!r}", hint=f"Use one of: {', '.join(KERNELS)}.")
    _active = KERNELS[name]


def active() -> Kernel:
    """Return the implementation in use."""
    return _active


def chosen(kernel: Kernel | None) -> Kernel:
    """Return the kernel that a caller gives, or the one in use for None. Raises: UsageError for anything else."""
    if kernel is not None and not isinstance(kernel, Kernel):
        raise UsageError(f"{kernel!r} is not a kernel", hint="Use one of kernels.KERNELS, such as kernels.KERNELS['plain'].")
    return kernel or active()
