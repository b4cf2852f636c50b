"""Listing: every model of a store in a line.

Headers are read of models that were never listed before, once for all.

Covered: how much of its source a stored model holds, from what the import recorded.

Models: what is in the stored models, in short: for lists. From manifests and headers; no numpy is
loaded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats import safetensors
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config, settings_of
from blobstore.formats.coverage import Coverage, Tally
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest, ModelConfig
from blobstore.formats.provenance import OWN_DOCUMENT, Provenance
from blobstore.io.budget import Budget
from blobstore.model.facts import ModelFacts, TensorFacts, Verdict
from blobstore.model.runtimes import verdicts
from blobstore.names import Digest, ModelName
from blobstore.store.local.references import is_plain, missing_blob
from blobstore.store.ports import Home, Summary
from blobstore.store.stored import Settings, StoredTensor, stored_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A stored model in a line.

    ``size`` in bytes, every blob counted once; ``modified`` is its manifest's time, UTC, or None
    when that is out of range.
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
    """What config.json and the config blob say about a model, None where they say nothing.

    And where it runs.

    ``runs_in`` is empty for a model that is not stored as tensors, such as a GGUF file.
    """

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]
    runs_in: tuple[Verdict, ...]


def summarize(store: Home, name: ModelName, manifest: Manifest) -> ModelSummary:
    """Return a model's summary, from the headers of its blobs.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says;
    LimitExceededError.
    """
    settings = settings_of(store.blobs.read, manifest)
    budget = Budget.of_stored(f"model {name}")
    tensors: list[StoredTensor] = []
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors.extend(stored_tensors(safetensors.header_of(reader, budget), settings))
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


def describe(store: Home, manifest: Manifest, tensors: tuple[StoredTensor, ...]) -> ModelDetails:
    """Return what a model's documents say about it, and where it runs with its ``tensors``.

    Raises: NotFoundError or CorruptDataError for a damaged document.
    """
    layer, own = manifest.document(CONFIG_NAME), config_of(store, manifest)
    config = parse_config(store.blobs.read(layer)) if layer is not None else None
    names = frozenset(
        layer.name
        for layer in manifest.layers
        if layer.media_type != TENSOR_MEDIA_TYPE and layer.name
    )
    draft = own.draft.architecture if own.draft is not None else None
    return ModelDetails(
        architecture=_architecture(config or {}),
        context_length=_integer(config or {}, "max_position_embeddings"),
        embedding_length=_integer(config or {}, "hidden_size"),
        capabilities=tuple(own.capabilities or ()),
        runs_in=verdicts(ModelFacts(config, names, tuple(map(_facts, tensors)), draft))
        if tensors
        else (),
    )


def _facts(tensor: StoredTensor) -> TensorFacts:
    scaled = ".global_scale" in tensor.entries
    return TensorFacts(
        tensor.name, tensor.dtype, tensor.shape, tensor.quantization, double_scaled=scaled
    )


def config_of(store: Home, manifest: Manifest) -> ModelConfig:
    """Return a model's config, an empty one where it has none.

    Raises: as `BlobFolder.read` and `ModelConfig.parse`.
    """
    return (
        ModelConfig.parse(store.blobs.read(manifest.config))
        if manifest.config is not None
        else ModelConfig()
    )


def model_type(config: ModelConfig, counts: Mapping[str, int], quantized: Collection[str]) -> str:
    """Return the type that was asked for, when some tensor has it.

    Else the one that most weights have.

    ``counts``: weights by type; ``quantized``: which types are. Sensitive layers of a 4-bit model
    are kept in 8 bits, so a count alone would call a small int4 model int8.
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


def stored_coverage(store: Home, manifest: Manifest) -> Coverage:
    """Return the coverage that was recorded when a model was imported.

    Where none was, what is stored is counted.

    Then the source's own numbers are None: Ollama does not record them.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says;
    DocumentError (rule B1); LimitExceededError.
    """
    layer = manifest.document(OWN_DOCUMENT)
    recorded = Provenance.parse(store.blobs.read(layer)).coverage if layer is not None else None
    return (
        recorded if recorded is not None else _counted(store, manifest, has_own=layer is not None)
    )


def _counted(store: Home, manifest: Manifest, *, has_own: bool) -> Coverage:
    tensors, budget = 0, Budget.of_stored("the model")
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors += len(list(stored_tensors(safetensors.header_of(reader, budget))))
    files = len(manifest.json_layers) + len(manifest.file_layers) - has_own
    return Coverage(Tally(None, tensors), Tally(None, files))


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A model that can't be read, and why."""

    name: ModelName
    error: BlobStoreError


def list_models(store: Home) -> list[ListedModel | BrokenModel]:
    """Return every model of the store, sorted by name.

    One that can't be read is there with its error.

    Whether all blobs of a model are there is checked every time; their headers only when it was
    never listed before (store/local/journal.py has why, and what is written). Raises: StorageError
    when the folders can't be listed.
    """
    known = store.summaries.read() if store.summaries is not None else {}
    work = _Work(store, known, store.blobs.digests())
    models: list[ListedModel | BrokenModel] = []
    for name in store.manifests.names():
        try:
            models.append(work.listed(name))
        except BlobStoreError as error:
            if _is_there(store, name):  # else it has been removed meanwhile, and is not broken
                models.append(BrokenModel(name, error.about(model=str(name))))
    if store.summaries is not None:
        store.summaries.add(work.new)
    return models


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a blob by type, and which of the types are quantized."""

    counts: Counter[str]
    quantized: frozenset[str]


@dataclass(slots=True)
class _Work:
    """What is known while models are listed: summaries of earlier times and new ones, the digests of all blobs.

    ``sound``, ``failed``: what was found of manifests this time. Thousands of names may have the
    same bytes.
    """

    store: Home
    known: Mapping[str, Summary]
    there: set[str]
    new: dict[str, Summary] = field(default_factory=dict)
    sound: dict[str, Summary] = field(default_factory=dict)
    failed: dict[str, BlobStoreError] = field(default_factory=dict)
    weights: dict[Digest, _Weights] = field(default_factory=dict)

    def listed(self, name: ModelName) -> ListedModel:
        """Return a model in a line. Raises: as `Store.manifest` and `BlobFolder.open`."""
        raw = self.store.manifests.text(name)
        digest = Digest(hashlib.sha256(raw).hexdigest())
        summary = self._summary(digest.hex, raw)
        return ListedModel(
            name=name,
            id=digest,
            modified=self.store.manifests.modified(name),
            size=summary.size,
            parameters=summary.parameters,
            quant_type=summary.quant_type,
        )

    def _summary(self, key: str, raw: bytes) -> Summary:
        if key in self.failed:
            raise self.failed[
                key
            ].about()  # an error of its own: a raised one keeps what its raiser held
        if key not in self.sound:
            try:
                self.sound[key] = self._known(key, raw) or self._new(key, raw)
            except BlobStoreError as error:
                self.failed[key] = error.kept()
                raise
        return self.sound[key]

    def _known(self, key: str, raw: bytes) -> Summary | None:
        """Return the summary of an earlier time.

        Raises: NotFoundError when a blob is missing now.
        """
        summary = self.known.get(key)
        if (
            summary is not None
            and (missing := missing_blob(raw, self.there, is_plain=summary.is_plain)) is not None
        ):
            raise NotFoundError(f"blob sha256:{missing} is missing", blob=f"sha256:{missing}")
        return summary

    def _new(self, key: str, raw: bytes) -> Summary:
        summary = self.new[key] = self._summarized(Manifest.parse(raw, "the manifest"), raw)
        return summary

    def _summarized(self, manifest: Manifest, raw: bytes) -> Summary:
        counts: Counter[str] = Counter()
        quantized: set[str] = set()
        settings, budget = (
            settings_of(self.store.blobs.read, manifest),
            Budget.of_stored("the model"),
        )
        for layer in manifest.tensor_layers:
            weights = self._weights(layer, settings, budget)
            counts.update(weights.counts)
            quantized |= weights.quantized
        return Summary(
            size=manifest.size,
            parameters=counts.total(),
            quant_type=model_type(config_of(self.store, manifest), counts, quantized),
            is_plain=is_plain(raw),
        )

    def _weights(self, layer: Descriptor, settings: Settings, budget: Budget) -> _Weights:
        if layer.digest not in self.weights:
            with self.store.blobs.open(layer) as reader:
                tensors = list(stored_tensors(safetensors.header_of(reader, budget), settings))
            counts: Counter[str] = Counter()
            for tensor in tensors:
                counts[tensor.type_name] += tensor.parameters
            quantized = frozenset(
                tensor.type_name for tensor in tensors if tensor.quantization is not None
            )
            self.weights[layer.digest] = _Weights(counts, quantized)
        return self.weights[layer.digest]


def _is_there(store: Home, name: ModelName) -> bool:
    try:
        store.find(name)
    except NotFoundError:
        return False
    return True
