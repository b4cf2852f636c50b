"""Classify: which kind of checkpoint its weights make it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from blobstore.importer.weights import Form, SourceWeight
from blobstore.quant import QuantType


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


def quant_type_of(weights: Iterable[SourceWeight]) -> QuantType | None:
    """Return the type of all quantized weights of the source, or None when they have none or several."""
    types = {weight.quantization.quant_type for weight in weights if weight.quantization is not None}
    return types.pop() if len(types) == 1 else None
