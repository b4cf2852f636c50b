"""Answers: the documents of the API, made of a store by the library's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blobstore import __version__
from blobstore.formats.documents import Manifest
from blobstore.formats.safetensors.codec import collector_paused
from blobstore.inspection.listing import describe, list_models, summarize
from blobstore.names import Digest, ModelName
from blobstore.store.holders import holder_of
from blobstore.store.ports import Readable
from blobstore.store.stored_model import StoredModel
from blobstore.views.checkpoints import DiffView
from blobstore.views.looked import LookedModelView, TensorColumnsView
from blobstore.views.records import kept_quality, kept_verify
from blobstore.views.stores import ListItemView, UsageView
from blobstore.web.opened_models import OpenedModel, OpenedModels


@dataclass(frozen=True, slots=True)
class Answer:
    """A document in JSON, made by ``body`` when it is needed.

    ``tag`` changes with the document; None: it is the digest of the body.
    """

    body: Callable[[], bytes]
    tag: str | None = None


class Looker:
    """A home that is looked at, and its opened models."""

    def __init__(self, home: Readable) -> None:
        self.home = home
        self.opened = OpenedModels()

    def find(self, name: str) -> FoundModel:
        """Return a model. Raises: InvalidNameError; NotFoundError; StorageError."""
        parsed = ModelName.parse(name)
        holder = holder_of(parsed, self.home)
        full = holder.find(parsed)
        raw = holder.manifests.text(full)
        packed = holder is getattr(self.home, "packed", None)
        return FoundModel(full, holder, raw, Digest.of(raw), packed)

    def open(self, found: FoundModel) -> OpenedModel:
        """Return a model's answers. Raises: as `StoredModel.opened`; DocumentError."""
        key = (found.digest, found.name, found.is_packed)
        return self.opened.get(key, lambda: _opened(found))


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model, the part of the home that has it, and the bytes of its manifest."""

    name: ModelName
    holder: Readable
    raw: bytes
    digest: Digest
    is_packed: bool

    @property
    def tag(self) -> str:
        """Names the answers about it, also after an update of blobstore."""
        return f"{self.digest.hex}-{__version__}"


@collector_paused()
def _opened(found: FoundModel) -> OpenedModel:
    manifest = Manifest.parse(found.raw, f"the manifest of {found.name}")
    model = StoredModel(found.name, manifest, found.holder)
    tensors, layers = [], []
    each = model.tensors_of_each(manifest.tensor_layers)
    for number, some in enumerate(each):
        tensors += some
        layers += [number] * len(some)
    summary = replace(summarize(found.holder, found.name, manifest), is_packed=found.is_packed)
    details = describe(found.holder, manifest, summary.tensors)
    columns = TensorColumnsView.of(found.name, str(found.digest), tensors)
    from array import array

    return OpenedModel(
        encoded(LookedModelView.of(summary, details, manifest)),
        encoded(columns),
        tuple(columns.names),
        memoryview(array("I", layers)),
    )


def encoded(document: Any) -> bytes:
    """Return views as one JSON document, in ASCII as ``--json`` prints it."""
    text = json.dumps(document, separators=(",", ":"), default=lambda view: view.document())
    return text.encode("ascii")


def models(looker: Looker, _values: Mapping[str, Any]) -> Answer:
    """Return the list of all models."""
    home_of = getattr(looker.home, "home_of", None)  # of several stores
    upper = getattr(looker.home, "upper", looker.home)

    def body() -> bytes:
        return encoded(
            [
                ListItemView.of(
                    one,
                    home_of
                    and (upper if getattr(one, "is_packed", False) else home_of(one.name)).address,
                )
                for one in list_models(looker.home)
            ]
        )

    return Answer(body)


def model(looker: Looker, values: Mapping[str, Any]) -> Answer:
    """Return a model without its tensors."""
    found = looker.find(values["name"])
    return Answer(lambda: looker.open(found).facts, found.tag)


def tensors(looker: Looker, values: Mapping[str, Any]) -> Answer:
    """Return a model's tensors as columns."""
    found = looker.find(values["model"])
    return Answer(lambda: looker.open(found).columns, found.tag)


def quality(looker: Looker, values: Mapping[str, Any]) -> Answer:
    """Return what `quality` kept of a model."""
    found = looker.find(values["model"])
    return Answer(lambda: encoded(kept_quality(looker.home, found.name, found.digest)))


def damage(looker: Looker, _values: Mapping[str, Any]) -> Answer:
    """Return what `verify` kept of the store."""
    return Answer(lambda: encoded(kept_verify(looker.home)))


def diff(looker: Looker, values: Mapping[str, Any]) -> Answer:
    """Return how two models differ."""
    from blobstore.inspection.diff import diff_models

    a, b = (looker.find(values[side]) for side in "ab")
    tag = Digest.of(f"{a.name} {a.tag} {b.name} {b.tag}".encode()).hex
    return Answer(lambda: encoded(DiffView.of(diff_models(a.name, b.name, store=looker.home))), tag)


def usage(looker: Looker, _values: Mapping[str, Any]) -> Answer:
    """Return what the blobs take."""
    upper: Any = getattr(looker.home, "upper", looker.home)

    def body() -> bytes:
        if hasattr(upper, "bucket"):
            from blobstore.store.bucket.bucket_usage import measure_bucket

            return encoded(UsageView.of(measure_bucket(upper)))
        from blobstore.store.care.usage import measure_usage

        return encoded(UsageView.of(measure_usage(upper)))

    return Answer(body)
