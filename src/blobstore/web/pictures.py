"""Pictures: the plots of the API, as Vega specifications."""

from __future__ import annotations

from blobstore.errors import UnsupportedSourceError
from blobstore.plots.heatmap import errors as errors_plot
from blobstore.plots.subjects import TensorError
from blobstore.plots.treemap import treemap as treemap_plot
from blobstore.views.checkpoints import QualityView, TensorQualityView
from blobstore.views.records import kept_quality
from blobstore.web.answers import Values
from blobstore.web.served import Answer, Served, ServedModel, encoded


def treemap(served: Served, values: Values) -> Answer:
    """Return a model's bytes by module."""
    found = served.find(values["model"])
    return Answer(lambda: encoded(treemap_plot(served.open(found).table)), found.tag)


def errors(served: Served, values: Values) -> Answer:
    """Return a model's errors by layer."""
    found = served.find(values["model"])
    return Answer(lambda: encoded(errors_plot(map(_error, measured(served, found).tensors))))


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
