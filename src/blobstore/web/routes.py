"""The table of ``/api/``: addresses, parameters, views, and the functions that make the answers.

The application (application.py) and the OpenAPI document (openapi.py) are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blobstore.views.checkpoints import DiffView
from blobstore.views.looked import DistributionView, LookedModelView, TensorColumnsView
from blobstore.views.records import KeptQualityView, KeptVerifyView
from blobstore.views.stores import ListItemView, UsageView
from blobstore.web import answers, pictures
from blobstore.web.parameters import MODEL, MODELS, NAME, TENSOR, QueryParameter
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
    parameters: tuple[QueryParameter, ...] = ()
    is_slow: bool = False

    @property
    def operation(self) -> str:
        """The name of the operation: the path's words."""
        return "_".join(self.path.removeprefix("/api/").split("/"))


def _plot(
    kind: str,
    what: str,
    answer: Callable[[Served, Mapping[str, Any]], Answer],
    *parameters: QueryParameter,
    is_slow: bool = False,
) -> ApiRoute:
    says = f"{what}: a specification of Vega."
    return ApiRoute(f"/api/plots/{kind}", says, dict[str, Any], answer, parameters, is_slow)


_A = replace(MODEL, name="a")
_B = replace(MODEL, name="b", what="the stored model to compare it with")

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "/api/models", "All models, sorted by name.", list[ListItemView], answers.models_answer
    ),
    ApiRoute(
        "/api/model", "A model without its tensors.", LookedModelView, answers.model_answer, (NAME,)
    ),
    ApiRoute(
        "/api/tensors",
        "The tensors of a model.",
        TensorColumnsView,
        answers.tensors_answer,
        (MODEL,),
    ),
    ApiRoute(
        "/api/distribution",
        "How the values of a tensor are distributed.",
        DistributionView,
        answers.distribution_answer,
        (MODEL, TENSOR),
        is_slow=True,
    ),
    ApiRoute(
        "/api/quality",
        "The last result of `blobstore quality` for a model.",
        KeptQualityView,
        answers.quality_answer,
        (MODEL,),
    ),
    ApiRoute(
        "/api/diff",
        "How model b differs from a.",
        DiffView,
        answers.diff_answer,
        (_A, _B),
        is_slow=True,
    ),
    ApiRoute("/api/usage", "What blobs take.", UsageView, answers.usage_answer),
    ApiRoute(
        "/api/damage",
        "The last result of `blobstore verify` for the store.",
        KeptVerifyView,
        answers.damage_answer,
    ),
    _plot("treemap", "Bytes by module", pictures.treemap_picture, MODEL),
    _plot(
        "errors",
        "Errors by layer, as `blobstore quality` kept them",
        pictures.errors_picture,
        MODEL,
    ),
    _plot(
        "distribution",
        "The values and codes of a tensor",
        pictures.distribution_picture,
        MODEL,
        TENSOR,
        is_slow=True,
    ),
    _plot(
        "frontier",
        "Error against size of models, as `blobstore quality` kept them",
        pictures.frontier_picture,
        MODELS,
    ),
    _plot("shared", "The bytes that models share", pictures.shared_picture),
)
