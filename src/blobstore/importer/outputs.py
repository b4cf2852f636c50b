"""What an import writes: the values that a plan consists of.

Pure; plan.py makes them, writing.py carries them out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar

from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import (
    FILE_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    Coverage,
    ModelConfig,
)
from blobstore.formats.dtypes import DType, Part, Quantization, parameters_of
from blobstore.formats.safetensors.header import TensorEntry, encode_header, lay_out
from blobstore.importer.options import ImportOptions
from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import ModelFacts, TensorFacts, Verdict
from blobstore.source.files import KeptFile
from blobstore.source.folders import SourceTensor
from blobstore.source.inventory import Inventory
from blobstore.source.weights import Form, SourceWeight
from blobstore.store.stored import bytes_by_type


@dataclass(frozen=True, slots=True, eq=False)
class StoredArrays:
    """The arrays of a tensor, in stored order, and their bytes: by suffix, and of all.

    Tensors of one dtype, shape and type share one value: it is made once for 100,000 tensors.
    """

    parts: tuple[Part, ...]
    sizes: Mapping[str, int]
    nbytes: int

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        dtype: DType,
        shape: tuple[int, ...],
        quantization: Quantization | None,
        global_scale: tuple[int, ...] | None,
    ) -> StoredArrays:
        if quantization is None:
            parts: tuple[Part, ...] = (Part("", dtype, shape),)
        else:
            parts = tuple(quantization.parts(shape, dtype, global_scale=global_scale))
        sizes = {part.suffix: part.nbytes for part in parts}
        return StoredArrays(parts, MappingProxyType(sizes), sum(sizes.values()))


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of a blob: its sources, its dtype and shape before quantization.

    More than one source are stacked.

    ``copies_codes``: the sources are quantized as the output is, and their codes and scales are
    kept: copied as they are, or put into our order. ``global_scale`` is the shape of its global
    scale, None when it has none. ``kept``: why it is not quantized although a type was asked for,
    as the end of a sentence that begins with its name.
    """

    KEYS = (
        "name",
        "dtype",
        "shape",
        "quant_type=quantization.quant_type",
        "group_size=quantization.group_size",
        "transposed",
        "kept",
        "sources=source_names",
        "relative_error?",
    )

    name: str
    sources: tuple[SourceWeight, ...]
    dtype: DType
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    global_scale: tuple[int, ...] | None = None
    copies_codes: bool = False
    kept: Annotated[str | None, "why it is not quantized"] = None
    relative_error: ClassVar[Annotated[float | None, "with a target: what was measured"]] = None
    """Only in JSON; see `ImportPlan.relative_errors`."""

    stored: StoredArrays = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arrays = StoredArrays.of(self.dtype, self.shape, self.quantization, self.global_scale)
        object.__setattr__(self, "stored", arrays)

    @property
    def type_name(self) -> str:
        """The type that it gets, as people write it: ``int4/32``; and whether it is transposed."""
        return f"{self.quantization or self.dtype}{' transposed' if self.transposed else ''}"

    @property
    def transposed(self) -> bool:
        """True when its last two axes are those of the checkpoint's tensor swapped."""
        return self.sources[0].transposed

    def as_quantized(self, inputs_first: Container[str]) -> OutputTensor:
        """Return the tensor as it is quantized: transposed if its name is in ``inputs_first``."""
        if self.name not in inputs_first:
            return self
        *lead, rows, cols = self.shape
        sources = tuple(source.as_transposed() for source in self.sources)
        return replace(self, sources=sources, shape=(*lead, cols, rows))

    @property
    def source_names(self) -> list[str]:
        """The names of the tensors that it is made of: weights, then their scales, and so on."""
        suffixes = dict.fromkeys(suffix for source in self.sources for suffix in source.parts)
        return [
            source.parts[suffix].name
            for suffix in suffixes
            for source in self.sources
            if suffix in source.parts
        ]

    @property
    def copies(self) -> bool:
        if self.copies_codes:
            return self.sources[0].form is Form.CODES
        plain = all(
            source.form is Form.PLAIN
            and source.dtype is source.tensor.dtype is self.dtype
            and source.change is None
            for source in self.sources
        )
        return plain and self.quantization is None and not self.transposed

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def parameters(self) -> int:
        return parameters_of(self.shape)

    @property
    def facts(self) -> TensorFacts:
        return TensorFacts(
            self.name,
            self.dtype,
            self.shape,
            self.quantization,
            double_scaled=self.global_scale is not None,
            transposed=self.transposed,
        )

    def stored_of(self, count: int) -> StoredArrays:
        """Return the arrays of ``count`` values, whole groups of them, without a global scale."""
        return StoredArrays.of(self.dtype, (count,), self.quantization, None)


def _metadata(tensors: tuple[OutputTensor, ...], options: ImportOptions) -> Mapping[str, str]:
    """Return a blob's metadata: its quantization when all tensors agree, else each tensor's.

    They say which tensors are transposed, too.
    """
    described = {
        tensor.name: _metadata_of(tensor, one, options)
        for tensor in tensors
        if (one := tensor.quantization) is not None
    }
    turned = {f"{tensor.name}.transposed": "true" for tensor in tensors if tensor.transposed}
    if len(set(described.values())) == 1:
        shared = _shared_mapping(next(iter(described.values())))
        return {**shared, **turned} if turned else shared
    return {
        f"{name}.{key}": value for name, one in described.items() for key, value in one
    } | turned


@functools.cache
def _shared_mapping(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return MappingProxyType(dict(items))


def _metadata_of(
    tensor: OutputTensor, quantization: Quantization, options: ImportOptions
) -> tuple[tuple[str, str], ...]:
    kind = ("quant_type", quantization.quant_type.value)
    # x/create/prequant.go `prequantPatterns`: only compressed-tensors' row has a default.
    is_unstated = options.profile.is_ollama and tensor.sources[0].producer == "ModelOpt NVFP4"
    if tensor.copies_codes and is_unstated:
        return (kind,)
    return (kind, ("group_size", str(quantization.group_size)))


@dataclass(frozen=True, slots=True)
class PlannedBlob:
    """A tensor blob: its layer name, its tensors in stored order, its metadata, its options.

    Nothing is kept that can be made of these: there may be 100,000 blobs.
    """

    KEYS = ("name", "size", "metadata", "tensors")

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]
    options: ImportOptions

    media_type: ClassVar[str] = TENSOR_MEDIA_TYPE

    @classmethod
    def of(cls, name: str, tensors: Iterable[OutputTensor], options: ImportOptions) -> PlannedBlob:
        members = tuple(tensors)
        return cls(name, members, _metadata(members, options), options)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return lay_out(
            (tensor.name + part.suffix, part.dtype, part.shape)
            for tensor in self.tensors
            for part in tensor.stored.parts
        )

    @property
    def data_size(self) -> int:
        return sum([tensor.stored.nbytes for tensor in self.tensors])

    @property
    def header(self) -> bytes:
        """The bytes before the data: length prefix, canonical JSON, padding."""
        return encode_header(
            self.entries, self.metadata, self.options.header_alignment(self.data_size)
        )

    @property
    def size(self) -> int:
        """Bytes of the whole blob."""
        return len(self.header) + self.data_size

    @property
    def sources(self) -> Iterator[SourceWeight]:
        return (source for tensor in self.tensors for source in tensor.sources)

    @property
    def parts(self) -> Iterator[SourceTensor]:

        return (part for source in self.sources for part in source.parts.values())

    @property
    def source_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A layer other than a tensor: its name in the manifest or None, its bytes, its media type."""

    name: str | None
    data: bytes
    media_type: str = JSON_MEDIA_TYPE

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class PlannedCopy:
    """A layer that is a file of the source, byte for byte; ``name`` is that in the manifest."""

    name: str
    file: KeptFile

    media_type = FILE_MEDIA_TYPE

    @property
    def size(self) -> int:
        return self.file.size


PlannedLayer = PlannedBlob | PlannedFile | PlannedCopy


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What an import will write: layers in manifest order and the config.

    ``inventories``: the model's, then the draft's.

    ``coverage``: what these layers hold of the source. ``relative_errors``: by tensor name, the
    root mean square error that was measured, relative to that of the weights, where types were
    chosen for a target. ``notes``: what a user should know about the choice.
    """

    KEYS = ("blobs", "stored_bytes", "bits_per_weight", "coverage", "runs_in")

    inventories: tuple[Inventory, ...] = field(repr=False)
    options: ImportOptions
    layers: tuple[PlannedLayer, ...] = field(repr=False)
    config: ModelConfig
    coverage: Coverage
    relative_errors: Mapping[str, float] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def inventory(self) -> Inventory:
        """The checkpoint of the model itself."""
        return self.inventories[0]

    @property
    def blobs(self) -> tuple[PlannedBlob, ...]:
        """The tensor blobs, in manifest order."""
        return tuple(layer for layer in self.layers if isinstance(layer, PlannedBlob))

    @property
    def documents(self) -> dict[str, bytes]:
        """The JSON documents by name, in manifest order."""
        return {
            layer.name: layer.data
            for layer in self.layers
            if isinstance(layer, PlannedFile)
            and layer.media_type == JSON_MEDIA_TYPE
            and layer.name is not None
        }

    @property
    def tensors(self) -> Iterator[OutputTensor]:
        """All output tensors, in stored order."""
        return (tensor for blob in self.blobs for tensor in blob.tensors)

    @property
    def facts(self) -> ModelFacts:
        """What runtimes have to know of the model."""
        names = frozenset(
            layer.name for layer in self.layers if layer.name and not isinstance(layer, PlannedBlob)
        )
        raw = self.documents.get(CONFIG_NAME)
        config = parse_config(raw) if raw is not None else None
        draft = self.config.draft.architecture if self.config.draft is not None else None
        return ModelFacts(
            config, names, tuple(tensor.facts for tensor in self.tensors), draft, self.documents.get
        )

    @property
    def runs_in(self) -> tuple[Verdict, ...]:
        """Where the model will run, and why not elsewhere."""
        return (on_mlx_lm.verdict(self.facts), on_ollama.verdict(self.facts))

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the sources, also of those that are read and dropped."""
        return sum(inventory.nbytes for inventory in self.inventories)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, before packing."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def type_bytes(self) -> Counter[str]:
        """Bytes of tensors by type, whatever its groups."""
        return bytes_by_type(self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blobs, documents and config included."""
        return sum(layer.size for layer in self.layers) + len(self.config.encode())

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data per parameter, with scales and biases, without headers."""
        return 8 * sum(blob.data_size for blob in self.blobs) / max(1, self.parameters)
