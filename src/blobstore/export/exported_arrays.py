"""Exported arrays: what the stored tensors of a checkpoint become in its folder.

Names are those of the source: experts that the import stacked are taken apart again where
blobstore.json has their names (`output_arrays`).

mlx_arrays.py decides those of a folder for mlx-lm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from blobstore.export.planned_files import BlobRange, OutputArray, Weight
from blobstore.formats.conventions import FILE_TYPE, FILE_TYPES, group_of
from blobstore.formats.dtypes import DType
from blobstore.formats.provenance import RecordedFile

_BLOCKS = "_blocks"
# How other programs call the codes of X.weight: compressed-tensors, gpt-oss (source/producers.py).
_OTHER_NAMES = (("", "_packed"), (".weight", _BLOCKS))
CONVERTED = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})
"""Stored dtypes that become the requested one when an export is dequantized."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of a source in order, as blobstore.json records them; empty without a record."""

    files: tuple[RecordedFile, ...] = ()
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, file in enumerate(self.files):
            self._places.update((name, (number, place)) for place, name in enumerate(file.tensors))

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def place(self, name: str) -> tuple[int, int] | None:
        """Return the place of the tensor that became ``name``: number of the file, place in it."""
        others = (
            name.removesuffix(suffix) + other
            for suffix, other in _OTHER_NAMES
            if name.endswith(suffix)
        )
        return next((self._places[one] for one in (name, *others) if one in self._places), None)

    def unpacked(self, name: str) -> str | None:
        """Return the name of the values of ``name`` if the source had it in gpt-oss's blocks.

        None otherwise. The blocks of ``X`` are rows of outputs; its values are called ``X`` and are
        ``[..., in, out]`` (huggingface/transformers@0189b1d0 integrations/mxfp4.py
        `convert_moe_packed_tensors`, modeling_gpt_oss.py `GptOssExperts`, and the checkpoints that
        are published in BF16).
        """
        base = name.removesuffix(".weight")
        is_block = base != name and base + _BLOCKS in self._places and name not in self._places
        return base if is_block else None

    def metadata_of(self, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the metadata of the files that the tensors come from, and the keys that differ.

        Keys with several values are left out, and so are keys that describe tensors that were
        quantized in the source: the export describes them itself. When no tensor is known, all
        files count.
        """
        numbers = sorted({place[0] for name in names if (place := self.place(name)) is not None})
        found: dict[str, str] = {}
        unequal: set[str] = set()
        for file in [self.files[number] for number in numbers] or self.files:
            for key, value in file.metadata.items():
                if found.setdefault(key, value) != value:
                    unequal.add(key)
        kept = {
            key: value
            for key, value in found.items()
            if key not in unequal and not self._describes(key, value)
        }
        return kept, unequal

    def _describes(self, key: str, value: str) -> bool:
        if key == FILE_TYPE:
            return value in FILE_TYPES
        owner, _, what = key.rpartition(".")
        return what in ("quant_type", "group_size", "transposed") and (not owner or owner in self)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parts of one checkpoint: its weights, its documents, the record of its source.

    ``model`` is its name for messages, ``folder`` its place in the export: "", or "draft/". The
    names of its weights in the store begin with ``prefix``. ``file_type``: the type that was asked
    for when it was imported, as its config blob has it.
    """

    model: str
    folder: str
    prefix: str
    weights: tuple[Weight, ...]
    documents: Mapping[str, bytes]
    origin: Origin
    file_type: str = ""

    @property
    def named(self) -> dict[str, Weight]:
        """Its weights by their names in the checkpoint."""
        return {weight.stored.name[len(self.prefix) :]: weight for weight in self.weights}


def output_arrays(checkpoint: Checkpoint, dequantize: DType | None) -> list[OutputArray]:
    """Return the arrays of a checkpoint, in the order of its source.

    With ``dequantize`` quantized weights and floats become values of that dtype, everything else
    stays. Tensors that the source's files do not name come last, in stored order.
    """
    origin = checkpoint.origin
    arrays = [
        array
        for name, weight in checkpoint.named.items()
        for array in _arrays(weight, name, origin, dequantize)
    ]
    last = (len(origin.files), 0)
    return sorted(arrays, key=lambda array: origin.place(array.weight) or last)


def _arrays(
    weight: Weight, name: str, origin: Origin, dequantize: DType | None
) -> Iterator[OutputArray]:
    experts = _experts(weight, name, origin) or [name]
    is_converted = dequantize is not None and (
        weight.stored.quantization is not None or weight.stored.dtype in CONVERTED - {dequantize}
    )
    for number, expert in enumerate(experts):
        if dequantize is not None and is_converted:
            yield _values(weight, expert, (number, len(experts)), origin, dequantize)
        else:
            yield from _copies(weight, expert, (number, len(experts)))


def _experts(weight: Weight, name: str, origin: Origin) -> list[str]:
    """Return the names of the experts that the import stacked into the tensor; else nothing."""
    group, shape = group_of(name), weight.stored.shape
    if group is None or origin.place(name) is not None or len(shape) < 3:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{group}.{number}{name[len(group) :]}" for number in range(shape[0])]
    return names if all(origin.place(expert) is not None for expert in names) else []


def _values(
    weight: Weight, name: str, share: tuple[int, int], origin: Origin, dtype: DType
) -> OutputArray:
    from blobstore.export.values import value_piece  # and NumPy, which copies do not need

    number, count = share
    unpacked = origin.unpacked(name) if weight.stored.quantization is not None else None
    transposed = weight.stored.transposed or unpacked is not None
    values = math.prod(weight.stored.shape) // count
    piece = value_piece(weight, dtype, number * values, values, transposed=transposed)
    shape = weight.stored.shape[1:] if count > 1 else weight.stored.shape
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return OutputArray(unpacked or name, dtype, shape, (piece,), name)


def _copies(weight: Weight, name: str, share: tuple[int, int]) -> Iterator[OutputArray]:
    number, count = share
    for suffix, entry in weight.stored.entries.items():
        offset, shape, nbytes = weight.blob.offset(entry), entry.shape, entry.nbytes
        if count > 1 and suffix != ".global_scale":  # that of a stack is that of each expert
            shape, nbytes = shape[1:], nbytes // count
            offset += number * nbytes
        piece = BlobRange(weight.blob, offset, nbytes)
        array = OutputArray(name + suffix, entry.dtype, shape, (piece,), name)
        if not suffix:
            stored = weight.stored
            array = replace(array, quantization=stored.quantization, transposed=stored.transposed)
        yield array
