"""Classify: which kind of checkpoint an inventory is. Pure.

Only float checkpoints are imported so far; every other kind of docs/formats.md section 5 is recognised, so that packed codes
are never mistaken for weights, and refused by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError
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


_SIGNS = (
    # The most telling sign first: compressed-tensors and ModelOpt both have weight_scale, as FP8 has.
    (".weight_packed", SourceKind.COMPRESSED_NVFP4),
    (".weight_scale_2", SourceKind.MODELOPT_NVFP4),
    (".weight_scale_inv", SourceKind.BLOCK_FP8),
    (".weight_scale", SourceKind.BLOCK_FP8),
    (".qweight", SourceKind.INT_PACKED),
    (".scales", SourceKind.MLX),
    ("_blocks", SourceKind.GPT_OSS_MXFP4),
)
_FP8 = frozenset({DType.F8_E4M3, DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})


def classify(inventory: Inventory) -> SourceKind:
    """Return the kind of a checkpoint that can be imported.

    Raises: UnsupportedSourceError naming the kind and the tensor that shows it.
    """
    kind, sign = _recognise(inventory.tensors.values())
    if kind is not SourceKind.FLOAT:
        raise UnsupportedSourceError(
            f"{inventory.path} is {kind.value}: {sign.name!r} ({sign.dtype}) shows it, and only BF16, F16 and F32 weights"
            " are imported so far",
            tensor=sign.name,
            path=inventory.path,
            hint="Import the unquantized checkpoint.",
        )
    return kind


def _recognise(tensors: Iterable[SourceTensor]) -> tuple[SourceKind, SourceTensor]:
    by_suffix: dict[str, SourceTensor] = {}
    fp8 = last = None
    for last in tensors:
        for suffix, _ in _SIGNS:
            if last.name.endswith(suffix):
                by_suffix.setdefault(suffix, last)
        if last.dtype in _FP8 and last.name.endswith(".weight"):
            fp8 = fp8 or last
    for suffix, kind in _SIGNS:
        if suffix in by_suffix:
            return kind, by_suffix[suffix]
    if fp8 is not None:
        return SourceKind.BLOCK_FP8, fp8
    if last is None:
        raise UnsupportedSourceError("a checkpoint without tensors has no kind")
    return SourceKind.FLOAT, last
