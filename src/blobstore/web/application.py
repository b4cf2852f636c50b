"""The application: the routes, the guard before them, and errors as documents.

Work on a store blocks, so it is done in threads: a few for quick answers, and others for those that
read weights, so that a slow one does not keep a list waiting.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from blobstore.errors import BlobStoreError
from blobstore.plots.theme import THEMES, configuration
from blobstore.store.ports import Readable
from blobstore.web.guard import Guard, Hosts
from blobstore.web.openapi import PATH as OPENAPI, openapi
from blobstore.web.parameters import values_in
from blobstore.web.problems import FAILED, NOT_FOUND, problem, problem_of
from blobstore.web.routes import ROUTES, ApiRoute
from blobstore.web.served import Served, in_json
from blobstore.web.static_files import StaticFile, static_files
from blobstore.web.tidying import Tidy
from blobstore.web.together import Together

_log = logging.getLogger("blobstore.web")

_QUICK, _SLOW = 4, 2
"""Threads for quick answers, and for those that read weights."""
_PIECE = 2**18
"""Bytes of a body that are sent at once."""
_JSON = "application/json"
THEMES_PATH = "/static/themes.json"
"""Vega's configurations, of which a page passes one when it draws a plot."""
_KNOWN = "if-none-match"
_Handler = Callable[[Request], Awaitable[Response]]


def application(
    home: Readable,
    hosts: Hosts,
    *,
    more: Iterable[BaseRoute] = (),
    files: dict[str, StaticFile] | None = None,
) -> ASGIApp:
    """Return the application over a home.

    ``more``: routes beside the API and the pages. ``files``: by address (None: the package's).
    """
    served = Served(home)
    quick, slow = Together[Response](_QUICK), Together[Response](_SLOW)
    listed = static_files() if files is None else files
    made = {
        OPENAPI: StaticFile(_JSON, in_json(openapi(ROUTES))),
        THEMES_PATH: StaticFile(_JSON, in_json({one: configuration(one) for one in THEMES})),
    }
    routes: list[BaseRoute] = [
        *(Route(one.path, _api(one, served, slow if one.is_slow else quick)) for one in ROUTES),
        *(Route(path, _file(one)) for path, one in {**listed, **made}.items()),
        *more,
    ]
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    return Guard(Tidy(app), hosts)


def _api(route: ApiRoute, served: Served, threads: Together[Response]) -> _Handler:
    def made(request: Request) -> Response:
        try:
            values = values_in(request.scope["query_string"], route.parameters)
            answer = route.answer(served, values)
            if answer.tag is not None and is_known(answer.tag, request):
                return unchanged(answer.tag)
            body = served.body((route.path, request.scope["query_string"]), answer)
        except BlobStoreError as error:
            return problem_of(error, served.without_folders)
        return with_tag(body, answer.tag or hashlib.sha256(body).hexdigest(), _JSON, request)

    async def handle(request: Request) -> Response:
        key = (route.path, request.scope["query_string"], request.headers.get(_KNOWN))
        return await threads.run(key, functools.partial(made, request))

    return handle


def _file(file: StaticFile) -> _Handler:
    tag = file.tag

    async def handle(request: Request) -> Response:
        return with_tag(file.data, tag, file.content_type, request)

    return handle


class InPieces(Response):
    """A large body, sent piece by piece: a slow client holds one piece in memory, not all."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send it."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        view = memoryview(self.body)
        for begin in range(0, max(1, len(view)), _PIECE):
            piece = view[begin : begin + _PIECE]
            more = begin + _PIECE < len(view)
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": more})


def with_tag(body: bytes, tag: str, content_type: str, request: Request) -> Response:
    """Return a body and its tag, or only the tag if the client has it."""
    if is_known(tag, request):
        return unchanged(tag)
    return InPieces(body, headers={**_caching(tag), "content-type": content_type})


def unchanged(tag: str) -> Response:
    """Return the answer to a client that has the document of that tag."""
    return Response(status_code=304, headers=_caching(tag))


def is_known(tag: str, request: Request) -> bool:
    """Return True if the client says that it has the document of that tag."""
    known: Sequence[str] = request.headers.get(_KNOWN, "").split(",")
    return any(one.strip().removeprefix("W/") in (f'"{tag}"', "*") for one in known)


def _caching(tag: str) -> dict[str, str]:
    return {"etag": f'"{tag}"', "cache-control": "no-cache"}


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else FAILED
    says = "there is nothing at this address" if status == NOT_FOUND else "impossible request"
    answer = problem(status, says)
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


async def _broken(_request: Request, _error: Exception) -> Response:
    return problem(FAILED, "an error of the server, which its log describes")


_HANDLERS: dict[Any, Any] = {HTTPException: _refused, Exception: _broken}
