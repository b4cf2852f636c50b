"""Pictures: the plots of the API, as Vega specifications."""

from __future__ import annotations

from blobstore.errors import UnsupportedSourceError
from blobstore.plots.bars import shared
from blobstore.plots.heatmap import errors
from blobstore.plots.histograms import distribution
from blobstore.plots.points import frontier
from blobstore.plots.subjects import ModelBytes, ModelPoint, TensorError
from blobstore.views.checkpoints import QualityView, TensorQualityView
from blobstore.views.records import kept_quality
from blobstore.web.answers import Values, measured_distribution, usage_of
from blobstore.web.served import Answer, Served, ServedModel, in_json


def treemap_picture(served: Served, values: Values) -> Answer:
    """Return a model's bytes by module."""
    found = served.find(values["model"])
    return Answer(lambda: served.open(found).treemap, found.tag, is_kept=False)


def errors_picture(served: Served, values: Values) -> Answer:
    """Return a model's errors by layer."""
    found = served.find(values["model"])
    return Answer(lambda: in_json(errors(map(_error, measured(served, found).tensors))))


def distribution_picture(served: Served, values: Values) -> Answer:
    """Return how the values of a tensor, and its codes, are distributed."""
    found = served.find(values["model"])

    def body() -> bytes:
        return in_json(distribution(measured_distribution(served, found, values["tensor"])))

    return Answer(body, found.tag)


def frontier_picture(served: Served, values: Values) -> Answer:
    """Return error against size of several models."""
    found = [served.find(name) for name in dict.fromkeys(values["model"])]
    return Answer(lambda: in_json(frontier([_point(served, one) for one in found])))


def shared_picture(served: Served, _values: Values) -> Answer:
    """Return the bytes that each model needs alone, and with others."""
    return Answer(
        lambda: in_json(
            shared(
                ModelBytes(str(one.name), one.unique, one.shared)
                for one in usage_of(served).models
                if one.error is None
            )
        )
    )


def _point(served: Served, model: ServedModel) -> ModelPoint:
    """Return a model's place; one whose weights are all zeros has no error."""
    error = measured(served, model).model.relative_rmse or 0.0
    facts = served.open(model).document()
    return ModelPoint(str(model.name), facts["quant_type"] or "", facts["size"], error)


def measured(served: Served, model: ServedModel) -> QualityView:
    """Return what `quality` kept of a model. Raises: UnsupportedSourceError without one."""
    result = kept_quality(served.home, model.name, model.digest).result
    if result is None:
        hint = f"blobstore quality {model.name} --against SOURCE measures them."
        raise UnsupportedSourceError(
            f"the errors of {model.name} are not measured", model=str(model.name), hint=hint
        )
    return result


def _error(tensor: TensorQualityView) -> TensorError:
    kind = tensor.quant_type or tensor.dtype or ""
    return TensorError(tensor.name, kind, tuple(tensor.shape), tensor.relative_rmse, tensor.kept)
