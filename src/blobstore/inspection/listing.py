"""Listing: the models of a store in short.

A list reads headers only of models that were never listed before. No numpy is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Annotated, ClassVar

from blobstore.errors import BlobStoreError, CorruptDataError, LimitExceededError, NotFoundError
from blobstore.formats.checkpoint import CHAT_TEMPLATE, TEMPLATE_DOCUMENTS
from blobstore.formats.documents import (
    OWN_DOCUMENT,
    TEMPLATE_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    Coverage,
    Manifest,
    ModelConfig,
    Tally,
)
from blobstore.formats.dtypes import QuantType, float_dtype
from blobstore.formats.gguf import GgufTensor, gguf_header
from blobstore.formats.oci import foreign_kind
from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import Config, ModelFacts, TensorFacts, Verdict
from blobstore.names import Digest, ModelName
from blobstore.store.hints import Summary
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Readable, unique
from blobstore.store.references import is_plain, missing_blob
from blobstore.store.stored import StoredTensor, bits_per_weight, weights_by_type
from blobstore.store.stored_model import KnownForms, ModelOutline, StoredModel

_QUANTIZED = frozenset(str(quant_type) for quant_type in QuantType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model of a store; one that can't be read has ``error`` and null for what is unknown.

    ``modified`` is its manifest's time, UTC, or None when that is out of range. ``is_packed``: it
    has to be unpacked before it is used.
    """

    KEYS = (
        "name",
        "id",
        "size",
        "modified",
        "quant_type",
        "parameters",
        "bits_per_weight",
        "store?",
        "packed?=is_packed",
    )

    name: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    modified: Annotated[datetime | None, "RFC 3339"]
    size: Annotated[int, "bytes of its blobs, each counted once"]
    parameters: int
    bits_per_weight: Annotated[float | None, "of tensor data; null without tensors"]
    quant_type: str
    is_packed: Annotated[bool, "true if it is packed"] = False
    store: Annotated[str | None, "its store, if there are lower stores"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails(ListedModel):
    """A model's line in a list, what its documents say about it, and where it runs.

    None where they say nothing. ``runs_in`` is empty for a model that is not stored as tensors,
    such as a GGUF file.
    """

    architecture: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: tuple[str, ...]
    runs_in: tuple[Verdict, ...]


def describe(
    store: Readable,
    name: ModelName,
    manifest: Manifest,
    tensors: Sequence[tuple[str, StoredTensor]],
) -> ModelDetails:
    """Return what a model's ``tensors``, by name, and its documents say about it.

    Raises: NotFoundError or CorruptDataError for a damaged document.
    """
    model = StoredModel(name, manifest, store)
    own, config = model.config, model.source_config
    names = frozenset(
        layer.name
        for layer in manifest.layers
        if layer.media_type != TENSOR_MEDIA_TYPE and layer.name
    )
    draft = own.draft.architecture if own.draft is not None else None
    floats = float_dtype(config or {})
    tensor_facts = tuple(TensorFacts.of(*named, floats) for named in tensors)

    def read(name: str) -> bytes | None:
        try:
            return model.document(name)
        except BlobStoreError:
            return None  # verify finds that

    facts = ModelFacts(config, names, tensor_facts, draft, read, _is_described(model, config or {}))
    counted = [tensor for _, tensor in tensors] or gguf_tensors(store, manifest)
    weights = weights_by_type(counted)
    return ModelDetails(
        name=name,
        id=manifest.digest,
        modified=store.manifests.modified_at(name),
        size=manifest.size,
        parameters=weights.total(),
        bits_per_weight=bits_per_weight(sum(one.nbytes for one in counted), weights.total()),
        quant_type=model_type(model, weights),
        architecture=facts.architecture,
        context_length=_integer(config or {}, "max_position_embeddings"),
        embedding_length=_integer(config or {}, "hidden_size"),
        capabilities=_capabilities(own, manifest, read),
        runs_in=(on_mlx_lm.verdict(facts), on_ollama.verdict(facts)) if tensors else (),
    )


def summarize(
    store: Readable, name: ModelName, manifest: Manifest
) -> tuple[ModelDetails, list[StoredTensor]]:
    """Return what `describe` returns, and the model's tensors, which are read.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says;
    LimitExceededError.
    """
    model = StoredModel(name, manifest, store)
    tensors = [one for some in model.tensors_of_each(model.tensor_layers) for one in some]
    return describe(store, name, manifest, [(tensor.name, tensor) for tensor in tensors]), tensors


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
    return tuple(one for one in own.capabilities or () if has_template or one != "tools")


def _is_described(model: StoredModel, config: Config) -> bool:
    """Return False if neither the metadata of blobs nor config.json say how weights are quantized.

    Ollama makes such models of MLX's folders without a ``mode`` (fixtures/ollama-records,
    d_mlx_int4). One quantized blob is read, where config.json has no mode.
    """
    settings = config.get("quantization")
    if not isinstance(settings, dict) or "mode" in settings:
        return True
    for layer in model.tensor_layers:
        with model.open_layer(layer) as (_, header, tensors):
            if any(tensor.quantization is not None for tensor in tensors):
                return any(key.endswith("quant_type") for key in header.metadata)
    return True


def gguf_tensors(store: Readable, manifest: Manifest) -> list[GgufTensor]:
    """Return the tensors of a model's GGUF files; none if a header is not valid.

    Raises: NotFoundError, StorageError.
    """
    tensors: list[GgufTensor] = []
    try:
        for layer in manifest.gguf_layers:
            with store.blobs.open(layer) as reader:
                tensors += gguf_header(reader, arrays=False).tensors.values()
    except (CorruptDataError, LimitExceededError):
        return []
    return tensors


def model_type(model: StoredModel, counts: Mapping[str, int]) -> str:
    """Return the type that was asked for, when some tensor has it; else the most frequent one.

    ``counts``: weights by type. A quantized type counts before any other. Sensitive layers of a
    4-bit model are kept in 8 bits, so a count alone would call a small int4 model int8. The type
    of a GGUF file begins with ``GGUF``, and is as Ollama names it: ``GGUF Q4_K_M``.
    """
    config = model.config
    if model.manifest.gguf_layers:
        return " ".join(filter(None, ("GGUF", config.file_type)))
    if config.file_type in counts or not counts:
        return config.file_type or foreign_kind(model.manifest)
    return min(counts, key=lambda kind: (kind not in _QUANTIZED, -counts[kind], kind))


def _integer(config: Config, key: str) -> int | None:
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
    files = sum(
        layer.name != OWN_DOCUMENT for layer in (*manifest.json_layers, *manifest.file_layers)
    )
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
        "bits_per_weight=_unknown",
        "error",
        "store?",
    )

    name: ModelName
    error: Annotated[BlobStoreError, "why it can't be read"]
    is_packed: bool = False
    store: Annotated[str | None, "its store, if there are lower stores"] = None
    _unknown: ClassVar[None] = None


def list_models(store: Readable | StorePlace = None) -> list[ListedModel | BrokenModel]:
    """Return every model of the store, sorted by name; a model that can't be read with its error.

    Packed models are included, unless an unpacked one has the same name.

    Missing blobs are found every time. Headers are read only of models that were never listed
    before (store/local/hints.py says why, and what is written).

    Raises: StorageError when the folders can't be listed.
    """
    store = opened_store(store)
    models = _list_models(store)
    packed = store.packed
    if packed is not None and (names := packed.manifests.names()):
        whole = {model.name.folded for model in models}
        others = _list_models(packed, [name for name in names if name.folded not in whole])
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


def _summaries(store: Readable, new: dict[str, Summary]) -> Callable[[bytes, Digest], Summary]:
    """Return a function of a manifest and its digest; ``new`` gets what was read from headers."""
    known: dict[str, Summary | BlobStoreError] = {}
    if store.summaries is not None:
        known.update(store.summaries.read())
    present = cache(store.blobs.digests)
    forms: KnownForms = {}
    sound: set[str] = set()

    def summary_of(raw: bytes, digest: Digest) -> Summary:
        summary = known.get(digest.hex)
        if isinstance(summary, BlobStoreError):  # thousands of names may have the same bytes
            raise summary.about()
        if summary is not None and digest.hex in sound:
            return summary
        try:
            if summary is None:
                known[digest.hex] = new[digest.hex] = summary = _summary(store, raw, forms)
            elif missing := missing_blob(raw, present(), is_plain=summary.is_plain):
                raise NotFoundError(f"blob sha256:{missing} is missing", blob=f"sha256:{missing}")
        except BlobStoreError as error:
            known[digest.hex] = error.without_traceback()
            raise
        sound.add(digest.hex)
        return summary

    return summary_of


def _list_models(
    store: Readable, names: Iterable[ModelName] | None = None
) -> list[ListedModel | BrokenModel]:
    new: dict[str, Summary] = {}
    summary_of = _summaries(store, new)
    models: list[ListedModel | BrokenModel] = []
    for name in store.manifests.names() if names is None else names:
        try:
            raw = store.manifests.text(name)
            digest = Digest.of(raw)
            summary = summary_of(raw, digest)
            modified = store.manifests.modified_at(name)
        except BlobStoreError as error:
            with suppress(NotFoundError):  # the model was removed meanwhile, and is not broken
                store.find(name)
                models.append(BrokenModel(name, error.about(model=str(name))))
        else:
            models.append(
                ListedModel(
                    name=name,
                    id=digest,
                    modified=modified,
                    size=summary.size,
                    parameters=summary.parameters,
                    bits_per_weight=bits_per_weight(summary.tensor_bytes, summary.parameters),
                    quant_type=summary.quant_type,
                )
            )
    if store.summaries is not None:
        store.summaries.add(new)
    return models


def _summary(store: Readable, raw: bytes, forms: KnownForms) -> Summary:
    manifest = Manifest.parse(raw, "the manifest")
    model = StoredModel(None, manifest, store)
    outline = ModelOutline.of(model, unique(manifest.tensor_layers), forms)
    counted = outline.forms or gguf_tensors(store, manifest)
    weights = weights_by_type(counted)
    return Summary(
        size=manifest.size,
        parameters=weights.total(),
        tensor_bytes=sum(form.nbytes for form in counted),
        quant_type=model_type(model, weights),
        is_plain=is_plain(raw),
    )
