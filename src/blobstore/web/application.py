"""The application: the API, the pages and their files, the guard before them.

Work on a store blocks, so it is done in threads: a few for quick answers, and others for those that
read weights, so that a slow one does not keep a list waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from blobstore._version import __version__
from blobstore.errors import BlobStoreError
from blobstore.plots.specification import THEMES, configuration
from blobstore.store.ports import Readable
from blobstore.web.api import OPENAPI, ROUTES, ApiRoute, openapi, parsed
from blobstore.web.guard import Guard, Hosts
from blobstore.web.pages import FOLDER, PAGES, TYPES, colours_of_types, page
from blobstore.web.responses import (
    FAILED,
    NOT_FOUND,
    is_known,
    problem,
    problem_of,
    unchanged,
    with_tag,
)
from blobstore.web.served import Served, in_json

_QUICK, _SLOW = 4, 2
"""Threads for quick answers, and for those that read weights."""
_JSON, _HTML, _CSS = "application/json", "text/html; charset=utf-8", "text/css; charset=utf-8"
_Handler = Callable[[Request], Awaitable[Response]]


class _Static(StaticFiles):
    """Files of the package. Links that lead out of it are not followed."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file that a browser asks for again, and gets if it has changed."""
        response = super().file_response(*args, **options)
        response.headers["cache-control"] = "no-cache"
        return response


def application(home: Readable, hosts: Hosts, *, more: Iterable[BaseRoute] = ()) -> ASGIApp:
    """Return the application over a home. ``more``: routes beside the API and the pages."""
    served = Served(home)
    quick, slow = CapacityLimiter(_QUICK), CapacityLimiter(_SLOW)
    themes = {one: configuration(one) for one in THEMES}
    routes: list[BaseRoute] = [
        *(Route(one.path, _api(one, served, slow if one.is_slow else quick)) for one in ROUTES),
        *(Route(path, _document(_HTML, page(path).encode())) for path in PAGES),
        Route(OPENAPI, _document(_JSON, in_json(openapi()))),
        Route("/static/themes.json", _document(_JSON, in_json(themes))),
        Route(f"/static/{TYPES}", _document(_CSS, colours_of_types().encode())),
        Mount("/static", _Static(directory=FOLDER)),
        *more,
    ]
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    return Guard(app, hosts)


def _api(route: ApiRoute, served: Served, threads: CapacityLimiter) -> _Handler:
    def made(request: Request) -> Response:
        tag = None
        try:
            query = parsed(request.scope["query_string"], route.query)
            models = [served.find(name) for name in query.models]
            if route.is_fixed:
                tag = "-".join([*(model.digest.hex for model in models), __version__])
                if is_known(tag, request):
                    return unchanged(tag)
            body = route.body(served, query, models)
        except BlobStoreError as error:
            return problem_of(error, served.without_folders)
        return with_tag(body, tag or hashlib.sha256(body).hexdigest(), _JSON, request)

    async def handle(request: Request) -> Response:
        return await anyio.to_thread.run_sync(made, request, limiter=threads)

    return handle


def _document(content_type: str, body: bytes) -> _Handler:
    tag = hashlib.sha256(body).hexdigest()

    async def handle(request: Request) -> Response:
        return with_tag(body, tag, content_type, request)

    return handle


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else FAILED
    says = "there is nothing at this address" if status == NOT_FOUND else "impossible request"
    answer = problem(status, says)
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


async def _broken(_request: Request, _error: Exception) -> Response:
    return problem(FAILED, "an error of the server, which its log describes")


_HANDLERS: dict[Any, Any] = {HTTPException: _refused, Exception: _broken}
