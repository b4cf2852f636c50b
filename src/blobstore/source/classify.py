"""Classify: which kind of checkpoint its weights make it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from blobstore.quant import QuantType
from blobstore.source.weights import Form, SourceWeight


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
    """Return the type that all quantized weights of the source get, FP8 being mxfp8; None for no type, or several."""
    types = {
        QuantType.MXFP8 if weight.quantization is None else weight.quantization.quant_type
        for weight in weights
        if weight.form is not Form.PLAIN
    }
    return types.pop() if len(types) == 1 else None
