"""The server: an application at an address, until the process is told to end."""

from __future__ import annotations

from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp


def serve_at(app: ASGIApp, host: str, port: int, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called with the address.

    ``port`` 0: a free one. Raises: StorageError if the address can't be bound.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, lifespan="off", ws="none"
    )
    sock = config.bind_socket()
    bound = sock.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    ready(f"http://{name}:{bound}/")
    uvicorn.Server(config).run(sockets=[sock])
