"""Refusals: tensors that look packed and are in no format that is imported: refused by name, none is guessed. Pure.

Sources of the signs that producers.py has no row for: quanto, huggingface/optimum-quanto @3dd9e9df
optimum/quanto/tensor/qtensor.py `save_to_state_dict`, @1a707590 tensor/weights/qbits.py (``_data``, ``_scale``, ``_shift``;
packed codes are ``_data._data``); torchao, pytorch/ao @19264180 torchao/prototype/safetensors/safetensors_support.py
`flatten_tensor_state_dict` (``X._weight_qdata``, ``X._weight_scale``); bitsandbytes as in producers.py, whose codes have
the dtype of ``bnb_4bit_quant_storage``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blobstore.checkpoint import ModuleQuantization, QuantizationSettings, SourceConfig
from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.source.inventory import Inventory, SourceTensor
from blobstore.source.producers import Stored, counting_row
from blobstore.source.weights import is_expert

_OTHER_FP8 = frozenset({DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_E4M3 = frozenset({DType.F8_E4M3})
_ANY = frozenset(DType)
_BYTES = frozenset({DType.U8})
_SIGNED_BYTES = frozenset({DType.I8})
_WORDS = frozenset({DType.U32})
_INTEGERS = frozenset({DType.I32, DType.U32, DType.I64})
_LEAST_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Sign:
    """What shows a format: a tensor with ``suffix`` and a dtype, beside one named with ``beside`` instead of it.

    In ``reason``, ``{beside}`` stands for that one. Without a suffix, weights and experts are meant.
    """

    suffix: str
    dtypes: frozenset[DType]
    reason: str
    beside: str = ""


_INT8 = "weights of 8-bit integers with scales are not imported"
_FP8_SCALE = "its scale {beside} is of another dtype or shape than those of FP8 blocks (BF16, F16 or F32)"
# The most telling sign first. All of these are tensors that no row of producers.py has taken.
_SIGNS = (
    Sign("", _OTHER_FP8, "only F8_E4M3 weights are decoded"),
    Sign("", _E4M3, _FP8_SCALE, "_scale_inv"),
    Sign("", _E4M3, _FP8_SCALE, "_scale"),
    Sign("", _E4M3, "an FP8 weight without a scale for each block of it (X.weight_scale_inv)"),
    Sign(".weight_packed", _BYTES, "packed weights need X.weight_scale (F8_E4M3) and X.weight_global_scale beside them"),
    Sign(".weight_packed", _INTEGERS, "weights packed into integers are not imported"),
    Sign(".qweight", _INTEGERS, "AWQ and GPTQ weights are not imported"),
    Sign("", _ANY, "bitsandbytes weights are not imported", ".absmax"),
    Sign("._data", _ANY, "quanto weights are not imported", "._scale"),
    Sign("._data._data", _ANY, "quanto weights are not imported", "._scale"),
    Sign("_qdata", _ANY, "torchao weights are not imported", "_scale"),
    Sign(
        ".weight", _BYTES, "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2 beside them", ".weight_scale"
    ),
    Sign(
        ".weight", _BYTES, "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2 beside them", ".weight_scale_2"
    ),
    Sign("", _BYTES, "packed experts that are stacked, with {beside}, are not imported", "_weight_scale"),
    Sign(".weight", _SIGNED_BYTES, _INT8, ".weight_scale"),
    Sign(".weight", _SIGNED_BYTES, _INT8, ".SCB"),
    Sign(".weight", _WORDS, "{beside} do not fit weights that MLX packed", ".scales"),
    Sign(".weight", _WORDS, "its scales are missing, beside {beside}", ".biases"),
    Sign("_blocks", _BYTES, "{beside} do not fit blocks of gpt-oss", "_scales"),
)
_KNOWN_METHODS = frozenset({"fp8", "modelopt", "compressed-tensors", "mxfp4"})
_CODES = _INTEGERS | _BYTES | _SIGNED_BYTES | {DType.I16, DType.U16, DType.U64} | _E4M3 | _OTHER_FP8


def check_unpacked(tensors: Mapping[str, SourceTensor], inventory: Inventory) -> None:
    """Raise UnsupportedSourceError when one of the ``tensors``, which no producer explains, holds packed weights."""
    for name, reason in look_packed(tensors, inventory.tensors, inventory.config):
        raise UnsupportedSourceError(
            f"{quoted(name)} is {tensors[name].dtype}: {reason}",
            tensor=name,
            path=tensors[name].file.path,
            hint="Import the unquantized checkpoint.",
        )


def look_packed(
    tensors: Mapping[str, Stored], everything: Mapping[str, Stored], config: SourceConfig | None
) -> Iterator[tuple[str, str]]:
    """Yield those of the ``tensors``, which no producer explains, that seem to hold packed weights, and why it seems so.

    ``everything`` has what may lie beside them. One may be named more than once.
    """
    for sign in _SIGNS:
        for name, tensor in tensors.items():
            if tensor.dtype not in sign.dtypes or not name.endswith(sign.suffix):
                continue
            beside = name.removesuffix(sign.suffix) + sign.beside
            if (beside in everything or not sign.beside) and (sign.suffix or _may_be_weight(name, tensor)):
                yield name, sign.reason.format(beside=_described(beside, everything) if sign.beside else "")
    for name in tensors:
        if (row := counting_row(name, everything)) is not None and not row.imported:
            yield name, f"{row.name} weights are not imported"
    yield from _unexplained(tensors, config or SourceConfig())


def _may_be_weight(name: str, tensor: Stored) -> bool:
    """Return True for whatever is called a weight, and for matrices of experts, which often are not; no scale is one."""
    return name.endswith(".weight") or (is_expert(name) and len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2])


def _described(name: str, everything: Mapping[str, Stored]) -> str:
    return f"{quoted(name)} ({everything[name].dtype} {list(everything[name].shape)})"


def _unexplained(tensors: Mapping[str, Stored], config: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield the tensors that config.json calls quantized, and that are stored in no way that is known."""
    method, settings = config.quant_method, config.mlx_quantization
    for name, tensor in tensors.items():
        if method is not None and method not in _KNOWN_METHODS:
            if tensor.dtype in _CODES and tensor.nbytes * 8 // tensor.dtype.bits >= _LEAST_ELEMENTS:
                yield name, f"config.json says that it was quantized by {quoted(method)}, which is not imported"
        elif tensor.dtype is DType.U8 and name.endswith("_blocks") and method == "mxfp4":
            yield name, "its _scales are missing"
        elif tensor.dtype is DType.U32 and settings is not None and _module_of(name, settings) is not None:
            yield name, "its scales are missing, and config.json says that MLX quantized it"


def _module_of(name: str, settings: QuantizationSettings) -> ModuleQuantization | None:
    """Return how MLX says that it quantized the module of a weight, or None."""
    return settings.of(name.removesuffix(".weight")) if name.endswith(".weight") else None
