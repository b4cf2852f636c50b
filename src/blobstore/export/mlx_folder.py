"""The arrays and settings of a folder that ``mlx_lm.load`` opens. No weight is read.

mlx-lm's own model is built with arrays that nobody ever makes: it says where experts are stacked and which modules are
quantized, and refuses what it would refuse later. Source: mlx_lm/utils.py `load_model` at version 0.32.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export.outputs import OutputArray
from blobstore.mlx_network import build_network, module_paths, stacking
from blobstore.tensors import fits_mlx

_SETTINGS = ("group_size", "bits", "mode")
_TYPES = {
    DType.BOOL: "bool_",
    DType.I8: "int8",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.U16: "uint16",
    DType.U32: "uint32",
    DType.U64: "uint64",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.C64: "complex64",
}


def mlx_arrays(
    arrays: Sequence[OutputArray], config: Mapping[str, Any], model: str, file_type: str
) -> tuple[list[OutputArray], dict[str, Any] | None]:
    """Return the arrays as mlx-lm wants them, and what ``quantization`` its config.json needs: None for no quantization.

    ``arrays`` have mlx-lm's names already, experts one by one or stacked. The general settings are those of most modules,
    of those of the type ``file_type`` where there are any, and a module that has others is named.

    Raises: UsageError without the ``lm`` extra; UnsupportedSourceError when MLX or mlx-lm has no such arrays, a global scale
    among them, or does not know the architecture.
    """
    _check(arrays)
    given = {array.name: array for array in arrays}
    network = build_network(config, {name: _promised(array) for name, array in given.items()}, model)
    stacks = stacking(given, module_paths(network))
    used = {one for source in stacks.values() for one in ([source] if isinstance(source, str) else source)}
    if lost := sorted(given.keys() - used):
        raise UnsupportedSourceError(f"{quoted(lost[0])} and another array would have one name for mlx-lm", tensor=lost[0])
    made = [
        replace(given[source], name=name) if isinstance(source, str) else _stacked(name, [given[one] for one in source])
        for name, source in stacks.items()
    ]
    return made, _quantization(network, file_type)


def _check(arrays: Sequence[OutputArray]) -> None:
    for array in arrays:
        if not fits_mlx(array.dtype, array.shape):
            message = f"MLX has no {array.dtype} arrays of shape {list(array.shape)}: {quoted(array.name)}"
            raise UnsupportedSourceError(message, tensor=array.weight, hint="Export it with --format safetensors.")
        if array.name.endswith(".global_scale"):
            message = f"{quoted(array.weight)} has a global scale, which mlx-lm takes from no folder on a CPU"
            hint = "Export it with --dequantize bfloat16, or with --format safetensors."
            raise UnsupportedSourceError(message, tensor=array.weight, hint=hint)


def _promised(array: OutputArray) -> Any:
    """Return an mlx array of that shape and dtype that is never made: MLX makes arrays when they are evaluated."""
    import mlx.core as mx

    return mx.zeros(array.shape, getattr(mx, _TYPES.get(array.dtype, "uint8")))


def _stacked(name: str, experts: Sequence[OutputArray]) -> OutputArray:
    first = experts[0]
    pieces = tuple(piece for expert in experts for piece in expert.pieces)
    return replace(first, name=name, shape=(len(experts), *first.shape), pieces=pieces)


def _quantization(network: Any, file_type: str) -> dict[str, Any] | None:
    settings = {
        path: {key: getattr(module, key) for key in _SETTINGS}
        for path, module in sorted(network.named_modules(), key=lambda item: item[0])
        if hasattr(module, "bits")
    }
    if not settings:
        return None
    counts = Counter(tuple(one.values()) for one in settings.values())
    asked = Counter({one: count for one, count in counts.items() if _type_name(*one) == file_type})
    general = dict(zip(_SETTINGS, (asked or counts).most_common(1)[0][0], strict=True))
    return {**general, **{path: one for path, one in settings.items() if one != general}}


def _type_name(_: int, bits: int, mode: str) -> str:
    return f"int{bits}" if mode == "affine" else mode
