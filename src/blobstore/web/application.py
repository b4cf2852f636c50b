"""The application: the API, the pages and their files, the guard before them.

Work on a store blocks, so it is done in threads: a few for quick answers, and others for those that
read weights, so that a slow one does not keep a list waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from blobstore.errors import BlobStoreError
from blobstore.plots.palette import COLOURS, OTHER
from blobstore.plots.theme import THEMES, configuration
from blobstore.store.ports import Readable
from blobstore.web.api import OPENAPI, ROUTES, ApiRoute, openapi, parsed
from blobstore.web.guard import Guard, Hosts
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
_JSON = "application/json"
_THEMES = "/static/themes.json"
"""Vega's configurations, of which a page passes one when it draws a plot."""
_TYPES = "/static/types.css"
"""The colours of types, as plots have them."""
FOLDER = Path(__file__).parent / "static"
PAGES: Mapping[str, tuple[str, str, str]] = {
    "/": ("index.html", "Models", "models.js"),
    "/model": ("model.html", "Model", "model.js"),
    "/compare": ("compare.html", "Compare", "compare.js"),
    "/usage": ("usage.html", "Usage", "usage.js"),
}
"""The addresses of pages: what is in their shell, their title and their script."""
_CONTENT_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The content types of files that are served. A file of another kind is not."""
_Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the package, in memory."""

    content_type: str
    data: bytes


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
    quick, slow = CapacityLimiter(_QUICK), CapacityLimiter(_SLOW)
    listed = static_files() if files is None else files
    made = {
        OPENAPI: StaticFile(_JSON, in_json(openapi())),
        _THEMES: StaticFile(_JSON, in_json({one: configuration(one) for one in THEMES})),
        _TYPES: StaticFile(_CONTENT_TYPES[".css"], _colours_of_types().encode()),
    }
    routes: list[BaseRoute] = [
        *(Route(one.path, _api(one, served, slow if one.is_slow else quick)) for one in ROUTES),
        *(Route(path, _file(one)) for path, one in {**listed, **made}.items()),
        *more,
    ]
    app = Starlette(routes=routes, exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    return Guard(app, hosts)


def _api(route: ApiRoute, served: Served, threads: CapacityLimiter) -> _Handler:
    def made(request: Request) -> Response:
        query = request.scope["query_string"]
        try:
            answer = route.answer(served, parsed(query, route.query))
            if answer.tag is not None and is_known(answer.tag, request):
                return unchanged(answer.tag)
            body = served.body((route.path, query), answer)
        except BlobStoreError as error:
            return problem_of(error, served.without_folders)
        return with_tag(body, answer.tag or hashlib.sha256(body).hexdigest(), _JSON, request)

    async def handle(request: Request) -> Response:
        return await anyio.to_thread.run_sync(made, request, limiter=threads)

    return handle


def _file(file: StaticFile) -> _Handler:
    tag = hashlib.sha256(file.data).hexdigest()

    async def handle(request: Request) -> Response:
        return with_tag(file.data, tag, file.content_type, request)

    return handle


def _colours_of_types() -> str:
    colours = {**COLOURS, "other": OTHER}
    return "".join(f".type-{n.lower()} {{ --type: {c}; }}\n" for n, c in colours.items())


def static_files(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """Return the files of a folder by their addresses: pages, and all others below ``/static/``.

    Requests only look up their path in this list, so no path leads out of the package. Links are
    not followed. Raises: OSError.
    """
    files = {address: _page(folder, address) for address in PAGES}
    for path in _files(folder):
        if content_type := _CONTENT_TYPES.get(path.suffix):
            address = f"/static/{path.relative_to(folder).as_posix()}"
            files[address] = StaticFile(content_type, path.read_bytes())
    return files


def _page(folder: Path, address: str) -> StaticFile:
    file, title, script = PAGES[address]
    text = (folder / "shell.html").read_text("utf-8")
    text = text.replace("{title}", title).replace("{script}", script)
    text = text.replace(
        f'<li><a href="{address}">', f'<li><a href="{address}" aria-current="page">'
    )
    text = text.replace("{main}", (folder / file).read_text("utf-8"))
    return StaticFile("text/html; charset=utf-8", text.encode())


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path


async def _refused(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else FAILED
    says = "there is nothing at this address" if status == NOT_FOUND else "impossible request"
    answer = problem(status, says)
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


async def _broken(_request: Request, _error: Exception) -> Response:
    return problem(FAILED, "an error of the server, which its log describes")


_HANDLERS: dict[Any, Any] = {HTTPException: _refused, Exception: _broken}
