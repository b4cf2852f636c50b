"""Listing: every model of a store in a line. Headers are read of models that were never listed before, once for all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from blobstore import safetensors
from blobstore.budget import Budget
from blobstore.digest import Digest
from blobstore.documents import Descriptor, Manifest
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.inspection.models import ListedModel, config_of, model_type
from blobstore.mlx_settings import settings_of
from blobstore.names import ModelName
from blobstore.store import Store, Summary, is_plain, missing_blob
from blobstore.stored import Settings, stored_tensors


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A model that can't be read, and why."""

    name: ModelName
    error: BlobStoreError


def list_models(store: Store) -> list[ListedModel | BrokenModel]:
    """Return every model of the store, sorted by name; one that can't be read is there with its error.

    Whether all blobs of a model are there is checked every time; their headers only when it was never listed before
    (store/summaries.py has why, and what is written). Raises: StorageError when the folders can't be listed.
    """
    work = _Work(store, store.summaries.read(), store.blobs.digests())
    models: list[ListedModel | BrokenModel] = []
    for name in store.manifests.names():
        try:
            models.append(work.listed(name))
        except BlobStoreError as error:
            if _is_there(store, name):  # else it has been removed meanwhile, and is not broken
                models.append(BrokenModel(name, error.about(model=str(name))))
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

    ``sound``, ``failed``: what was found of manifests this time. Thousands of names may have the same bytes.
    """

    store: Store
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
            raise self.failed[key].about()  # an error of its own: a raised one keeps what its raiser held
        if key not in self.sound:
            try:
                self.sound[key] = self._known(key, raw) or self._new(key, raw)
            except BlobStoreError as error:
                self.failed[key] = error.kept()
                raise
        return self.sound[key]

    def _known(self, key: str, raw: bytes) -> Summary | None:
        """Return the summary of an earlier time. Raises: NotFoundError when a blob is missing now."""
        summary = self.known.get(key)
        if summary is not None and (missing := missing_blob(raw, self.there, is_plain=summary.is_plain)) is not None:
            raise NotFoundError(f"blob sha256:{missing} is missing", blob=f"sha256:{missing}")
        return summary

    def _new(self, key: str, raw: bytes) -> Summary:
        summary = self.new[key] = self._summarized(Manifest.parse(raw, "the manifest"), raw)
        return summary

    def _summarized(self, manifest: Manifest, raw: bytes) -> Summary:
        counts: Counter[str] = Counter()
        quantized: set[str] = set()
        settings, budget = settings_of(self.store, manifest), Budget("the model")
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
                tensors = list(stored_tensors(safetensors.read_header(reader, budget), settings))
            counts: Counter[str] = Counter()
            for tensor in tensors:
                counts[tensor.type_name] += tensor.parameters
            quantized = frozenset(tensor.type_name for tensor in tensors if tensor.quantization is not None)
            self.weights[layer.digest] = _Weights(counts, quantized)
        return self.weights[layer.digest]


def _is_there(store: Store, name: ModelName) -> bool:
    try:
        store.manifests.require(name)
    except NotFoundError:
        return False
    return True
