"""``/api/``: one table of addresses, of which the server and the OpenAPI document are made.

A query is a pydantic model, an answer a document of ``--json`` or a plot, made by the library's own
functions.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from blobstore._version import __version__
from blobstore.errors import (
    StorageError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.documents import Manifest
from blobstore.inspection.comparison import ModelDiff, diff_models
from blobstore.inspection.listing import BrokenModel, ListedModel, describe, line_of, list_models
from blobstore.inspection.quality import ValueDistribution, distribution_of
from blobstore.model.loader import opened_tensor
from blobstore.model.tensors import Tensor
from blobstore.names import Digest, ModelName
from blobstore.plots.charts import distribution, frontier, shared
from blobstore.plots.heatmap import errors
from blobstore.plots.specification import (
    ModelBytes,
    ModelPoint,
    Specification,
    TensorError,
    Weighed,
)
from blobstore.plots.treemap import treemap
from blobstore.store.care.usage import Usage, measure_usage
from blobstore.store.ports import Readable
from blobstore.store.stored_model import ModelOutline, StoredModel
from blobstore.views.api_documents import ModelAnswer, Problem, TensorColumns, TensorDistribution
from blobstore.views.documents import encoded, schema_of, to_json
from blobstore.views.quality_records import KeptQuality, kept_quality
from blobstore.views.verify_records import KeptVerify, kept_verify

_OPENED = 4
"""Models whose answers are kept. Those of one with 50,000 tensors take 4 MB."""
_LOCKS = 32


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, the part of the home that has it, and the bytes of its manifest."""

    name: ModelName
    holder: Readable
    raw: bytes
    digest: Digest
    is_packed: bool

    def stored(self) -> StoredModel:
        """Return what the manifest means. Raises: DocumentError."""
        manifest = Manifest.parse(self.raw, f"the manifest of {self.name}")
        return StoredModel(self.name, manifest, self.holder)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, both without its name, and its treemap.

    Only these bytes are kept, because 50,000 tensors take 4 MB in them, and much more as objects.
    ``counts``: how many tensors each layer of tensors of the manifest has, as JSON.
    """

    facts: bytes
    columns: bytes
    counts: bytes
    treemap: bytes

    def document(self) -> dict[str, Any]:
        """Return the answer without tensors, but for name and state."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    def columns_of(self, name: ModelName, digest: Digest) -> bytes:
        """Return the answer with tensors, with the model's name and ID."""
        head = json.dumps({"model": str(name), "id": str(digest)}, separators=(",", ":"))
        return head[:-1].encode() + b"," + self.columns[1:]

    def layer_of(self, tensor: str) -> int:
        """Return the number of a tensor's layer. Raises: TensorNotFoundError."""
        try:
            place = json.loads(self.columns)["names"].index(tensor)
        except ValueError:
            message = f"the model has no tensor {quoted(tensor)}"
            raise TensorNotFoundError(message, tensor=tensor) from None
        return bisect_right(list(accumulate(json.loads(self.counts))), place)


class Served:
    """A home, and the models of it that were asked for last."""

    def __init__(self, home: Readable) -> None:
        self.home = home
        self._opened: dict[Digest, OpenedModel] = {}
        self._lock = threading.Lock()
        # A page asks for several answers at once: the first opens the model, the others wait.
        # Models share these locks, so two may wait for each other, which is rare.
        self._opening = [threading.Lock() for _ in range(_LOCKS)]

    @property
    def upper(self) -> Any:
        """The home that is not a lower one."""
        return self.home.upper

    def require(self) -> None:
        """Raise StorageError if the folder of the store is gone: its disk is not mounted, perhaps.

        Without its folder a store is a new one, and has no models.
        """
        root = self.upper.root
        if root is not None and not os.path.isdir(root):  # noqa: PTH112  # False for any error
            raise StorageError("the folder of the store is gone", hint="Is its disk mounted?")

    def without_folders(self, text: str) -> str:
        """Return a message without the folders of the stores: it may name a file in them."""
        for home in (self.upper, *self.home.lower):
            if (root := home.root) is not None:
                text = text.replace(f"{root}/", "").replace(str(root), "the store")
        return text

    def find(self, name: str) -> ServedModel:
        """Return a model. Raises: InvalidNameError; NotFoundError; StorageError."""
        parsed = ModelName.parse(name)
        holder = self.home.holder(parsed)
        full = holder.find(parsed)
        raw = holder.manifests.text(full)
        is_packed = holder is self.home.packed
        return ServedModel(full, holder, raw, Digest.of(raw), is_packed)

    def open(self, model: ServedModel) -> OpenedModel:
        """Return a model's answers. Raises: as `StoredModel.opened`; DocumentError."""
        with self._opening[hash(model.digest) % _LOCKS]:
            opened = self._opened.get(model.digest) or _read(model)
            with self._lock:
                self._opened.pop(model.digest, None)
                self._opened[model.digest] = opened
                if len(self._opened) > _OPENED:
                    del self._opened[next(iter(self._opened))]
            return opened

    @contextmanager
    def tensor(self, model: ServedModel, name: str) -> Iterator[Tensor]:
        """Yield a tensor, whose blob alone is mapped.

        Raises: TensorNotFoundError; UnsupportedSourceError for a packed model; as `opened_tensor`.
        """
        layer = self.open(model).layer_of(name)
        if model.is_packed:
            hint = f"blobstore unpack {model.name} restores it."
            message = f"model {model.name} is packed: its values are not read"
            raise UnsupportedSourceError(message, model=str(model.name), hint=hint)
        stored = model.stored()
        with opened_tensor(stored, stored.manifest.tensor_layers[layer], name) as tensor:
            yield tensor


def _read(model: ServedModel) -> OpenedModel:
    """Return a model's answers, made of the headers of its blobs."""
    stored = model.stored()
    manifest = stored.manifest
    with model.holder.lease():
        tensors = ModelOutline.of(stored, stored.tensor_layers)
        line = line_of(model.holder, model.name, manifest, tensors.forms)
        details = describe(model.holder, manifest, tensors)
    columns = encoded(TensorColumns(model.name, model.digest, tensors))
    facts = encoded(ModelAnswer(line, details, manifest, len(tensors)))
    for whose, key in ((columns, "model"), (columns, "id"), (facts, "name"), (facts, "packed")):
        del whose[key]  # they belong to a name, not to the manifest
    drawn = treemap(map(Weighed, *(columns[key] for key in ("names", "types", "shapes", "sizes"))))
    return OpenedModel(*map(in_json, (facts, columns, tensors.counts, drawn)))


def in_json(document: Any) -> bytes:
    """Return results as one JSON document, in ASCII as ``--json`` prints it."""
    return to_json(document).encode("ascii")


OPENAPI = "/api/openapi.json"
_MAX_FIELDS = 64
_MAX_NAME = 620
"""Characters of a model's name with all its parts (names.py says which names are valid)."""
_MAX_TENSOR = 2048
"""Characters of a tensor's name. Longer ones are possible in a file, and not asked for."""


def _single(given: Any) -> Any:
    """Return the value of a parameter that is given once."""
    if isinstance(given, list):
        if len(given) != 1:
            raise ValueError(f"is given {len(given)} times, expected 1")
        return given[0]
    return given


class Query(BaseModel):
    """No parameters; subclasses add theirs."""

    model_config = ConfigDict(extra="forbid")

    @property
    def models(self) -> list[str]:
        """The names of models that it has, each once in a list."""
        values = [value for name, value in self if name != "tensor"]
        if values and isinstance(values[0], list):
            return list(dict.fromkeys(values[0]))
        return values


_Name = Annotated[
    str,
    Field(min_length=1, max_length=_MAX_NAME, pattern=r"^[A-Za-z0-9_.:/-]+$"),
    BeforeValidator(_single),
]


class _Named(Query):
    name: _Name = Field(description="the name of a stored model")


class _OfModel(Query):
    model: _Name = Field(description="the name of a stored model")


class _OfTensor(_OfModel):
    tensor: Annotated[
        str, Field(min_length=1, max_length=_MAX_TENSOR), BeforeValidator(_single)
    ] = Field(description="the name of a tensor of the model")


class _OfModels(Query):
    model: list[_Name] = Field(
        min_length=1, max_length=60, description="the name of a stored model; repeatable"
    )


class _Pair(Query):
    a: _Name = Field(description="the name of a stored model")
    b: _Name = Field(description="the stored model to compare it with")


def parsed(query: bytes, kind: type[Query]) -> Query:
    """Return the parameters in a query.

    Raises: UsageError for a parameter that is missing, unknown, too long or given too often, and
    for text that is not UTF-8.
    """
    try:
        given = parse_qs(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError as error:
        raise UsageError("the query is not percent-encoded UTF-8, or is too long") from error
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = ", ".join(kind.model_fields)
        hint = f"Use {names}." if names else "This address takes no parameters."
        says = first["msg"].removeprefix("Value error, ")
        message = f"the parameter {quoted(str(first['loc'][0]))}: {says[:1].lower()}{says[1:]}"
        raise UsageError(message, hint=hint) from error


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """An address of the API.

    ``kind``: the type of the answer; ``answer`` makes it, or its JSON, of a home, the query and the
    models that this names. ``is_fixed``: it changes with these alone. ``is_slow``: reads weights.
    """

    path: str
    what: str
    kind: Any
    answer: Callable[..., Any]
    query: type[Query] = Query
    is_fixed: bool = False
    is_slow: bool = False

    def body(self, served: Served, query: Query, models: Sequence[ServedModel]) -> bytes:
        """Return the answer as JSON. Raises: BlobStoreError."""
        document = self.answer(served, query, *models)
        return document if isinstance(document, bytes) else in_json(document)


def _models(served: Served, _query: Query) -> list[Any]:
    models = list_models(served.home)
    if not models:
        served.require()
    return [_without_folders(served, model) for model in models]


def _without_folders(served: Served, model: ListedModel | BrokenModel) -> Any:
    """Return a model's document, whose error has no folder of this machine."""
    document = encoded(model)
    if isinstance(model, BrokenModel):
        document["error"] = served.without_folders(model.error.message)
    return document


def _model(served: Served, _query: Query, model: ServedModel) -> dict[str, Any]:
    facts = served.open(model).document()
    return {"name": str(model.name), **facts, "packed": model.is_packed}


def _tensors(served: Served, _query: Query, model: ServedModel) -> bytes:
    return served.open(model).columns_of(model.name, model.digest)


def _measured(served: Served, query: _OfTensor, model: ServedModel) -> ValueDistribution:
    with served.tensor(model, query.tensor) as opened:
        return distribution_of(opened)


def _distribution(served: Served, query: _OfTensor, model: ServedModel) -> TensorDistribution:
    return TensorDistribution(model.name, model.digest, _measured(served, query, model))


def _quality(served: Served, _query: Query, model: ServedModel) -> KeptQuality:
    return kept_quality(served.home, model.name, model.digest)


def _diff(served: Served, _query: Query, a: ServedModel, b: ServedModel) -> ModelDiff:
    return diff_models(a.name, b.name, store=served.home)


def _usage(served: Served, _query: Query) -> Usage:
    """Return what the blobs of the store take; lower stores are not counted."""
    served.require()
    return measure_usage(served.upper)


def _treemap_plot(served: Served, _query: Query, model: ServedModel) -> bytes:
    return served.open(model).treemap


def _errors_plot(served: Served, _query: Query, model: ServedModel) -> Specification:
    return errors(map(TensorError.of_document, _kept(served, model)["tensors"]))


def _distribution_plot(served: Served, query: _OfTensor, model: ServedModel) -> Specification:
    return distribution(_measured(served, query, model))


def _frontier_plot(served: Served, _query: Query, *models: ServedModel) -> Specification:
    return frontier([_point(served, model) for model in models])


def _shared_plot(served: Served, query: Query) -> Specification:
    return shared(
        ModelBytes(str(one.name), one.unique, one.shared)
        for one in _usage(served, query).models
        if one.unique is not None and one.shared is not None
    )


def _point(served: Served, model: ServedModel) -> ModelPoint:
    """Return a model's place; one whose weights are all zeros has no error."""
    error = _kept(served, model)["model"]["relative_rmse"] or 0.0
    facts = served.open(model).document()
    return ModelPoint(str(model.name), facts["quant_type"] or "", facts["size"], error)


def _kept(served: Served, model: ServedModel) -> Mapping[str, Any]:
    """Return what `quality` kept of a model. Raises: UnsupportedSourceError without one."""
    result = kept_quality(served.home, model.name, model.digest).result
    if result is None:
        hint = f"blobstore quality {model.name} --against SOURCE measures them."
        raise UnsupportedSourceError(
            f"the errors of {model.name} are not measured", model=str(model.name), hint=hint
        )
    return result


def _plot(kind: str, what: str, answer: Any, query: type[Query] = Query, **more: bool) -> ApiRoute:
    says = f"{what}: a specification of Vega."
    return ApiRoute(f"/api/plots/{kind}", says, dict[str, Any], answer, query, **more)


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "/api/models", "All models, sorted by name.", list[ListedModel | BrokenModel], _models
    ),
    ApiRoute(
        "/api/model", "A model without its tensors.", ModelAnswer, _model, _Named, is_fixed=True
    ),
    ApiRoute(
        "/api/tensors", "The tensors of a model.", TensorColumns, _tensors, _OfModel, is_fixed=True
    ),
    ApiRoute(
        "/api/distribution",
        "How the values of a tensor are distributed.",
        TensorDistribution,
        _distribution,
        _OfTensor,
        is_fixed=True,
        is_slow=True,
    ),
    ApiRoute(
        "/api/quality",
        "The last result of `blobstore quality` for a model.",
        KeptQuality,
        _quality,
        _OfModel,
    ),
    ApiRoute(
        "/api/diff",
        "How model b differs from a.",
        ModelDiff,
        _diff,
        _Pair,
        is_fixed=True,
        is_slow=True,
    ),
    ApiRoute("/api/usage", "What blobs take.", Usage, _usage),
    ApiRoute(
        "/api/damage",
        "The last result of `blobstore verify` for the store.",
        KeptVerify,
        lambda served, _: kept_verify(served.home),
    ),
    _plot("treemap", "Bytes by module", _treemap_plot, _OfModel, is_fixed=True),
    _plot("errors", "Errors by layer, as `blobstore quality` kept them", _errors_plot, _OfModel),
    _plot(
        "distribution",
        "The values and codes of a tensor",
        _distribution_plot,
        _OfTensor,
        is_fixed=True,
        is_slow=True,
    ),
    _plot(
        "frontier",
        "Error against size of models, as `blobstore quality` kept them",
        _frontier_plot,
        _OfModels,
    ),
    _plot("shared", "The bytes that models share", _shared_plot),
)


def answered(served: Served, path: str, **query: str) -> Any:
    """Return the document at an address below ``/api/``. Raises: as its route."""
    route = next(one for one in ROUTES if one.path == f"/api/{path}")
    given = route.query.model_validate(query)
    return json.loads(route.body(served, given, list(map(served.find, given.models))))


_PROBLEMS = {
    "400": "A parameter is missing, unknown, too long, or given too often.",
    "404": "There is no such model or tensor.",
    "409": "The model is damaged, or of a kind without such an answer.",
    "414": "The address is too long.",
    "421": "The server is not meant for this Host.",
    "431": "The request's head is too large.",
    "500": "The store can't be read.",
    "502": "The bucket can't be read.",
    "503": "The store is busy, or the server has too many connections.",
}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes, and of its own address."""
    schemas: dict[str, Any] = {}
    place = "#/components/schemas/"
    problem = schema_of(Problem, schemas, place)
    problems = {code: _content(says, problem) for code, says in _PROBLEMS.items()}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        answer = _content("The answer.", schema_of(route.kind, schemas, place))
        operation = {
            "operationId": route.path.removeprefix("/api/").replace("/", "_"),
            "summary": route.what,
            "parameters": _parameters(route.query),
            "responses": {"200": answer, **problems},
        }
        paths[route.path] = {"get": operation}
    own = {"type": "object", "additionalProperties": True}
    responses = {"200": _content("The document.", own)}
    summary = "This document."
    paths[OPENAPI] = {"get": {"operationId": "openapi", "summary": summary, "responses": responses}}
    says = "Models of a store. Nothing can be changed."
    return {
        "openapi": "3.1.0",
        "info": {"title": "blobstore", "version": __version__, "description": says},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _parameters(query: type[Query]) -> list[dict[str, Any]]:
    """Return the parameters of a query, all of which are required."""
    found = []
    for name, schema in query.model_json_schema().get("properties", {}).items():
        about = {"name": name, "in": "query", "required": True}
        about["description"] = schema.pop("description")
        del schema["title"]
        found.append(about | {"schema": schema})
    return found


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
