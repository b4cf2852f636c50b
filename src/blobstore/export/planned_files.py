"""The files of an export as values: options, arrays, shards, the plan. Pure.

contents.py decides them, folder.py writes them.

Tensors are split into files exactly as huggingface_hub splits a state dict. Source of the rule:
huggingface_hub 2.4.0 serialization/_base.py ``split_state_dict_into_shards_factory``, of the names
and of the index ``save_torch_state_dict`` in serialization/_torch.py. A property test compares the
two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from blobstore.errors import LimitExceededError, UsageError
from blobstore.formats.checkpoint import FILE_TYPE, FILE_TYPES
from blobstore.formats.documents import RecordedFile
from blobstore.formats.dtypes import DType, Quantization
from blobstore.formats.safetensors.header import (
    PREFIX,
    Header,
    common_metadata,
    json_of,
    lay_out,
    parse_header,
)
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
                    "the source's files hold different tensors from mlx-lm's",
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
    return json.dumps(
        {
            "metadata": {"total_size": total_size},
            "weight_map": {name: file for file, names in files.items() for name in names},
        },
        indent=2,
    ).encode()


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


@dataclass(frozen=True, eq=False)
class Weight(StoredTensor):
    """One tensor of a stored model, companions included, and the blob that holds it."""

    blob: TensorBlob


def read_weights(model: StoredModel, *, verify: bool = False) -> dict[str, Weight]:
    """Return a stored model's tensors by name; ``verify`` also hashes their blobs, and files.

    No file stays open. Raises: as `open_model`; UnsupportedSourceError for a store in memory.
    """
    weights: dict[str, Weight] = {}
    for layer in model.weight_layers:
        with model.open_layer(layer, weights) as (reader, header, tensors):
            blob = TensorBlob.of(layer.digest, reader, header)
            blob.require_file()
        for tensor in tensors:
            weights[tensor.name] = Weight(
                tensor.name, tensor.entries, tensor.quantization, tensor.transposed, blob
            )
    if verify:
        model.verify((*model.weight_layers, *model.manifest.file_layers))
    return weights


_BLOCKS = "_blocks"
# How other programs call the codes of X.weight: compressed-tensors, gpt-oss (source/producers.py).
_OTHER_NAMES = (("", "_packed"), (".weight", _BLOCKS))


@dataclass(frozen=True)
class Origin:
    """The files of a source in order, as blobstore.json records them; empty without a record."""

    files: Sequence[RecordedFile]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """The tensors of the files by name: number of the file, place in it."""
        return {
            name: (number, place)
            for number, file in enumerate(self.files)
            for place, name in enumerate(file.tensors)
        }

    def place(self, name: str) -> tuple[int, int] | None:
        """Return the place of the tensor that became ``name``."""
        others = (
            name.removesuffix(suffix) + other
            for suffix, other in _OTHER_NAMES
            if name.endswith(suffix)
        )
        return next((self.places[one] for one in (name, *others) if one in self.places), None)

    def unpacked(self, name: str) -> str | None:
        """Return the name of the values of ``name`` if the source had it in gpt-oss's blocks.

        None otherwise. The blocks of ``X`` are rows of outputs; its values are called ``X`` and are
        ``[..., in, out]`` (huggingface/transformers@0189b1d0 integrations/mxfp4.py
        `convert_moe_packed_tensors`, modeling_gpt_oss.py `GptOssExperts`, and the checkpoints that
        are published in BF16).
        """
        base = name.removesuffix(".weight")
        is_block = base != name and base + _BLOCKS in self.places and name not in self.places
        return base if is_block else None

    def metadata_of(self, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the metadata of the files that the tensors come from, and the keys that differ.

        Keys with several values are left out, and so are keys that describe tensors that were
        quantized in the source: the export describes them itself. When no tensor is known, all
        files count.
        """
        numbers = sorted({place[0] for name in names if (place := self.place(name)) is not None})
        files = [self.files[number] for number in numbers] or self.files
        metadata, unequal = common_metadata(file.metadata for file in files)
        kept = {key: value for key, value in metadata.items() if not self._describes(key, value)}
        return kept, set(unequal)

    def _describes(self, key: str, value: str) -> bool:
        if key == FILE_TYPE:
            return value in FILE_TYPES
        owner, _, what = key.rpartition(".")
        return what in ("quant_type", "group_size", "transposed") and (
            not owner or owner in self.places
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parts of one checkpoint: its weights, its documents, the record of its source.

    ``model`` is its name for messages, ``folder`` its place in the export: "", or "draft/".
    ``weights`` are by their names in the checkpoint. ``file_type``: the type that was asked for
    when it was imported, as its config blob has it.
    """

    model: str
    folder: str
    weights: Mapping[str, Weight]
    documents: Mapping[str, bytes]
    origin: Origin
    file_type: str = ""


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
        text = json.dumps(
            json_of(Header(entries, metadata, 0)), ensure_ascii=False, separators=(",", ":")
        ).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise LimitExceededError(
                f"limit exceeded: {path} would have a header of {len(text):,} bytes,"
                f" at most {MAX_HEADER:,}",
                path=path,
            )
        parse_header(text, sum(array.nbytes for array in arrays))  # what we write, we read
        return cls(path, PREFIX.pack(len(text)) + text, tuple(arrays))

    @property
    def size(self) -> int:
        return len(self.header) + sum(array.nbytes for array in self.arrays)

    def steps(self) -> Iterator[Step]:
        """Yield the pieces in file order, cut into parts that one thread writes at once."""
        at = len(self.header)
        for array in self.arrays:
            for piece in array.pieces:
                most = _COPIED_AT_ONCE if isinstance(piece, BlobRange) else piece.at_once
                for begin in range(0, piece.nbytes, most):
                    nbytes = min(most, piece.nbytes - begin)
                    yield Step(piece, begin, nbytes, at, array.name)
                    at += nbytes


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A small file: its path in the folder, and its bytes."""

    path: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class CopiedBlob:
    """A file that is a blob of the model: its path in the folder, the blob, its size in bytes."""

    path: str
    blob: BlobFile
    size: int


PlannedFile = PlannedShard | PlannedDocument | CopiedBlob


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export will write, and ``notes``: sentences about what it leaves out or changes."""

    shards: tuple[PlannedShard, ...] = ()
    documents: tuple[PlannedDocument | CopiedBlob, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        return (*self.shards, *self.documents)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def __add__(self, other: ExportPlan) -> ExportPlan:
        return ExportPlan(
            self.shards + other.shards, self.documents + other.documents, self.notes + other.notes
        )
