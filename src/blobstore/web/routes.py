"""The table of ``/api/``: addresses, parameters, views, and the functions that make the answers.

The application (application.py) and the OpenAPI document (openapi.py) are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blobstore.views.checkpoints import DiffView
from blobstore.views.looked import DistributionView, LookedModelView, TensorColumnsView
from blobstore.views.records import KeptQualityView, KeptVerifyView
from blobstore.views.stores import ListItemView, UsageView
from blobstore.web import answers, pictures
from blobstore.web.parameters import MODEL, MODELS, NAME, TENSOR, Parameter
from blobstore.web.served import Answer, Served


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """An address of the API.

    ``view``: the type of the answer; ``answer`` makes it of the values of ``parameters``.
    ``is_slow``: it reads weights.
    """

    path: str
    what: str
    view: Any
    answer: Callable[[Served, Mapping[str, Any]], Answer]
    parameters: tuple[Parameter, ...] = ()
    is_slow: bool = False

    @property
    def operation(self) -> str:
        """The name of the operation: the path's words."""
        return "_".join(self.path.removeprefix("/api/").split("/"))


def _plot(
    kind: str,
    what: str,
    answer: Callable[[Served, Mapping[str, Any]], Answer],
    *parameters: Parameter,
    is_slow: bool = False,
) -> ApiRoute:
    says = f"{what}: a specification of Vega."
    return ApiRoute(f"/api/plots/{kind}", says, dict[str, Any], answer, parameters, is_slow)


_A = Parameter(name="a", what=MODEL.what, longest=MODEL.longest)
_B = Parameter(name="b", what="the stored model to compare it with", longest=MODEL.longest)

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("/api/models", "All models, sorted by name.", list[ListItemView], answers.models),
    ApiRoute("/api/model", "A model without its tensors.", LookedModelView, answers.model, (NAME,)),
    ApiRoute(
        "/api/tensors", "The tensors of a model.", TensorColumnsView, answers.tensors, (MODEL,)
    ),
    ApiRoute(
        "/api/distribution",
        "How the values of a tensor are distributed.",
        DistributionView,
        answers.distribution,
        (MODEL, TENSOR),
        is_slow=True,
    ),
    ApiRoute(
        "/api/quality",
        "The last result of `blobstore quality` for a model.",
        KeptQualityView,
        answers.quality,
        (MODEL,),
    ),
    ApiRoute(
        "/api/diff", "How model b differs from a.", DiffView, answers.diff, (_A, _B), is_slow=True
    ),
    ApiRoute("/api/usage", "What blobs take.", UsageView, answers.usage),
    ApiRoute(
        "/api/damage",
        "The last result of `blobstore verify` for the store.",
        KeptVerifyView,
        answers.damage,
    ),
    _plot("treemap", "Bytes by module", pictures.treemap, MODEL),
    _plot("errors", "Errors by layer, as `blobstore quality` kept them", pictures.errors, MODEL),
    _plot(
        "distribution",
        "The values and codes of a tensor",
        pictures.distribution,
        MODEL,
        TENSOR,
        is_slow=True,
    ),
    _plot(
        "frontier",
        "Error against size of models, as `blobstore quality` kept them",
        pictures.frontier,
        MODELS,
    ),
    _plot("shared", "The bytes that models share", pictures.shared),
)
