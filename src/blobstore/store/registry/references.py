"""References: which model at which registry, as people write it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

from blobstore.errors import UsageError
from blobstore.names import Digest, ModelName


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

    def address(self, *, insecure: bool) -> str:
        """Return the web address of the registry.

        It is http only on this machine or with ``insecure``, unless https is written.

        Raises: UsageError if http is written, and not allowed.
        """
        host = self.name.host
        allowed = insecure or is_loopback(host)
        if self.scheme == "http" and not allowed:
            message = f"{host} would be asked without TLS"
            raise UsageError(message, hint="Use https, or allow it with insecure=True.")
        scheme = self.scheme or ("http" if allowed else "https")
        return f"{scheme}://{host}"


def is_loopback(host: str) -> bool:
    """Return True if a host, perhaps with a port, is this machine."""
    name = host.rpartition(":")[0] if ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
