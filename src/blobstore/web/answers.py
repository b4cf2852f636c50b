"""Answers: the documents of the API, made of a store by the library's own functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blobstore.inspection.distributions import ValueDistribution, distribution_of
from blobstore.inspection.listing import list_models
from blobstore.names import Digest
from blobstore.store.care.usage import Usage, measure_usage
from blobstore.views.checkpoints import DiffView
from blobstore.views.looked import DistributionView
from blobstore.views.records import kept_quality, kept_verify
from blobstore.views.stores import ListItemView, UsageView
from blobstore.web.served import Answer, Served, ServedModel, in_json

Values = Mapping[str, Any]


def models_answer(served: Served, _values: Values) -> Answer:
    """Return the list of all models."""
    return Answer(lambda: in_json(_listed(served)))


def _listed(served: Served) -> list[ListItemView]:
    home_of = getattr(served.home, "home_of", None)  # of several stores
    found = list_models(served.home)
    if not found:
        served.require()
    if home_of is None:
        views = [ListItemView.of(one, None) for one in found]
    else:
        packed = [getattr(one, "is_packed", False) for one in found]
        views = [
            ListItemView.of(one, (served.upper if is_packed else home_of(one.name)).address)
            for one, is_packed in zip(found, packed, strict=True)
        ]
    return [_shown(served, one) for one in views]


def _shown(served: Served, view: ListItemView) -> ListItemView:
    if not view.error:
        return view
    return view.model_copy(update={"error": served.without_folders(view.error)})


def model_answer(served: Served, values: Values) -> Answer:
    """Return a model without its tensors."""
    found = served.find(values["name"])

    def body() -> bytes:
        facts = served.open(found).document()
        return in_json({"name": str(found.name), **facts, "packed": found.is_packed})

    return Answer(body, found.tag, is_kept=False)


def tensors_answer(served: Served, values: Values) -> Answer:
    """Return a model's tensors as columns."""
    found = served.find(values["model"])

    def body() -> bytes:
        return served.open(found).columns_of(found.name, found.digest)

    return Answer(body, found.tag, is_kept=False)


def distribution_answer(served: Served, values: Values) -> Answer:
    """Return how the values of a tensor are distributed."""
    found = served.find(values["model"])

    def body() -> bytes:
        result = measured_distribution(served, found, values["tensor"])
        return in_json(DistributionView.of(found.name, str(found.digest), result))

    return Answer(body, found.tag)


def measured_distribution(served: Served, model: ServedModel, tensor: str) -> ValueDistribution:
    """Return the distribution of a tensor. Raises: as `Served.tensor` and `distribution_of`."""
    with served.tensor(model, tensor) as opened:
        return distribution_of(opened)


def quality_answer(served: Served, values: Values) -> Answer:
    """Return what `quality` kept of a model."""
    found = served.find(values["model"])
    return Answer(lambda: in_json(kept_quality(served.home, found.name, found.digest)))


def damage_answer(served: Served, _values: Values) -> Answer:
    """Return what `verify` kept of the store."""
    return Answer(lambda: in_json(kept_verify(served.home)))


def diff_answer(served: Served, values: Values) -> Answer:
    """Return how two models differ."""
    from blobstore.inspection.diff import diff_models

    a, b = (served.find(values[side]) for side in "ab")
    tag = Digest.of(f"{a.name} {a.tag} {b.name} {b.tag}".encode()).hex
    return Answer(lambda: in_json(DiffView.of(diff_models(a.name, b.name, store=served.home))), tag)


def usage_answer(served: Served, _values: Values) -> Answer:
    """Return what the blobs take."""
    return Answer(lambda: in_json(UsageView.of(usage_of(served))))


def usage_of(served: Served) -> Usage:
    """Return what the blobs of the store take; lower stores are not counted."""
    served.require()
    if not hasattr(served.upper, "bucket"):
        return measure_usage(served.upper)
    from blobstore.store.bucket.bucket_usage import measure_bucket

    return measure_bucket(served.upper)
