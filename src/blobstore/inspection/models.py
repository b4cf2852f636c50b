"""Models: what is in the stored models, in short: for lists. From manifests and headers; no numpy is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from blobstore import safetensors
from blobstore.budget import Budget
from blobstore.checkpoint import CONFIG_NAME, parse_config
from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE, Manifest, ModelConfig
from blobstore.mlx_settings import settings_of
from blobstore.names import ModelName
from blobstore.runtimes import ModelFacts, TensorFacts, Verdict, verdicts
from blobstore.store import Store
from blobstore.stored import StoredTensor, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A stored model in a line.

    ``size`` in bytes, every blob counted once; ``modified`` is its manifest's time, UTC, or None when that is out of range.
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
    """What config.json and the config blob say about a model, None where they say nothing; and where it runs.

    ``runs_in`` is empty for a model that is not stored as tensors, such as a GGUF file.
    """

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]
    runs_in: tuple[Verdict, ...]


def summarize(store: Store, name: ModelName, manifest: Manifest) -> ModelSummary:
    """Return a model's summary, from the headers of its blobs.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says; LimitExceededError.
    """
    settings = settings_of(store, manifest)
    budget = Budget(f"model {name}")
    tensors: list[StoredTensor] = []
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors.extend(stored_tensors(safetensors.read_header(reader, budget), settings))
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


def describe(store: Store, manifest: Manifest, tensors: tuple[StoredTensor, ...]) -> ModelDetails:
    """Return what a model's documents say about it, and where it runs with its ``tensors``.

    Raises: NotFoundError or CorruptDataError for a damaged document.
    """
    layer, own = manifest.document(CONFIG_NAME), config_of(store, manifest)
    config = parse_config(store.blobs.read(layer)) if layer is not None else None
    names = frozenset(layer.name for layer in manifest.layers if layer.media_type != TENSOR_MEDIA_TYPE and layer.name)
    draft = own.draft.architecture if own.draft is not None else None
    return ModelDetails(
        architecture=_architecture(config or {}),
        context_length=_integer(config or {}, "max_position_embeddings"),
        embedding_length=_integer(config or {}, "hidden_size"),
        capabilities=tuple(own.capabilities or ()),
        runs_in=verdicts(ModelFacts(config, names, tuple(map(_facts, tensors)), draft)) if tensors else (),
    )


def _facts(tensor: StoredTensor) -> TensorFacts:
    scaled = ".global_scale" in tensor.entries
    return TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.quantization, double_scaled=scaled)


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


def _architecture(config: dict[str, object]) -> str | None:
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def _integer(config: dict[str, object], key: str) -> int | None:
    text = config.get("text_config")
    value = config.get(key, text.get(key) if isinstance(text, dict) else None)
    return value if type(value) is int else None
