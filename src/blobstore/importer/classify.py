"""Classify: which kind of checkpoint an inventory is. Pure.

Only float checkpoints are imported so far; every other kind of docs/formats.md section 5 is recognised, so that packed codes
are never mistaken for weights, and refused by name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.importer.inventory import Inventory, SourceTensor


class SourceKind(enum.Enum):
    """A kind of checkpoint; the value is its name for people."""

    FLOAT = "float"
    MLX = "MLX quantized"
    COMPRESSED_NVFP4 = "compressed-tensors NVFP4"
    MODELOPT_NVFP4 = "ModelOpt NVFP4"
    BLOCK_FP8 = "block FP8"
    GPT_OSS_MXFP4 = "gpt-oss MXFP4"
    INT_PACKED = "AWQ, GPTQ or another packed integer format"


_FP8 = frozenset({DType.F8_E4M3, DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_BYTES = frozenset({DType.U8})
_WORDS = frozenset({DType.U32})
_INTEGERS = frozenset({DType.I32, DType.U32, DType.I64})


@dataclass(frozen=True, slots=True)
class Sign:
    """What shows a kind: a name with ``suffix`` beside the same name with ``partner`` of one of the ``dtypes``."""

    suffix: str
    partner: str
    dtypes: frozenset[DType]
    kind: SourceKind


# The most telling sign first: compressed-tensors and ModelOpt both have weight_scale, as FP8 has.
_SIGNS = (
    Sign(".weight_packed", ".weight_packed", _BYTES, SourceKind.COMPRESSED_NVFP4),
    Sign(".weight_packed", ".weight_packed", _INTEGERS, SourceKind.INT_PACKED),
    Sign(".weight_scale_2", ".weight", _BYTES, SourceKind.MODELOPT_NVFP4),
    Sign(".weight", ".weight", _FP8, SourceKind.BLOCK_FP8),
    Sign(".qweight", ".qweight", _INTEGERS, SourceKind.INT_PACKED),
    Sign(".scales", ".weight", _WORDS, SourceKind.MLX),
    Sign("_blocks", "_scales", _BYTES, SourceKind.GPT_OSS_MXFP4),
)


def classify(inventory: Inventory) -> SourceKind:
    """Return the kind of a checkpoint that can be imported.

    Raises: UnsupportedSourceError naming the kind and the tensor that shows it.
    """
    for sign in _SIGNS:
        for tensor in inventory.tensors.values():
            if _shows(sign, tensor, inventory.tensors):
                raise UnsupportedSourceError(
                    f"{inventory.path} is {sign.kind.value}: {quoted(tensor.name)} ({tensor.dtype}) shows it, "
                    "and only BF16, F16 and F32 weights are imported so far",
                    tensor=tensor.name,
                    path=inventory.path,
                    hint="Import the unquantized checkpoint.",
                )
    return SourceKind.FLOAT


def _shows(sign: Sign, tensor: SourceTensor, tensors: Mapping[str, SourceTensor]) -> bool:
    if not tensor.name.endswith(sign.suffix):
        return False
    partner = tensors.get(tensor.name.removesuffix(sign.suffix) + sign.partner)
    return partner is not None and partner.dtype in sign.dtypes
