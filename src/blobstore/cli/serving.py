"""``serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from blobstore.cli.buckets import CacheChoice, CacheOption, CacheSizeOption
from blobstore.cli.output import LowerOption, StoreOption, emit, stores_at
from blobstore.errors import UsageError


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
            metavar="NAME",
            help="A host name of the server, for browsers on other machines; repeatable.",
        ),
    ] = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
) -> None:
    """Serve pages over the store, and an API. Nothing can be changed."""
    opened = stores_at(store, lower, cache=CacheChoice(cache, cache_size))
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = "Install the extra: pip install 'blobstore[web]'."
        raise UsageError("starlette and uvicorn are not installed", hint=hint) from error
    from blobstore.web.application import application
    from blobstore.web.distribution import distribution_routes
    from blobstore.web.guard import Hosts
    from blobstore.web.server import serve_at
    from blobstore.web.tidying import use_one_arena

    use_one_arena()
    hosts = Hosts(host, allowed_host or ())
    app = application(opened, hosts, more=distribution_routes(opened))
    serve_at(app, host, port, ready=lambda address: emit(f"Serving {opened.address} at {address}"))
