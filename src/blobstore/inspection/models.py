"""Models: what is in the stored models, in short: for lists. From manifests and headers; no numpy is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from blobstore import safetensors
from blobstore.checkpoint import CONFIG_NAME, parse_config
from blobstore.digest import Digest
from blobstore.documents import Manifest, ModelConfig
from blobstore.names import ModelName
from blobstore.store import Store
from blobstore.stored import StoredTensor, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A stored model in a line.

    ``size`` in bytes, every blob counted once; ``modified`` is its manifest's time, UTC, or None when that is no date.
    """

    name: ModelName
    id: Digest
    modified: datetime | None
    size: int
    parameters: int
    quant_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary(ListedModel):
    """A stored model in short: what a list says of it, the number of its layers, its tensors."""

    layers: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """What config.json and the config blob say about a model; None where they say nothing."""

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]


def summarize(store: Store, name: ModelName, manifest: Manifest) -> ModelSummary:
    """Return a model's summary, from the headers of its blobs.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says.
    """
    tensors: list[StoredTensor] = []
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors.extend(stored_tensors(safetensors.read_header(reader)))
    return ModelSummary(
        name=name,
        id=manifest.digest,
        modified=store.manifests.modified(name),
        size=manifest.size,
        parameters=sum(tensor.parameters for tensor in tensors),
        quant_type=model_type(
            config_of(store, manifest),
            weights_by_type(tensors),
            {tensor.type_name for tensor in tensors if tensor.quantization is not None},
        ),
        layers=len(manifest.layers),
        tensors=tuple(tensors),
    )


def describe(store: Store, manifest: Manifest) -> ModelDetails:
    """Return what a model's documents say about it. Raises: NotFoundError or CorruptDataError for a damaged document."""
    layer = manifest.document(CONFIG_NAME)
    config = parse_config(store.blobs.read(layer)) if layer is not None else {}
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    architectures = config.get("architectures")
    return ModelDetails(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        context_length=_integer(config, inner, "max_position_embeddings"),
        embedding_length=_integer(config, inner, "hidden_size"),
        capabilities=tuple(config_of(store, manifest).capabilities or ()),
    )


def config_of(store: Store, manifest: Manifest) -> ModelConfig:
    """Return a model's config, an empty one where it has none. Raises: as `BlobFolder.read` and `ModelConfig.parse`."""
    return ModelConfig.parse(store.blobs.read(manifest.config)) if manifest.config is not None else ModelConfig()


def model_type(config: ModelConfig, counts: Mapping[str, int], quantized: Collection[str]) -> str:
    """Return the type that was asked for, when some tensor has it; else the one that most weights have.

    ``counts``: weights by type; ``quantized``: which types are. Sensitive layers of a 4-bit model are kept in 8 bits, so a
    count alone would call a small int4 model int8.
    """
    if config.file_type in counts or not counts:
        return config.file_type or ""
    weights = sorted(counts, key=lambda kind: (-counts[kind], kind))
    return next((kind for kind in weights if kind in quantized), weights[0])


def weights_by_type(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Return the number of weights of each quantized type or dtype, the most frequent first."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.type_name] += tensor.parameters
    return dict(sorted(weights.items(), key=lambda item: (-item[1], item[0])))


def _integer(config: dict[str, object], inner: dict[str, object], key: str) -> int | None:
    value = config.get(key, inner.get(key))
    return value if type(value) is int else None
