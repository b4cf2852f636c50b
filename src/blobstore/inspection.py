"""Inspection: what is in a stored model, from its manifest and headers. No weight is read, no numpy is loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

from blobstore.digest import Digest
from blobstore.documents import CONFIG_NAME, Manifest, ModelConfig, parse_object
from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.safetensors import read_header
from blobstore.store import Store
from blobstore.stored import StoredTensor, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A stored model in short. ``size`` in bytes, every blob counted once; ``modified`` is its manifest's time, UTC."""

    name: ModelName
    id: Digest
    modified: datetime
    size: int
    parameters: int
    quant_type: str
    layers: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """What config.json and the config blob say about a model; None where they say nothing."""

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A model that can't be read, and why."""

    name: ModelName
    error: BlobStoreError


def list_models(store: Store) -> list[ModelSummary | BrokenModel]:
    """Return every model of the store, sorted by name; one that can't be read is there with its error."""
    models: list[ModelSummary | BrokenModel] = []
    for name, manifest in store.models():
        try:
            if isinstance(manifest, BlobStoreError):
                raise manifest
            models.append(summarize(store, name, manifest))
        except BlobStoreError as error:
            models.append(BrokenModel(name, error))
    return models


def summarize(store: Store, name: ModelName, manifest: Manifest) -> ModelSummary:
    """Return a model's summary, from the headers of its blobs.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says.
    """
    tensors: list[StoredTensor] = []
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors.extend(stored_tensors(read_header(reader)))
    return ModelSummary(
        name=name,
        id=manifest.digest,
        modified=datetime.fromtimestamp(store.manifests.modified(name), UTC),
        size=sum({blob.digest: blob.size for blob in manifest.descriptors}.values()),
        parameters=sum(tensor.parameters for tensor in tensors),
        quant_type=_main_type(tensors),
        layers=len(manifest.layers),
        tensors=tuple(tensors),
    )


def describe(store: Store, manifest: Manifest) -> ModelDetails:
    """Return what a model's documents say about it. Raises: NotFoundError or CorruptDataError for a damaged document."""
    layer = manifest.document(CONFIG_NAME)
    config = parse_object(store.blobs.read(layer), CONFIG_NAME, rule="Q1") if layer is not None else {}
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    blob = manifest.config
    capabilities = ModelConfig.parse(store.blobs.read(blob)).capabilities if blob is not None else None
    architectures = config.get("architectures")
    return ModelDetails(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        context_length=_integer(config, inner, "max_position_embeddings"),
        embedding_length=_integer(config, inner, "hidden_size"),
        capabilities=tuple(capabilities or ()),
    )


def _main_type(tensors: list[StoredTensor]) -> str:
    """Return the type that most weights of quantized tensors have, else the dtype that most weights have."""
    weights: Counter[tuple[bool, str]] = Counter()
    for tensor in tensors:
        weights[tensor.quantization is not None, tensor.type_name] += tensor.parameters
    best = max(weights, key=lambda kind: (kind[0], weights[kind], kind[1]), default=(False, ""))
    return best[1]


def _integer(config: dict[str, object], inner: dict[str, object], key: str) -> int | None:
    value = config.get(key, inner.get(key))
    return value if type(value) is int else None
