"""References: which model at which registry, as people write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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
