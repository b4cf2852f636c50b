"""Listing: the models of a store in short.

A list reads headers only of models that were never listed before. No numpy is loaded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, ClassVar

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats.documents import (
    TEMPLATE_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    Manifest,
    ModelConfig,
)
from blobstore.formats.dtypes import DType
from blobstore.formats.provenance import OWN_DOCUMENT, Coverage, Tally
from blobstore.formats.quant import QuantType
from blobstore.formats.tokenizer import CHAT_TEMPLATE, TEMPLATE_DOCUMENTS
from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import ModelFacts, TensorFacts, Verdict, float_dtype
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Readable, Summary
from blobstore.store.references import is_plain, missing_blob
from blobstore.store.stored import StoredTensor, weights_by_type
from blobstore.store.stored_model import KnownForms, ModelOutline, StoredModel

_QUANTIZED = frozenset(str(quant_type) for quant_type in QuantType)
_Weights = tuple[tuple[str, int], ...]
"""Numbers of weights, each with its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model of a store; one that can't be read has ``error`` and null for what is unknown.

    ``modified`` is its manifest's time, UTC, or None when that is out of range. ``is_packed``: it
    has to be unpacked before it is used.
    """

    KEYS: ClassVar[tuple[str, ...]] = (
        "name",
        "id",
        "size",
        "modified",
        "quant_type",
        "parameters",
        "store?",
        "packed?=is_packed",
    )

    name: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    modified: Annotated[datetime | None, "RFC 3339"]
    size: Annotated[int, "bytes of its blobs, each counted once"]
    parameters: int
    quant_type: str
    is_packed: Annotated[bool, "if it is: true"] = False
    store: Annotated[str | None, "where it lies, when there are lower stores"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary(ListedModel):
    """A stored model in short: its line in a list, the number of its layers, its tensors."""

    layers: int
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """What config.json and the config blob say about a model, and where it runs.

    None where they say nothing. ``runs_in`` is empty for a model that is not stored as tensors,
    such as a GGUF file.
    """

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]
    runs_in: tuple[Verdict, ...]


def summarize(store: Readable, name: ModelName, manifest: Manifest) -> ModelSummary:
    """Return a model's summary, from the headers of its blobs.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says;
    LimitExceededError.
    """
    model = StoredModel(name, manifest, store)
    each = model.tensors_of_each(model.tensor_layers)
    tensors = tuple(tensor for some in each for tensor in some)
    line = line_of(store, name, manifest, tensors)
    return ModelSummary(
        name=line.name,
        id=line.id,
        modified=line.modified,
        size=line.size,
        parameters=line.parameters,
        quant_type=line.quant_type,
        layers=len(manifest.layers),
        tensors=tensors,
    )


def line_of(
    store: Readable, name: ModelName, manifest: Manifest, tensors: Iterable[StoredTensor]
) -> ListedModel:
    """Return a model's line, whose tensors were read. Raises: as `summarize`, for its config."""
    config = StoredModel(name, manifest, store).config
    weights = weights_by_type(tensors)
    return ListedModel(
        name=name,
        id=manifest.digest,
        modified=store.manifests.modified(name),
        size=manifest.size,
        parameters=sum(weights.values()),
        quant_type=model_type(config, weights),
    )


def describe(
    store: Readable, manifest: Manifest, tensors: Sequence[StoredTensor] | ModelOutline
) -> ModelDetails:
    """Return what a model's documents say about it, and where it runs with its ``tensors``.

    Raises: NotFoundError or CorruptDataError for a damaged document.
    """
    model = StoredModel(None, manifest, store)
    own, config = model.config, model.source_config
    names = frozenset(
        layer.name
        for layer in manifest.layers
        if layer.media_type != TENSOR_MEDIA_TYPE and layer.name
    )
    draft = own.draft.architecture if own.draft is not None else None
    tensor_facts = _facts_of(tensors, float_dtype(config or {}))

    def read(name: str) -> bytes | None:
        try:
            return model.document(name)
        except BlobStoreError:
            return None  # verify finds that

    facts = ModelFacts(config, names, tensor_facts, draft, read, _is_described(model, config or {}))
    return ModelDetails(
        architecture=facts.architecture,
        context_length=_integer(config or {}, "max_position_embeddings"),
        embedding_length=_integer(config or {}, "hidden_size"),
        capabilities=_capabilities(own, manifest, read),
        runs_in=(on_mlx_lm.verdict(facts), on_ollama.verdict(facts)) if len(tensors) else (),
    )


def _capabilities(
    own: ModelConfig, manifest: Manifest, read: Callable[[str], bytes | None]
) -> tuple[str, ...]:
    """Return the recorded capabilities, without tools if no template of the model carries them.

    They are those of Ollama's parser for the family, also for a base model without a template.
    """
    named = {layer.name for layer in manifest.layers}
    has_template = (
        CHAT_TEMPLATE in named
        or any(layer.media_type == TEMPLATE_MEDIA_TYPE for layer in manifest.layers)
        or any(b'"chat_template"' in (read(name) or b"") for name in TEMPLATE_DOCUMENTS)
    )
    recorded = own.capabilities or ()
    return tuple(one for one in recorded if has_template or one != "tools")


def _is_described(model: StoredModel, config: Mapping[str, Any]) -> bool:
    """Return False if neither the metadata of blobs nor config.json say how weights are quantized.

    Ollama makes such models of MLX's folders without a ``mode`` (fixtures/ollama-records,
    d_mlx_int4). One quantized blob is read, where config.json has no mode.
    """
    settings = config.get("quantization")
    if not isinstance(settings, dict) or "mode" in settings:
        return True
    for layer in model.tensor_layers:
        with model.opened(layer) as (_, header, tensors):
            if any(tensor.quantization is not None for tensor in tensors):
                return any(key.endswith("quant_type") for key in header.metadata)
    return True


def _facts_of(
    tensors: Sequence[StoredTensor] | ModelOutline, float_dtype: DType
) -> tuple[TensorFacts, ...]:
    if not isinstance(tensors, ModelOutline):
        return tuple(TensorFacts.of(one, float_dtype) for one in tensors)
    nameless = {
        form: (
            form.value_dtype or float_dtype,
            form.shape,
            form.quantization,
            form.has_global_scale,
            form.transposed,
        )
        for form in set(tensors.forms)
    }
    pairs = zip(tensors.names, tensors.forms, strict=True)
    return tuple([TensorFacts(name, *nameless[form]) for name, form in pairs])


def model_type(config: ModelConfig, counts: Mapping[str, int]) -> str:
    """Return the type that was asked for, when some tensor has it; else the most frequent one.

    ``counts``: weights by type. A quantized type counts before any other. Sensitive layers of a
    4-bit model are kept in 8 bits, so a count alone would call a small int4 model int8.
    """
    if config.file_type in counts or not counts:
        return config.file_type or ""
    return min(counts, key=lambda kind: (kind not in _QUANTIZED, -counts[kind], kind))


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    text = config.get("text_config")
    value = config.get(key, text.get(key) if isinstance(text, dict) else None)
    return value if type(value) is int else None


def stored_coverage(store: Readable, manifest: Manifest) -> Coverage:
    """Return the coverage that was recorded when a model was imported.

    Without a record, count what is stored, and return None for the source's own numbers: Ollama
    does not record them.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says;
    DocumentError (rule B1); LimitExceededError.
    """
    model = StoredModel(None, manifest, store)
    provenance = model.provenance
    if provenance is not None and provenance.coverage is not None:
        return provenance.coverage
    tensors = len(ModelOutline.of(model, model.tensor_layers))
    layers = (*manifest.json_layers, *manifest.file_layers)
    files = sum(layer.name != OWN_DOCUMENT for layer in layers)
    return Coverage(Tally(None, tensors), Tally(None, files))


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A model that can't be read, and why."""

    KEYS = (
        "name",
        "id=_unknown",
        "size=_unknown",
        "modified=_unknown",
        "quant_type=_unknown",
        "parameters=_unknown",
        "error",
        "store?",
    )

    name: ModelName
    error: Annotated[BlobStoreError, "why it can't be read"]
    is_packed: bool = False
    store: Annotated[str | None, "where it lies, when there are lower stores"] = None
    _unknown: ClassVar[None] = None


def list_models(store: Readable) -> list[ListedModel | BrokenModel]:
    """Return every model of the store, sorted by name; a model that can't be read with its error.

    Packed models are among them, unless a whole one has the name.

    Missing blobs are found every time. Headers are read only of models that were never listed
    before (store/local/hints.py says why, and what is written).

    Raises: StorageError when the folders can't be listed.
    """
    models = _listed(store)
    packed = store.packed
    if packed is not None and (names := packed.manifests.names()):
        whole = {model.name.folded for model in models}
        others = _listed(packed, [name for name in names if name.folded not in whole])
        models += [replace(one, is_packed=True) for one in others]
        models.sort(key=lambda model: model.name)
    if not store.lower:
        return models
    placed = []
    for one in models:
        with suppress(NotFoundError):  # removed meanwhile
            home = store.upper if one.is_packed else store.home_of(one.name)
            placed.append(replace(one, store=home.address))
    return placed


def _listed(
    store: Readable, names: Iterable[ModelName] | None = None
) -> list[ListedModel | BrokenModel]:
    known = store.summaries.read() if store.summaries is not None else {}
    listing = _Listing(store, known)
    models: list[ListedModel | BrokenModel] = []
    for name in store.manifests.names() if names is None else names:
        try:
            models.append(listing.listed(name))
        except BlobStoreError as error:
            with suppress(NotFoundError):  # the model was removed meanwhile, and is not broken
                store.find(name)
                models.append(BrokenModel(name, error.about(model=str(name))))
    if store.summaries is not None:
        store.summaries.add(listing.new)
    return models


@dataclass(slots=True)
class _Listing:
    """Summaries of earlier lists and new ones, and the digests of all blobs if they are needed.

    ``sound``, ``failed``: what was found of manifests this time, because thousands of names may
    have the same bytes. ``weights``: of blobs, which models may share, by their hex digits;
    ``forms``: each value of it once, because thousands of blobs have the same. ``tensor_forms``:
    what tensors are.
    """

    store: Readable
    known: Mapping[str, Summary]
    there: set[str] | None = None
    new: dict[str, Summary] = field(default_factory=dict)
    sound: dict[str, Summary] = field(default_factory=dict)
    failed: dict[str, BlobStoreError] = field(default_factory=dict)
    weights: dict[str, _Weights] = field(default_factory=dict)
    forms: dict[_Weights, _Weights] = field(default_factory=dict)
    tensor_forms: KnownForms = field(default_factory=dict)

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
            raise self.failed[key].about()  # a copy: a raised error keeps its raiser's memory
        if key not in self.sound:
            try:
                self.sound[key] = self._known(key, raw) or self._new(key, raw)
            except BlobStoreError as error:
                self.failed[key] = error.kept()
                raise
        return self.sound[key]

    def _known(self, key: str, raw: bytes) -> Summary | None:
        """Return the summary of an earlier list. Raises: NotFoundError when a blob is missing."""
        summary = self.known.get(key)
        if summary is None:
            return None
        if self.there is None:
            self.there = self.store.blobs.digests()
        if (missing := missing_blob(raw, self.there, is_plain=summary.is_plain)) is not None:
            raise NotFoundError(f"blob sha256:{missing} is missing", blob=f"sha256:{missing}")
        return summary

    def _new(self, key: str, raw: bytes) -> Summary:
        manifest = Manifest.parse(raw, "the manifest")
        model = StoredModel(None, manifest, self.store)
        layers = manifest.tensor_layers
        new = {one.digest.hex: one for one in layers if one.digest.hex not in self.weights}
        outline = ModelOutline.of(model, list(new.values()), self.tensor_forms)
        for blob, tensors in zip(new, outline.each(), strict=True):
            found = tuple(weights_by_type(tensors).items())
            self.weights[blob] = self.forms.setdefault(found, found)
        counts: Counter[str] = Counter()
        for layer in layers:
            for kind, number in self.weights[layer.digest.hex]:
                counts[kind] += number
        summary = self.new[key] = Summary(
            size=manifest.size,
            parameters=counts.total(),
            quant_type=model_type(model.config, counts),
            is_plain=is_plain(raw),
        )
        return summary
