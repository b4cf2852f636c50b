"""``serve``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.buckets import CacheOption, CacheSizeOption, cached_stores_at
from blobstore.cli.output import LowerOption, StoreOption, emit, note
from blobstore.cli.running import loading
from blobstore.errors import UsageError, quoted

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


_HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?", re.ASCII)
"""A host's name, or its address; one of IPv6 has two colons at least."""
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+/?", re.ASCII)


def serve(
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any free port.")
    ] = 8080,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen at.")
    ] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="HOST",
            help="A host name of the server, for browsers on other machines; repeatable.",
        ),
    ] = None,
    lm: Annotated[
        str | None,
        typer.Option(
            "--lm",
            metavar="NAME",
            help="A stored model that answers at /v1/, as OpenAI's clients expect (mlx-lm).",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="A site whose pages may use /v1/, or * for all; repeatable.",
        ),
    ] = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
) -> None:
    """Serve pages over the store, and an API. Nothing can be changed."""
    _check_names(allowed_host or (), allow_origin or (), lm)
    opened = cached_stores_at(store, lower, cache, cache_size)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = "Install the extra: pip install 'blobstore[web]'."
        raise UsageError("starlette and uvicorn are not installed", hint=hint) from error
    from blobstore.web.application import application
    from blobstore.web.distribution import distribution_routes
    from blobstore.web.guard import Hosts
    from blobstore.web.server import check_address, serve_at

    def show(address: str) -> None:
        lines = [f"Serving {opened.address} at {address}"]
        if lm is not None:
            lines.append(f"Serving {lm} at {address}v1 (OpenAI's protocol)")
        emit("\n".join(lines))  # at once: a reader may leave after the first line

    hosts = Hosts(host, allowed_host or ())
    if lm is not None:
        check_address(host, port)  # before the model is loaded
    with _chat(lm, opened, allow_origin or ()) as chat:
        app = application(opened, hosts, more=[*distribution_routes(opened), *chat])
        serve_at(app, host, port, ready=show)


def _check_names(hosts: Iterable[str], origins: Iterable[str], lm: str | None) -> None:
    """Raise UsageError for names that no request could ever have."""
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            message = f"--allowed-host: {quoted(host)} is not a host name"
            raise UsageError(message, hint="Write it without scheme and port, as models.example.")
    for origin in origins:
        if lm is None:
            raise UsageError("--allow-origin is for a model that answers", hint="Use --lm NAME.")
        if _ORIGIN.fullmatch(origin) is None:
            message = f"--allow-origin: {quoted(origin)} is not an origin"
            raise UsageError(message, hint="Write SCHEME://HOST[:PORT], or * for all.")


@contextmanager
def _chat(name: str | None, store: Any, origins: Iterable[str]) -> Iterator[list[BaseRoute]]:
    """Yield the routes of a model that answers, if there is one."""
    if name is None:
        yield []
        return
    from blobstore.mlx_lm.chat_service import load_service
    from blobstore.web.chat import Chat

    with loading(name):
        service, notes = load_service(name, store=store)
    for one in notes:
        note(one)
    with closing(service):
        yield [Chat(service, origins).route()]
