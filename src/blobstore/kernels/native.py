"""The implementations of the kernels, and which of them runs.

A native one is C++ for one level of the processor, called with the arrays' bit patterns;
``reference`` is their NumPy twin. All give the same bits for every input. ``native`` is the best
that runs on this processor.
"""

import numpy as np

from blobstore.errors import UsageError
from blobstore.kernels import _native
from blobstore.kernels.arrays import Array, QuantizedArray, dtype_of
from blobstore.kernels.reference import Comparison, ReferenceKernel
from blobstore.kernels.scales import BlockRun, ScaleChoice


class NativeKernel:
    """The kernels of one target, which do what `ReferenceKernel` says.

    They release the interpreter lock while they work.
    """

    def __init__(self, target: str) -> None:
        self.name = target

    def quantize(self, weights: Array, parts: QuantizedArray[Array], choice: ScaleChoice) -> int:
        candidates = choice.candidates_for(parts.quant_type)
        return _native.quantize(
            self.name,
            choice.method,
            parts.quant_type.value,
            dtype_of(weights).value,
            _bits(weights),
            parts.group_size,
            *_stored(parts),
            choice.global_scale,
            choice.importance,
            choice.first_column,
            list(candidates.factors),
            list(candidates.shifts),
            candidates.neighbours,
        )

    def dequantize(self, parts: QuantizedArray[Array], global_scale: float, out: Array) -> None:
        _native.dequantize(
            self.name,
            parts.quant_type.value,
            _scale_type(parts),
            dtype_of(out).value,
            *_stored(parts),
            parts.group_size,
            global_scale,
            _bits(out),
        )

    def decode_blocks(self, codes: Array, scales: Array, run: BlockRun, out: Array) -> None:
        _native.decode_blocks(
            self.name,
            run.dtype.value,
            dtype_of(out).value,
            codes,
            np.array(run.table, np.float32) if run.table else None,
            scales.astype(np.float32, copy=False),
            run.first,
            run.rows,
            run.cols,
            run.block_rows,
            run.block_cols,
            _bits(out),
        )

    def dequantize_columns(
        self,
        codes: Array,
        groups: Array,
        scales: Array,
        biases: Array,
        out: Array,
        *,
        by_zero: bool,
    ) -> None:
        _native.dequantize_columns(
            self.name, dtype_of(out).value, codes, groups, scales, biases, by_zero, _bits(out)
        )

    def widen(self, words: Array, bits: int, used: int, wide: int, size: int) -> Array:
        rows = np.empty((len(words), size), np.uint32)
        _native.widen(words, bits, used, wide, rows)
        return rows

    def turn(self, lines: Array, square: int) -> Array:
        rows = np.empty((lines.shape[1] * square, -(-len(lines) // square)), np.uint32)
        _native.turn(lines, square, rows)
        return rows

    def compare(self, weights: Array, read: Array) -> Comparison:
        types = dtype_of(weights).value, dtype_of(read).value
        return Comparison(*_native.compare(self.name, *types, _bits(weights), _bits(read)))

    def compare_stored(
        self, weights: Array, parts: QuantizedArray[Array], global_scale: float
    ) -> Comparison:
        sums = _native.compare_stored(
            self.name,
            dtype_of(weights).value,
            parts.quant_type.value,
            _scale_type(parts),
            _bits(weights),
            *_stored(parts),
            parts.group_size,
            global_scale,
        )
        return Comparison(*sums)


def _stored(parts: QuantizedArray[Array]) -> tuple[Array, Array, Array | None]:
    return parts.weight, _bits(parts.scale), None if parts.bias is None else _bits(parts.bias)


def _scale_type(parts: QuantizedArray[Array]) -> str:
    # The fp types do not use it.
    return "F32" if parts.bias is None else dtype_of(parts.scale).value


def _bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


Kernel = NativeKernel | ReferenceKernel
_NATIVE: tuple[Kernel, ...] = tuple(map(NativeKernel, _native.targets()))
KERNELS: dict[str, Kernel] = {
    "native": _NATIVE[0],
    **{kernel.name: kernel for kernel in (*_NATIVE, ReferenceKernel())},
}
_active = KERNELS["native"]


def use(name: str) -> None:
    """Choose the implementation for this process by its name in `KERNELS`.

    Raises: UsageError for another word.
    """
    global _active  # noqa: PLW0603  # one choice a process, made before work starts
    if name not in KERNELS:
        raise UsageError(f"unknown kernel {name!r}", hint=f"Use one of: {', '.join(KERNELS)}.")
    _active = KERNELS[name]


def active() -> Kernel:
    """Return the implementation in use."""
    return _active


def choose_kernel(kernel: Kernel | None) -> Kernel:
    """Return the caller's kernel, or the one in use for None; raise UsageError for other values."""
    if kernel is not None and not isinstance(kernel, Kernel):
        raise UsageError(
            f"{kernel!r} is not a kernel",
            hint="Use one of kernels.KERNELS, such as kernels.KERNELS['plain'].",
        )
    return kernel or active()
