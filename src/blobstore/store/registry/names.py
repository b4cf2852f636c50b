"""Names of models at registries, and the web addresses that their hosts stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from blobstore.errors import InvalidNameError, UsageError, quoted
from blobstore.io.http.web_addresses import WebAddress
from blobstore.names import Digest, ModelName

HUB_HOSTS = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""The names of Docker Hub; the last one has its API."""
_LOOPBACK = re.compile(r"(?:(?:.+\.)?localhost|127(?:\.[0-9]{1,3}){3})(?::[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reference:
    """``[http://|https://][HOST/][NAMESPACE/]MODEL[:TAG][@sha256:…]``.

    ``digest``: of the manifest that is meant, whatever the tag names now. ``scheme``: None if it is
    not written.
    """

    name: ModelName
    digest: Digest | None = None
    scheme: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the reference in a text.

        Raises: InvalidNameError (rule N1); InvalidDigestError (rule D1).
        """
        name, at, digest = text.partition("@")
        parsed = ModelName.parse(name)
        scheme = parsed.scheme if "://" in name else None
        return cls(parsed, Digest.parse(digest) if at else None, scheme)


def repository_of(name: ModelName) -> str:
    """Return the repository of a model: ``NAMESPACE/MODEL``. Its tag is the model's."""
    return f"{name.namespace}/{name.model}"


def check_host(host: str) -> None:
    """Raise UsageError unless ``host`` is one that names may have: ``HOST`` or ``HOST:PORT``."""
    try:
        ModelName(host=host, model="any")
    except InvalidNameError:
        raise UsageError(
            f"not a registry: {quoted(host)}", hint="Write HOST or HOST:PORT."
        ) from None


def registry_address(host: str, *, insecure: bool = False, scheme: str | None = None) -> WebAddress:
    """Return the address of a registry's API, ``https://HOST/v2/``.

    It is http on this machine (localhost, 127.0.0.1), and elsewhere if it may be ``insecure``,
    unless ``scheme`` says https. Docker Hub's API is on another host than its names say.

    Raises: UsageError for a host that can't be, or for http where it may not be.
    """
    check_host(host)
    if host.lower() in HUB_HOSTS:
        host, insecure = HUB_HOSTS[-1], False
    may_be_http = insecure or _LOOPBACK.fullmatch(host) is not None
    if scheme == "http" and not may_be_http:
        hint = "Use https, or allow it with insecure=True."
        raise UsageError(f"{host} would be asked without TLS", hint=hint)
    chosen = scheme or ("http" if may_be_http else "https")
    return WebAddress.parse(f"{chosen}://{host}/v2/")
