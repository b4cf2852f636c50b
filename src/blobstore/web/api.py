"""``/api/``: one table of addresses, of which the server and the OpenAPI document are made.

An answer is a document of ``--json`` or a plot, made by the library's own functions. Models are
opened when they are asked for; the answers of the last ones are kept.
"""

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import parse_qs

from blobstore._version import __version__
from blobstore.errors import (
    StorageError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.export.texts import PARTS, file_of, text_of
from blobstore.formats.documents import Manifest
from blobstore.inspection.comparison import ModelDiff, diff_models
from blobstore.inspection.inspection import Branch, tree_of
from blobstore.inspection.listing import BrokenModel, ListedModel, describe, list_models
from blobstore.inspection.quality import ValueDistribution, distribution_of
from blobstore.model.loader import opened_tensor
from blobstore.names import Digest, ModelName
from blobstore.plots.charts import (
    ModelPoint,
    TensorError,
    distribution,
    errors,
    frontier,
    unique_and_shared,
)
from blobstore.plots.treemap import treemap
from blobstore.store.care.usage import Usage, measure_usage
from blobstore.store.ports import Readable
from blobstore.store.stored_model import ModelOutline, StoredModel
from blobstore.views.documents import encoded, schema_of, to_json
from blobstore.views.quantities import count, natural
from blobstore.views.records import KeptQuality, KeptVerify, kept_quality, kept_verify
from blobstore.views.results import ModelAnswer, Problem, TensorColumns

# Models whose answers are kept. Those of one with 50,000 tensors take 4 MB.
_OPENED = 4
_FIELDS = 64
JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
# Parameters that name something of the model.
_IN_MODEL = ("tensor", "file")
_MOST_MODELS = 60


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, the part of the home that has it, and the bytes of its manifest."""

    name: ModelName
    digest: Digest
    is_packed: bool
    holder: Readable = field(compare=False)
    raw: bytes = field(compare=False)

    def stored(self) -> StoredModel:
        manifest = Manifest.parse(self.raw, f"the manifest of {self.name}")
        return StoredModel(self.name, manifest, self.holder)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, and its treemap, as JSON.

    Only these bytes are kept, because 50,000 tensors take 4 MB in them, and much more as objects.
    ``counts``: how many tensors each layer of tensors of the manifest has.
    """

    facts: bytes
    columns: bytes
    treemap: bytes
    counts: Sequence[int]


class Served:
    """A home, and the models of it that were asked for last."""

    def __init__(self, home: Readable, plan: Any = None) -> None:
        self.home = home
        self.plan = in_json(plan)
        self._read = lru_cache(_OPENED)(_read)
        self._lock = threading.Lock()

    def require(self) -> None:
        """Raise StorageError if the folder of the store is gone: its disk is not mounted, perhaps.

        Without its folder a store is a new one, and has no models.
        """
        root = self.home.upper.root
        if root is not None and not os.path.isdir(root):  # noqa: PTH112  # False for any error
            raise StorageError("the folder of the store is gone", hint="Is its disk mounted?")

    def without_folders(self, text: str) -> str:
        """Return a message without the folders of the stores: it may name a file in them."""
        for home in (self.home.upper, *self.home.lower):
            if (root := home.root) is not None:
                text = text.replace(f"{root}/", "").replace(str(root), "the store")
        return text

    def find(self, name: str) -> ServedModel:
        """Return a model. Raises: InvalidNameError; NotFoundError; StorageError."""
        parsed = ModelName.parse(name)
        holder = self.home.holder(parsed)
        full = holder.find(parsed)
        raw = holder.manifests.text(full)
        return ServedModel(full, Digest.of(raw), holder is self.home.packed, holder, raw)

    def open(self, model: ServedModel) -> OpenedModel:
        """Return a model's answers. Raises: as `StoredModel.opened`; DocumentError."""
        with self._lock:  # a page asks for several answers at once: the first opens the model
            return self._read(model)

    def distribution(self, model: ServedModel, name: str) -> ValueDistribution:
        """Return the distribution of a tensor, whose blob alone is mapped.

        Raises: TensorNotFoundError; UnsupportedSourceError for a packed model; as `opened_tensor`.
        """
        opened = self.open(model)
        names = json.loads(opened.columns)["names"]
        if name not in names:
            raise TensorNotFoundError(f"the model has no tensor {quoted(name)}", tensor=name)
        if model.is_packed:
            raise UnsupportedSourceError(
                f"model {model.name} is packed: its values are not read",
                model=str(model.name),
                hint=f"blobstore unpack {model.name} restores it.",
            )
        stored = model.stored()
        layer = bisect_right(list(accumulate(opened.counts)), names.index(name))
        with opened_tensor(stored, stored.manifest.tensor_layers[layer], name) as tensor:
            return distribution_of(tensor)


def _read(model: ServedModel) -> OpenedModel:
    stored = model.stored()
    manifest = stored.manifest
    with model.holder.lease():
        tensors = ModelOutline.of(stored, stored.tensor_layers)
        named = list(zip(tensors.names, tensors.forms, strict=True))
        details = describe(model.holder, model.name, manifest, named)
    facts = encoded(ModelAnswer(details, manifest, len(tensors)))
    facts["packed"] = model.is_packed
    columns = TensorColumns(
        model.name,
        model.digest,
        tensors.names,
        [form.type_text for form in tensors.forms],
        [form.shape for form in tensors.forms],
        [form.nbytes for form in tensors.forms],
    )
    drawn = treemap(zip(columns.names, columns.types, columns.sizes, strict=True))
    return OpenedModel(in_json(facts), in_json(columns), in_json(drawn), tensors.counts)


def in_json(document: Any) -> bytes:
    """Return results as one JSON document, in ASCII as ``--json`` prints it."""
    return to_json(document).encode()


@dataclass(frozen=True, slots=True)
class TensorDistribution:
    """How the values of a tensor, and its codes, are distributed."""

    KEYS = (
        "model",
        "id",
        "tensor=found.name",
        "type=found.type_name",
        "shape=found.shape",
        "size=found.size",
        "read=found.read",
        "values=found.values",
        "codes=found.codes",
        "code_values=found.code_values",
    )

    model: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    found: ValueDistribution


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """An address of the API.

    ``kind``: the type of the answer; ``answer`` makes it, or its JSON, of a home, the models of the
    query and its tensor. ``takes``: the query's parameters. ``most``: how often each is given at
    most. ``is_slow``: weights are read.
    """

    path: str
    what: str
    kind: Any
    answer: Callable[..., Any]
    takes: Sequence[str] = ()
    most: int = 1
    content_type: str = JSON
    is_slow: bool = False

    def body(self, served: Served, query: bytes) -> bytes:
        """Return the answer, as JSON or the text that it is.

        Raises: UsageError for a parameter that is missing, unknown, or given too often, and for
        text that is not UTF-8; as the library.
        """
        given = self._parse(query)
        names = [name for key in self.takes if key not in _IN_MODEL for name in given[key]]
        within = [name for key in _IN_MODEL for name in given.get(key, ())]
        document = self.answer(served, *map(served.find, names), *within)
        return document if isinstance(document, bytes) else in_json(document)

    def _parse(self, query: bytes) -> dict[str, list[str]]:
        try:
            text = query.decode("ascii")
            given = parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS)
        except ValueError as error:
            raise UsageError("the query is not percent-encoded UTF-8, or is too long") from error
        hint = f"This address takes: {', '.join(self.takes) or 'nothing'}."
        for name in (*self.takes, *given):
            number = len(given.get(name, ()))
            if name not in self.takes:
                raise UsageError(f"the parameter {quoted(name)} is unknown", hint=hint)
            if not 1 <= number <= self.most:
                says = f"is given {number} times, at most {self.most}" if number else "is missing"
                raise UsageError(f"the parameter {quoted(name)} {says}", hint=hint)
        return given


def _models(served: Served) -> list[Any]:
    models = list(map(encoded, list_models(served.home)))
    if not models:
        served.require()
    for model in models:
        if "error" in model:
            model["error"] = served.without_folders(model["error"].message)
    return models


def _text(_served: Served, model: ServedModel, name: str) -> bytes:
    """Return a file of a model, or a part of `PARTS`. Raises: UnsupportedSourceError if binary."""
    stored = model.stored()
    is_part = name in PARTS and stored.manifest.file(name) is None
    with model.holder.lease():
        data = text_of(stored, name) if is_part else file_of(stored, name)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        hint = f"blobstore show {model.name} --file {name} > FILE writes it to a file."
        raise UnsupportedSourceError(f"{quoted(name)} is not text", hint=hint) from error
    return data


def _tags(served: Served) -> dict[str, Any]:
    """Return the models that can be read, in the form of Ollama.

    Source: ollama/ollama@0097ef5f api/types.go `ListModelResponse`.
    """
    models = [
        {
            "name": model["name"],
            "model": model["name"],
            "modified_at": model["modified"],
            "size": model["size"],
            "digest": model["id"].hex,
            "details": {
                "format": "safetensors",
                "parameter_size": count(model["parameters"] or 0),
                "quantization_level": model["quant_type"],
            },
        }
        for model in map(encoded, list_models(served.home))
        if "error" not in model
    ]
    return {"models": models}


def _tree(served: Served, model: ServedModel) -> list[Branch]:
    columns = json.loads(served.open(model).columns)
    rows = zip(*(columns[key] for key in ("names", "types", "shapes", "sizes")), strict=True)
    tensors = [
        SimpleNamespace(
            name=name, type_name=kind, shape=tuple(dims), parameters=prod(dims), nbytes=nbytes
        )
        for name, kind, dims, nbytes in rows
    ]
    return tree_rows(tensors)


def tree_rows(tensors: Iterable[Any]) -> list[Branch]:
    """Return the rows of the tree of `tree_of`, in number order."""
    return list(tree_of(sorted(tensors, key=lambda tensor: natural(tensor.name))))


def _usage(served: Served) -> Usage:
    """Return what the blobs of the store take; lower stores are not counted."""
    served.require()
    return measure_usage(served.home.upper)


def _point(served: Served, model: ServedModel) -> ModelPoint:
    """Return a model's place; one whose weights are all zeros has no error."""
    error = _quality_record(served, model)["model"]["relative_rmse"] or 0.0
    facts = json.loads(served.open(model).facts)
    return ModelPoint(str(model.name), facts["quant_type"] or "", facts["size"], error)


def _quality(served: Served, model: ServedModel) -> KeptQuality:
    return kept_quality(served.home, model.name, model.digest)


def _quality_record(served: Served, model: ServedModel) -> Mapping[str, Any]:
    """Return what `quality` kept of a model. Raises: UnsupportedSourceError without one."""
    result = _quality(served, model).result
    if result is None:
        hint = f"blobstore quality {model.name} --against SOURCE measures them."
        raise UnsupportedSourceError(
            f"the errors of {model.name} are not measured", model=str(model.name), hint=hint
        )
    return result


def _plot(kind: str, what: str, answer: Any, *takes: str, **more: Any) -> ApiRoute:
    says = f"{what}: a specification of Vega."
    return ApiRoute(f"/api/plots/{kind}", says, dict[str, Any], answer, takes, **more)


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "/api/models", "All models, sorted by name.", list[ListedModel | BrokenModel], _models
    ),
    ApiRoute(
        "/api/model",
        "A model without its tensors.",
        ModelAnswer,
        lambda served, model: served.open(model).facts,
        ("name",),
    ),
    ApiRoute(
        "/api/tensors",
        "The tensors of a model.",
        TensorColumns,
        lambda served, model: served.open(model).columns,
        ("model",),
    ),
    ApiRoute(
        "/api/tree",
        "The modules of a model, those that are alike on one line.",
        list[Branch],
        _tree,
        ("model",),
    ),
    ApiRoute(
        "/api/distribution",
        "How the values of a tensor are distributed.",
        TensorDistribution,
        lambda served, model, tensor: TensorDistribution(
            model.name, model.digest, served.distribution(model, tensor)
        ),
        ("model", "tensor"),
        is_slow=True,
    ),
    ApiRoute(
        "/api/quality",
        "The last result of `blobstore quality` for a model.",
        KeptQuality,
        _quality,
        ("model",),
    ),
    ApiRoute(
        "/api/diff",
        "How model b differs from a.",
        ModelDiff,
        lambda served, a, b: diff_models(a.name, b.name, store=served.home),
        ("a", "b"),
        is_slow=True,
    ),
    ApiRoute(
        "/api/file",
        "A text that a model holds, as it is stored.",
        str,
        _text,
        ("model", "file"),
        content_type=_TEXT,
    ),
    ApiRoute(
        "/api/plan",
        "What an import would write, of the source that the server was started with; or null.",
        dict[str, Any] | None,
        lambda served: served.plan,
    ),
    ApiRoute("/api/usage", "Sizes of blobs.", Usage, _usage),
    ApiRoute("/api/tags", "All models, for Ollama's clients.", dict[str, Any], _tags),
    ApiRoute(
        "/api/version",
        "The version of blobstore, for Ollama's clients.",
        dict[str, Any],
        lambda _: {"version": __version__},
    ),
    ApiRoute(
        "/api/damage",
        "The last result of `blobstore verify` for the store.",
        KeptVerify,
        lambda served: kept_verify(served.home),
    ),
    _plot("treemap", "Bytes by module", lambda served, model: served.open(model).treemap, "model"),
    _plot(
        "errors",
        "Errors by layer, as `blobstore quality` kept them",
        lambda *asked: errors(map(TensorError.of_document, _quality_record(*asked)["tensors"])),
        "model",
    ),
    _plot(
        "distribution",
        "The values and codes of a tensor",
        lambda served, *asked: distribution(served.distribution(*asked)),
        "model",
        "tensor",
        is_slow=True,
    ),
    _plot(
        "frontier",
        "Error against size of models, as `blobstore quality` kept them",
        lambda served, *models: frontier(
            _point(served, fromkey) for fromkey in dict.fromkeys(models)
        ),
        "model",
        most=_MOST_MODELS,
    ),
    _plot(
        "shared",
        "The bytes that models share",
        lambda served: unique_and_shared(_usage(served).models),
    ),
    ApiRoute("/api/openapi.json", "This document.", dict[str, Any], lambda _: openapi()),
)
_PARAMETERS = {
    "name": "the name of a stored model",
    "model": "the name of a stored model",
    "tensor": "the name of a tensor of the model",
    "file": "the name of one of its files, or template, system, license, params, modelfile",
    "a": "the name of a stored model",
    "b": "the stored model to compare it with",
}
_PROBLEMS = {
    "400": "A parameter is missing, unknown, or given too often.",
    "404": "The model or tensor does not exist.",
    "409": "The model is damaged, or of a kind without such an answer.",
    "421": "The server is not meant for this Host.",
    "431": "The request's head, with its address, is too large.",
    "500": "The store can't be read.",
    "502": "The bucket can't be read.",
    "503": "The store is busy, or the server has too many connections.",
}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes. Making it takes 0.1 s."""
    schemas: dict[str, Any] = {}
    place = "#/components/schemas/"
    problem = schema_of(Problem, schemas, place)
    problems = {code: _content(says, problem) for code, says in _PROBLEMS.items()}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        schema = schema_of(route.kind, schemas, place)
        paths[route.path] = {
            "get": {
                "operationId": route.path[len("/api/") :].removesuffix(".json").replace("/", "_"),
                "summary": route.what,
                "parameters": [_parameter(name, route.most) for name in route.takes],
                "responses": {
                    "200": _content("The answer.", schema, route.content_type),
                    **problems,
                },
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "blobstore",
            "version": __version__,
            "description": "Models of a store. Nothing can be changed.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _parameter(name: str, most: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if most > 1:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": most}
    return {
        "name": name,
        "in": "query",
        "required": True,
        "description": _PARAMETERS[name],
        "schema": schema,
    }


def _content(description: str, schema: dict[str, Any], content_type: str = JSON) -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}
