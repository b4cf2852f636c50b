"""The OpenAPI 3.1 document of ``/api/``, made from the table of routes and the views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from blobstore._version import __version__
from blobstore.views.looked import ProblemView
from blobstore.web.routes import ApiRoute

PATH = "/api/openapi.json"
_JSON = "application/json"
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


def openapi(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """Return the document of these routes, and of its own address."""
    inputs: list[tuple[str, Any, TypeAdapter[Any]]] = [
        (route.path, "serialization", TypeAdapter(route.view)) for route in routes
    ]
    inputs.append(("problem", "serialization", TypeAdapter(ProblemView)))
    found, definitions = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}"
    )
    schemas = {key: schema for (key, _), schema in found.items()}
    paths = {route.path: {"get": _operation(route, schemas)} for route in routes}
    own = {"type": "object", "additionalProperties": True}
    paths[PATH] = {
        "get": {
            "operationId": "openapi",
            "summary": "This document.",
            "responses": {"200": _content("The document.", own)},
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
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    problem = schemas["problem"]
    responses = {"200": _content("The answer.", schemas[route.path])}
    responses |= {status: _content(says, problem) for status, says in _PROBLEMS.items()}
    return {
        "operationId": route.operation,
        "summary": route.what,
        "parameters": [
            {
                "name": one.name,
                "in": "query",
                "required": one.least > 0,
                "description": one.what,
                "schema": one.schema(),
            }
            for one in route.parameters
        ],
        "responses": responses,
    }


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {_JSON: {"schema": schema}}}
