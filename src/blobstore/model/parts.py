"""A stored model as an export reads it: its weights from the headers of its blobs, and where their bytes lie.

Nothing is mapped and no file stays open, so a model may have any number of blobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    UnsupportedSourceError,
)
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import Descriptor, Manifest, ModelConfig
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization
from blobstore.formats.safetensors.codec import header_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import FileReader, Identity, OpenReader
from blobstore.model.loader import located, read_document
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Home
from blobstore.store.stored import Settings, StoredTensor, stored_tensors

_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class BlobFile:
    """The file of a blob, as it was when its header was read."""

    digest: Digest
    path: str
    identity: Identity

    def open(self) -> FileReader:
        """Return a reader over it.

        Raises: NotFoundError, StorageError; CorruptDataError when the file is another one now, or
        was written to.
        """
        reader = FileReader(self.path, follow=False)
        try:
            reader.check_is(self.identity)
        except BaseException:
            reader.close()
            raise
        return reader

    def read(self) -> bytes:
        """Return its bytes.

        Raises: as `open`; DigestMismatchError when they are not its digest's.
        """
        with self.open() as reader:
            data = reader.read(0, reader.size)
        if Digest.of(data) != self.digest:
            raise DigestMismatchError(
                f"blob {self.digest} is damaged: its bytes are not its digest's",
                blob=str(self.digest),
            )
        return data


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored array of a weight: its suffix, dtype, shape, and where it lies in the blob's file."""

    suffix: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a stored model, companions included."""

    stored: StoredTensor
    blob: BlobFile
    data_start: int

    @property
    def name(self) -> str:
        """Its name in the blob."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before packing."""
        return self.stored.shape

    @property
    def dtype(self) -> DType:
        """The stored dtype: U32 for codes."""
        return self.stored.dtype

    @property
    def quantization(self) -> Quantization | None:
        """How it is quantized, or None."""
        return self.stored.quantization

    @property
    def parts(self) -> dict[str, StoredPart]:
        """Its stored arrays by suffix, the weight first."""
        return {
            suffix: StoredPart(
                suffix, entry.dtype, entry.shape, self.data_start + entry.begin, entry.nbytes
            )
            for suffix, entry in self.stored.entries.items()
        }


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint beside its weights and documents: its path there, and its blob."""

    name: str
    blob: BlobFile
    size: int


@dataclass(frozen=True)
class StoredModel:
    """A stored model: its weights in manifest order, its documents and its other files."""

    name: ModelName
    manifest: Manifest
    store: Home
    weights: tuple[Weight, ...]

    @cached_property
    def config(self) -> ModelConfig:
        """The config blob; an empty one when the model has none.

        Raises: NotFoundError, CorruptDataError.
        """
        if self.manifest.config is None:
            return ModelConfig()
        return ModelConfig.parse(
            self.store.blobs.read(self.manifest.config), f"the config of {self.name}"
        )

    def files(self) -> Iterator[StoredFile]:
        """Yield the other files, in manifest order; no bytes are read.

        Raises: NotFoundError, CorruptDataError.
        """
        for layer in self.manifest.file_layers:
            if layer.name is not None:
                try:
                    with self.store.blobs.open(layer) as reader:
                        yield StoredFile(layer.name, _file(layer.digest, reader), reader.size)
                except BlobStoreError as error:
                    raise located(error, self.name, layer) from error

    def documents(self) -> dict[str, bytes]:
        """Return the JSON documents by name, in manifest order.

        Raises: NotFoundError, CorruptDataError.
        """
        names = [layer.name for layer in self.manifest.json_layers if layer.name]
        return {name: read_document(self.store, self.name, self.manifest, name) for name in names}


def read_model(name: str | ModelName, store: Home, *, verify: bool) -> StoredModel:
    """Return a stored model, every header of it validated; ``verify`` also hashes every blob.

    Raises: as `open_model`.
    """
    full = store.find(name)
    manifest = store.manifests.read(full)
    if not manifest.tensor_layers:
        message = f"model {full} has no tensor blobs: it is of another kind, GGUF perhaps"
        raise UnsupportedSourceError(message, model=str(full))
    weights: dict[str, Weight] = {}
    settings, budget = settings_of(store.blobs.read, manifest), Budget.of_stored(f"model {full}")
    for layer in manifest.tensor_layers:
        try:
            for weight in _weights(store, layer, settings, budget, verify=verify):
                if weight.name in weights:
                    raise CorruptDataError(
                        f"another blob holds the tensor {weight.name!r} too", tensor=weight.name
                    )
                weights[weight.name] = weight
        except BlobStoreError as error:
            raise located(error, full, layer) from error
    return StoredModel(full, manifest, store, tuple(weights.values()))


def _file(digest: Digest, reader: OpenReader) -> BlobFile:
    if reader.identity is None:
        raise UnsupportedSourceError(
            f"blob {digest} is in no file", blob=str(digest), hint="Transfer the model to a folder."
        )
    return BlobFile(digest, reader.name, reader.identity)


def _weights(
    store: Home, layer: Descriptor, settings: Settings, budget: Budget, *, verify: bool
) -> Iterator[Weight]:
    with store.blobs.open(layer) as reader:
        header = header_of(reader, budget)
        header.check_limits(reader.name)
        if verify and reader.digest() != layer.digest:
            raise DigestMismatchError(
                "its bytes are damaged: they do not match its digest", blob=str(layer.digest)
            )
        blob = _file(layer.digest, reader)
    yield from (
        Weight(stored, blob, header.data_start) for stored in stored_tensors(header, settings)
    )
