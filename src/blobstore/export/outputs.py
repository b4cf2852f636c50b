"""What an export writes: the values that a plan consists of.

Pure; plan.py makes them, writing.py carries them out.

Sharding: which tensors go into which file, exactly as huggingface_hub splits a state dict. Pure.

Source of the rule: huggingface_hub 2.4.0 serialization/_base.py
``split_state_dict_into_shards_factory``, of the names and of the index ``save_torch_state_dict`` in
serialization/_torch.py. A property test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.errors import LimitExceededError, UnsupportedSourceError, quoted
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.formats.safetensors.codec import lay_out, parse_header
from blobstore.io.budget import MAX_HEADER
from blobstore.model.parts import BlobFile, Weight

STEM = "model"
INDEX_NAME = f"{STEM}.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Split:
    """File name → the names of its tensors in order. ``total_size`` is the bytes of all."""

    files: Mapping[str, list[str]]
    total_size: int

    @property
    def index(self) -> bytes:
        """The shard index: the bytes that huggingface_hub would write."""
        places = {name: file for file, names in self.files.items() for name in names}
        document = {"metadata": {"total_size": self.total_size}, "weight_map": places}
        return json.dumps(document, indent=2).encode()


def split_into_shards(sizes: Mapping[str, int], limit: int) -> Split:
    """Return the shards for tensors of ``sizes`` bytes, in their order, each of at most ``limit`` bytes.

    One after the other they fill a shard until the next does not fit. A tensor over the limit gets
    a shard of its own, which comes before the one that is being filled. A single file is
    ``model.safetensors``, several ``model-00001-of-00003.safetensors``.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    return Split(
        {_name(number, len(shards)): names for number, names in enumerate(shards, 1)},
        sum(sizes.values()),
    )


def _name(number: int, count: int) -> str:
    return f"{STEM}.safetensors" if count == 1 else f"{STEM}-{number:05}-of-{count:05}.safetensors"


_PREFIX = 8
_ALIGNMENT = 8

# safetensors 0.8.0, tensor.rs `Dtype` and `prepare`: the largest alignment first, so that every
# array is aligned.
_RANK = {dtype: rank for rank, dtype in enumerate(reversed(DType))}


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of a weight's blob, from byte ``offset`` of its file on, as they are."""

    weight: Weight
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Convert:
    """``count`` values of a weight from index ``start`` on, dequantized or converted to ``dtype``.

    They are counted in the order of the exported tensor. ``transposed``: its last two axes are
    those of the stored one, swapped; only a quantized weight can be.
    """

    weight: Weight
    dtype: DType
    start: int
    count: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor that the values are of."""
        shape = self.weight.shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.dtype.nbytes((self.count,))


@dataclass(frozen=True, slots=True)
class Made:
    """An array that can't be copied from blobs.

    ``make`` returns it, contiguous; any thread may call it.
    """

    nbytes: int
    make: Callable[[], np.ndarray[Any, Any]]


Piece = Copy | Convert | Made


@dataclass(frozen=True, slots=True)
class OutputArray:
    """One array of a shard: the pieces that it is made of, one after the other.

    ``weight`` is the name of the one that it belongs to. ``quantization`` is that of the codes in
    it, None without codes; ``transposed`` says that these codes have the last two axes swapped.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    weight: str
    quantization: Quantization | None = None
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A .safetensors file: its path in the folder, the bytes before its data, and its arrays in stored order."""

    path: str
    header: bytes
    arrays: tuple[OutputArray, ...]

    @classmethod
    def of(
        cls, path: str, arrays: Sequence[OutputArray], metadata: Mapping[str, str]
    ) -> PlannedShard:
        """Return the file that the safetensors library writes for these arrays when they are `in_library_order`.

        ``__metadata__`` first, then the arrays in stored order; compact; spaces up to 8 bytes.
        Raises: LimitExceededError for a header over 100,000,000 bytes.
        """
        entries = lay_out((array.name, array.dtype, array.shape) for array in arrays)
        document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, entry in entries.items():
            offsets = [entry.begin, entry.end]
            document[name] = {
                "dtype": entry.dtype.value,
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        if len(text) > MAX_HEADER:
            message = f"limit exceeded: {path} would have a header of {len(text):,} bytes, at most {MAX_HEADER:,}"
            raise LimitExceededError(message, path=path)
        parse_header(text, sum(array.nbytes for array in arrays))  # what we write, we read
        return cls(path, len(text).to_bytes(_PREFIX, "little") + text, tuple(arrays))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A small file: its path in the folder, and its bytes."""

    path: str
    data: bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A file that is a blob of the model, byte for byte: its path in the folder, the blob, its bytes."""

    path: str
    blob: BlobFile
    size: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export will write, and ``notes``: sentences about what it leaves out or changes."""

    shards: tuple[PlannedShard, ...]
    documents: tuple[PlannedDocument | PlannedCopy, ...]
    notes: tuple[str, ...]

    @property
    def files(self) -> tuple[PlannedShard | PlannedDocument | PlannedCopy, ...]:
        """All files."""
        return (*self.shards, *self.documents)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def __add__(self, other: ExportPlan) -> ExportPlan:
        """Return the plan for the files of both."""
        return ExportPlan(
            self.shards + other.shards, self.documents + other.documents, self.notes + other.notes
        )


def check_names(arrays: Iterable[OutputArray]) -> None:
    """Raise UnsupportedSourceError when two arrays of a checkpoint would have one name."""
    names: set[str] = set()
    for array in arrays:
        if array.name in names:
            raise UnsupportedSourceError(
                f"two arrays would be called {quoted(array.name)}", tensor=array.weight
            )
        names.add(array.name)


def in_library_order(arrays: Iterable[OutputArray]) -> list[OutputArray]:
    """Return the arrays as the safetensors library stores them: by dtype, then by name."""
    return sorted(arrays, key=lambda array: (_RANK[array.dtype], array.name.encode()))
