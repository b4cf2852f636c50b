"""The certificates that TLS connections trust.

Reading the system's takes 28 ms, so it is done when the first connection needs them.
"""

from __future__ import annotations

import ssl
from functools import cache
from threading import Lock

from blobstore.errors import from_os_error

_lock = Lock()


class Certificates:
    """Those of the system, and those in ``ca_file`` (PEM). Safe to share between threads."""

    def __init__(self, ca_file: str | None) -> None:
        """Raises: StorageError, NotFoundError when ``ca_file`` can't be read."""
        self._context = None if ca_file is None else _with_file(ca_file)

    @property
    def context(self) -> ssl.SSLContext:
        """The context of connections that trust them, for HTTP/1.1."""
        if self._context is None:
            with _lock:  # else each of the first connections would read them
                self._context = _of_system()
        return self._context


def _with_file(ca_file: str) -> ssl.SSLContext:
    context = _new_context()
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        raise from_os_error(error, "read certificates from", ca_file) from error
    return context


def _new_context() -> ssl.SSLContext:
    import httpx2

    context = httpx2.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


_of_system = cache(_new_context)
