"""Classify: which kind of checkpoint its weights make it. Pure.

SourceWeight: one weight of a checkpoint, however many tensors it is stored as. A value; nothing is
read here.

An unquantized weight is one tensor. A quantized one has companions: scales, biases, a global scale.
A weight that is stored as block FP8 has one scale for each block of 128 rows and 128 columns.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.source.inventory import SourceFile, SourceTensor
from blobstore.source.producers import OWN

FP8_BLOCK = 128
"""Rows and columns of the blocks that share a scale, the only size that is decoded."""


_EXPERT_MARKS = (".experts.", ".mlp.switch_mlp.", ".mlp.shared_experts.", ".mixer.shared_experts.")
_EXPERT_COMPANIONS = (".bias", ".scale", ".qbias")


class Form(enum.Enum):
    """How the values of a weight are stored in the source."""

    PLAIN = "plain"
    CODES = "codes"
    BLOCK_FP8 = "block FP8"


@dataclass(frozen=True, slots=True)
class SourceWeight:
    """One weight: its name in the model, the dtype and shape of its values, and the tensors it is stored as.

    ``parts`` are the tensors by the suffix of the array that they become ("", ".scale", ".bias",
    ".global_scale"). ``producer`` is the program that quantized it, by its name in producers.py.
    ``quantization`` is that of ``CODES``, which are copied or dequantized; ``dtype`` is then the
    one that values are dequantized to. ``inverse_global_scale``: the source stores what values are
    divided by. ``transposed``: ``shape``, and the order of the values, have the last two axes of
    the checkpoint's tensor swapped; of ``PLAIN`` values these are swapped as they are read.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: Mapping[str, SourceTensor]
    form: Form = Form.PLAIN
    producer: str = ""
    quantization: Quantization | None = None
    inverse_global_scale: bool = False
    transposed: bool = False

    @classmethod
    def plain(cls, tensor: SourceTensor) -> SourceWeight:
        """Return a tensor as the weight that it is."""
        return cls(tensor.name, tensor.dtype, tensor.shape, {"": tensor})

    @property
    def tensor(self) -> SourceTensor:
        """The tensor of the weight itself."""
        return self.parts[""]

    @property
    def file(self) -> SourceFile:
        """The file of the weight itself."""
        return self.tensor.file

    @property
    def global_scale_shape(self) -> tuple[int, ...] | None:
        """The shape of its global scale, which is one number; None when it has none."""
        return self.parts[".global_scale"].shape if ".global_scale" in self.parts else None

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes, companions included."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    def as_transposed(self) -> SourceWeight:
        """Return the weight with the last two axes swapped."""
        *lead, rows, cols = self.shape
        return replace(self, shape=(*lead, cols, rows), transposed=not self.transposed)

    def values_at_once(self, most: int) -> int:
        """Return how many values to read at a time, ``most`` at most.

        Whole rows of a transposed weight: the file has a row's values far apart, and reading half a
        row costs as much.
        """
        return most - most % self.shape[-1] if self.transposed and most > self.shape[-1] else most

    def stored_index(self, flat: int) -> tuple[int, ...]:
        """Return where the source has the value of a flat index: its index in the source's tensor."""
        index: list[int] = []
        for size in reversed(self.shape):
            flat, place = divmod(flat, size)
            index.insert(0, place)
        if self.transposed and self.form is Form.PLAIN:
            index[-2:] = reversed(index[-2:])
        return tuple(index)

    @property
    def layout(self) -> tuple[object, ...]:
        """What experts of one projection have in common."""
        scale = self.parts.get(".scale")
        return (
            self.tensor.dtype,
            self.dtype,
            self.shape,
            self.quantization,
            scale and (scale.dtype, scale.shape),
        )


def named_twice(name: str, one: SourceWeight, other: SourceWeight) -> UnsupportedSourceError:
    """Return the error that says which tensors would both have ``name``."""
    places = [f"{weight.tensor.name!r} of {weight.file.name}" for weight in (one, other)]
    return UnsupportedSourceError(
        f"two tensors would have the name {quoted(name)}: {places[0]} and {places[1]}",
        tensor=name,
        path=other.file.path,
    )


def is_expert(name: str) -> bool:
    """Return True for a weight of a mixture's experts, shared ones included."""
    return any(mark in name for mark in _EXPERT_MARKS) and not name.endswith(_EXPERT_COMPANIONS)


FILE_TYPE: Final = "file_type"
"""The metadata of an exported file that say which type was asked for: Ollama's word for it in the config blob."""
FILE_TYPES = frozenset(kind.value for kind in QuantType)
"""What it may be there; anything else is the source's own."""


class SourceKind(enum.Enum):
    """A kind of checkpoint.

    The value is Ollama's name for it (x/create/classify.go, ollama/ollama@fb307609).
    """

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

    Of several types it is the one that the source says was asked for: MLX's general settings in
    ``config``, as Ollama has it (fixtures/ollama-records, d_mlx_mixed_4_8), or `FILE_TYPE` in the
    metadata of an export of ours. None for no type, or where that is not said.
    """
    types = {
        QuantType.MXFP8 if weight.quantization is None else weight.quantization.quant_type
        for weight in weights
        if weight.form is not Form.PLAIN
    }
    if len(types) == 1:
        return types.pop()
    said = {
        weight.file.metadata.get(FILE_TYPE) for weight in weights if weight.producer == OWN.name
    }
    settings = config.mlx_quantization if config is not None else None
    with suppress(UsageError):  # a type that is not one of ours
        said |= {settings.quantization.quant_type.value} if settings is not None else set()
    asked = [kind for kind in types if kind.value in said]
    return asked[0] if len(asked) == 1 else None
