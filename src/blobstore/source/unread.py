"""Tensors that look packed but match no imported row, and why they are refused. Pure."""

from collections.abc import Iterator, Mapping

from blobstore.errors import quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import DType
from blobstore.source.producers import (
    ANY_FP8,
    IMPORTED,
    REFUSED_FORMATS,
    REFUSED_METHODS,
    TensorLike,
    row_of,
)
from blobstore.source.weights import is_expert

_LEAST_ELEMENTS = 1024


_KNOWN_METHODS = frozenset({"fp8", "modelopt", "compressed-tensors", "mxfp4"})
_INTEGERS = {DType.U8, DType.I8, DType.I16, DType.U16, DType.I32, DType.U32, DType.I64, DType.U64}
_CODES = ANY_FP8 | _INTEGERS


def look_packed(
    tensors: Mapping[str, TensorLike],
    everything: Mapping[str, TensorLike],
    config: SourceConfig | None,
) -> Iterator[tuple[str, str]]:
    """Yield the names of ``tensors`` that seem to hold packed weights, and why it seems so.

    ``tensors`` match no producer; ``everything`` includes their possible companions. One
    may be named more than once.
    """
    config = config or SourceConfig()
    if (named := REFUSED_METHODS.get(config.quant_method or "")) is not None:
        yield from _of_method(tensors, named)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    for sign in REFUSED_FORMATS:
        if dtypes.isdisjoint(sign.dtypes):
            continue
        for name, tensor in tensors.items():
            if not name.endswith(sign.suffix) or tensor.dtype not in sign.dtypes:
                continue
            companion = name.removesuffix(sign.suffix) + sign.companion
            other = everything.get(companion) if sign.companion else tensor
            if other is not None and (sign.suffix or _may_be_weight(name, tensor)):
                shown = f"{quoted(companion)} ({other.dtype} {list(other.shape)})"
                yield name, sign.reason.format(companion=shown)
    for name in tensors:
        if (row := row_of(name, everything)) is not None and row not in IMPORTED:
            yield name, f"{row.name} weights are not imported"
    yield from _unexplained(tensors, config)


def _may_be_weight(name: str, tensor: TensorLike) -> bool:
    """Return True for everything called a weight, and for matrices of experts except scales."""
    return name.endswith(".weight") or (
        is_expert(name) and len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2]
    )


def _of_method(tensors: Mapping[str, TensorLike], method: str) -> Iterator[tuple[str, str]]:
    """Yield the tensors that may hold codes of a method that is not imported."""
    for name, tensor in tensors.items():
        if tensor.dtype in _CODES and tensor.nbytes * 8 // tensor.dtype.bits >= _LEAST_ELEMENTS:
            said = f"config.json says that it was quantized by {method}"
            yield name, f"{said}, in a way that is not imported"


def _is_codes(name: str, tensor: TensorLike) -> bool:
    """Return True for a matrix of integers that is called a weight."""
    return name.endswith(".weight") and tensor.dtype in _INTEGERS and len(tensor.shape) > 1


def _unexplained(
    tensors: Mapping[str, TensorLike], config: SourceConfig
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that config.json calls quantized, but whose format is unknown."""
    method, settings = config.quant_method, config.mlx_quantization
    if method is not None and method not in _KNOWN_METHODS:
        yield from _of_method(tensors, quoted(method))
    for name, tensor in tensors.items():
        if tensor.dtype is DType.U8 and name.endswith("_blocks") and method == "mxfp4":
            yield name, "its _scales are missing"
        elif _is_codes(name, tensor) and (method or settings or config.quantization_config):
            yield name, "its scales are missing"
        elif (
            tensor.dtype is DType.U32
            and settings is not None
            and name.endswith(".weight")
            and settings.of(name.removesuffix(".weight")) is not None
        ):
            yield name, "its scales are missing, and config.json says that MLX quantized it"
