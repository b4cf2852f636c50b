"""Classify: which kind of checkpoint its weights make it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from blobstore.checkpoint import SourceConfig
from blobstore.errors import UsageError
from blobstore.quant import QuantType
from blobstore.source.producers import OWN
from blobstore.source.weights import Form, SourceWeight

FILE_TYPE: Final = "file_type"
"""The metadata of an exported file that say which type was asked for: Ollama's word for it in the config blob."""
FILE_TYPES = frozenset(kind.value for kind in QuantType)
"""What it may be there; anything else is the source's own."""


class SourceKind(enum.Enum):
    """A kind of checkpoint; the value is Ollama's name for it (x/create/classify.go, ollama/ollama@fb307609)."""

    FLOAT = "float"
    PREQUANTIZED = "prequantized"
    BLOCK_FP8 = "block-fp8"


def classify(weights: Iterable[SourceWeight]) -> SourceKind:
    """Return the kind: prequantized when any weight is, else block FP8 when any weight is."""
    forms = {weight.form for weight in weights}
    if Form.CODES in forms:
        return SourceKind.PREQUANTIZED
    return SourceKind.BLOCK_FP8 if Form.BLOCK_FP8 in forms else SourceKind.FLOAT


def quant_type_of(weights: Sequence[SourceWeight], config: SourceConfig | None) -> QuantType | None:
    """Return the type that a source was quantized to: that of all its quantized weights, FP8 being mxfp8.

    Of several types it is the one that the source says was asked for: MLX's general settings in ``config``, as Ollama has it
    (fixtures/ollama-records, d_mlx_mixed_4_8), or `FILE_TYPE` in the metadata of an export of ours. None for no type, or
    where that is not said.
    """
    types = {
        QuantType.MXFP8 if weight.quantization is None else weight.quantization.quant_type
        for weight in weights
        if weight.form is not Form.PLAIN
    }
    if len(types) == 1:
        return types.pop()
    said = {weight.file.metadata.get(FILE_TYPE) for weight in weights if weight.producer == OWN.name}
    settings = config.mlx_quantization if config is not None else None
    with suppress(UsageError):  # a type that is not one of ours
        said |= {settings.quantization.quant_type.value} if settings is not None else set()
    asked = [kind for kind in types if kind.value in said]
    return asked[0] if len(asked) == 1 else None
