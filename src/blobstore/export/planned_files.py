"""The files of an export as values: options, arrays, shards, the plan. Pure.

contents.py decides them, files.py writes them.

Tensors are split into files exactly as huggingface_hub splits a state dict. Source of the rule:
huggingface_hub 2.4.0 serialization/_base.py ``split_state_dict_into_shards_factory``, of the names
and of the index ``save_torch_state_dict`` in serialization/_torch.py. A property test compares the
two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blobstore.errors import (
    LimitExceededError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.formats.safetensors.codec import lay_out, parse_header
from blobstore.io.budget import MAX_HEADER
from blobstore.store.stored import StoredTensor
from blobstore.store.stored_model import BlobFile, StoredModel, TensorBlob

STEM = "model"
INDEX_NAME = f"{STEM}.safetensors.index.json"


DEFAULT_SHARD = 5_000_000_000
"""huggingface_hub's 5GB (2.4.0 serialization/_base.py ``MAX_SHARD_SIZE``)."""
AS_SOURCE = "source"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a user asks of an export, checked.

    ``is_mlx``: the arrays and names are mlx-lm's. ``dequantize``: the dtype of all floats, or None.
    ``max_shard_size``: bytes; None keeps the source's files.
    """

    is_mlx: bool
    dequantize: DType | None
    max_shard_size: int | None

    @classmethod
    def parse(
        cls, name: str, dequantize: str | DType | None, max_shard_size: int | str
    ) -> ExportOptions:
        """Return the options. Raises: UsageError for an unknown word or an invalid size."""
        if name not in ("safetensors", "mlx"):
            raise UsageError(f"unknown format {name!r}", hint="Use one of: safetensors, mlx.")
        is_mlx = name == "mlx"
        dtype = DType.parse_float(dequantize) if isinstance(dequantize, str) else dequantize
        if dtype is not None and not dtype.is_float:
            raise UsageError(
                f"weights are dequantized to bfloat16, float16 or float32, not {dtype}"
            )
        if max_shard_size == AS_SOURCE:
            if is_mlx:
                raise UsageError(
                    "the source's files hold other tensors than mlx-lm's",
                    hint="Give a size, such as 5GB.",
                )
            return cls(is_mlx, dtype, None)
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise UsageError(
                f"invalid shard size: {max_shard_size!r}",
                hint=f"Give bytes, or {AS_SOURCE!r} for the source's files.",
            )
        return cls(is_mlx, dtype, max_shard_size)


def shard_index(files: Mapping[str, list[str]], total_size: int) -> bytes:
    """Return the shard index: the bytes that huggingface_hub would write.

    ``files``: file name → the names of its tensors. ``total_size``: the bytes of all tensors.
    """
    places = {name: file for file, names in files.items() for name in names}
    document = {"metadata": {"total_size": total_size}, "weight_map": places}
    return json.dumps(document, indent=2).encode()


def split_into_shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Return the names of tensors by file: shards of at most ``limit`` bytes.

    ``sizes``: bytes of the tensors, in their order. They fill a shard until the next one does not
    fit. A tensor over the limit gets a shard of its own, which comes before the one that is being
    filled. A single file is called ``model.safetensors``, several
    ``model-00001-of-00003.safetensors``.
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
    count = len(shards)
    if count == 1:
        return {f"{STEM}.safetensors": shards[0]}
    return {
        f"{STEM}-{number:05}-of-{count:05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


_COPIED_AT_ONCE = 2**26
_PREFIX = 8
_ALIGNMENT = 8

# safetensors 0.8.0, tensor.rs `Dtype` and `prepare`: the largest alignment first, so that every
# array is aligned.
_RANK = {dtype: rank for rank, dtype in enumerate(reversed(DType))}


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a stored model, companions included, and the blob that holds it."""

    stored: StoredTensor
    blob: TensorBlob


def read_weights(model: StoredModel, *, verify: bool = False) -> tuple[Weight, ...]:
    """Return the tensors of a stored model; ``verify`` also hashes every blob that holds one.

    No file stays open. Raises: as `open_model`; UnsupportedSourceError for a store in memory.
    """
    weights: dict[str, Weight] = {}
    for layer in model.weight_layers:
        with model.opened(layer, weights) as (reader, header, tensors):
            blob = TensorBlob.of(layer.digest, reader, header)
            blob.require_file()
        weights.update((stored.name, Weight(stored, blob)) for stored in tensors)
    if verify:
        model.verify(model.weight_layers)
    return tuple(weights.values())


@dataclass(frozen=True, slots=True)
class BlobRange:
    """Bytes of a blob, from byte ``offset`` of its file on, as they are."""

    blob: BlobFile
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Bytes that are computed as they are written, in items of ``itemsize``.

    ``fill(begin, out)`` writes those from byte ``begin`` on; any thread may call it. ``at_once``:
    how many are computed at a time.
    """

    nbytes: int
    itemsize: int
    at_once: int
    fill: Callable[[int, memoryview], None]


Piece = BlobRange | Computed


@dataclass(frozen=True, slots=True)
class OutputArray:
    """One array of a shard, and the pieces that it is made of, in order.

    ``weight`` is the name of the weight that it belongs to. ``quantization`` is that of the codes
    in it, None without codes; ``transposed``: these codes have the last two axes swapped.
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
class Step:
    """``nbytes`` of a piece from byte ``begin`` on, their place in the file, and their array."""

    piece: Piece
    begin: int
    nbytes: int
    at: int
    array: str


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A .safetensors file: its path, the bytes before its data, and its arrays in stored order."""

    path: str
    header: bytes
    arrays: tuple[OutputArray, ...]

    @classmethod
    def of(
        cls, path: str, arrays: Sequence[OutputArray], metadata: Mapping[str, str]
    ) -> PlannedShard:
        """Return the file that the safetensors library writes for these arrays, in this order.

        ``__metadata__`` first, then the arrays in stored order; compact; spaces up to 8 bytes.
        Raises: LimitExceededError for a header over 100,000,000 bytes.
        """
        entries = lay_out((array.name, array.dtype, array.shape) for array in arrays)
        document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, entry in entries.items():
            document[name] = {
                "dtype": entry.dtype.value,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin, entry.end],
            }
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        if len(text) > MAX_HEADER:
            raise LimitExceededError(
                f"limit exceeded: {path} would have a header of {len(text):,} bytes,"
                f" at most {MAX_HEADER:,}",
                path=path,
            )
        parse_header(text, sum(array.nbytes for array in arrays))  # what we write, we read
        return cls(path, len(text).to_bytes(_PREFIX, "little") + text, tuple(arrays))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(array.nbytes for array in self.arrays)

    def pieces(self) -> Iterator[tuple[OutputArray, Piece, int]]:
        """Yield the pieces in file order, each with its array and its place in the file."""
        at = len(self.header)
        for array in self.arrays:
            for piece in array.pieces:
                yield array, piece, at
                at += piece.nbytes

    def steps(self) -> Iterator[Step]:
        """Yield the pieces in file order, cut into parts that one thread writes at once."""
        for array, piece, at in self.pieces():
            most = _COPIED_AT_ONCE if isinstance(piece, BlobRange) else piece.at_once
            for begin in range(0, piece.nbytes, most):
                nbytes = min(most, piece.nbytes - begin)
                yield Step(piece, begin, nbytes, at + begin, array.name)


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
class CopiedBlob:
    """A file that is a blob of the model: its path in the folder, the blob, its size in bytes."""

    path: str
    blob: BlobFile
    size: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export will write, and ``notes``: sentences about what it leaves out or changes."""

    shards: tuple[PlannedShard, ...] = ()
    documents: tuple[PlannedDocument | CopiedBlob, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[PlannedShard | PlannedDocument | CopiedBlob, ...]:
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


def check_array_names(arrays: Iterable[OutputArray]) -> None:
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
