"""Refusals: tensors that look packed, in no format that is imported. Each is refused by name, none is guessed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.importer.inventory import Inventory, SourceTensor

_OTHER_FP8 = frozenset({DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_E4M3 = frozenset({DType.F8_E4M3})
_BYTES = frozenset({DType.U8})
_SIGNED_BYTES = frozenset({DType.I8})
_WORDS = frozenset({DType.U32})
_INTEGERS = frozenset({DType.I32, DType.U32, DType.I64})
_ANY_8_BIT = _BYTES | _SIGNED_BYTES | _E4M3
_LEAST_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Sign:
    """What shows a format: a tensor with ``suffix`` and a dtype, beside one named with ``beside`` instead of it."""

    suffix: str
    dtypes: frozenset[DType]
    reason: str
    beside: str = ""


# The most telling sign first. All of these are tensors that no row of producers.py has taken.
_SIGNS = (
    Sign(".weight", _OTHER_FP8, "only F8_E4M3 weights are decoded"),
    Sign(".weight", _E4M3, "an FP8 weight without a scale for each block of it (X.weight_scale_inv)"),
    Sign(".weight_packed", _BYTES, "packed weights need X.weight_scale (F8_E4M3) and X.weight_global_scale beside them"),
    Sign(".weight_packed", _INTEGERS, "weights packed into integers are not imported"),
    Sign(".qweight", _INTEGERS, "AWQ and GPTQ weights are not imported"),
    Sign(".weight", _BYTES, "bitsandbytes weights are not imported", ".weight.absmax"),
    Sign(".weight", _BYTES, "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2", ".weight_scale"),
    Sign(".weight", _SIGNED_BYTES, "weights of 8-bit integers with scales are not imported", ".weight_scale"),
    Sign(".weight", _SIGNED_BYTES, "weights of 8-bit integers with scales are not imported", ".SCB"),
    Sign(".weight", _WORDS, "its .scales have a dtype that MLX's have not", ".scales"),
    Sign("_blocks", _BYTES, "its _scales have a dtype that gpt-oss's have not", "_scales"),
)
_KNOWN_METHODS = frozenset({"fp8", "modelopt", "compressed-tensors", "mxfp4"})
_ALL_INTEGERS = _INTEGERS | _BYTES | _SIGNED_BYTES | {DType.I16, DType.U16, DType.U64}


def check_unpacked(tensors: Mapping[str, SourceTensor], inventory: Inventory) -> None:
    """Raise UnsupportedSourceError when one of the ``tensors``, which no producer explains, holds packed weights."""
    for tensor, reason in _packed(tensors, inventory):
        raise UnsupportedSourceError(
            f"{quoted(tensor.name)} is {tensor.dtype}: {reason}",
            tensor=tensor.name,
            path=tensor.file.path,
            hint="Import the unquantized checkpoint.",
        )


def _packed(tensors: Mapping[str, SourceTensor], inventory: Inventory) -> Iterator[tuple[SourceTensor, str]]:
    for sign in _SIGNS:
        for tensor in tensors.values():
            if tensor.dtype in sign.dtypes and tensor.name.endswith(sign.suffix):
                base = tensor.name.removesuffix(sign.suffix)
                if not sign.beside or base + sign.beside in inventory.tensors:
                    yield tensor, sign.reason
    method = inventory.config.quant_method if inventory.config is not None else None
    if method is not None and method not in _KNOWN_METHODS:
        for tensor in tensors.values():
            if tensor.dtype in _ALL_INTEGERS and tensor.nbytes * 8 // tensor.dtype.bits >= _LEAST_ELEMENTS:
                yield tensor, f"config.json says that it was quantized by {quoted(method)}, which is not imported"
