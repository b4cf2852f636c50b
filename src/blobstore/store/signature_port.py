"""The port of signatures: a part that not every home has (ports.py, `Home.signatures`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blobstore.formats.signatures import Signature
from blobstore.names import Digest, ModelName


class Signatures(Protocol):
    """Signatures of manifests, by digest.

    They may come before the manifest: a model that must be signed is never visible without them.
    """

    def read(self, name: ModelName, digest: Digest) -> Sequence[Signature]:
        """Return the signatures of a manifest that ``name`` has, or will have.

        They are not verified. Homes that keep signatures by the digest alone ignore ``name``.

        Raises: CorruptDataError, LimitExceededError if they can't be read; StorageError,
        RemoteError.
        """

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        """Add those signatures that the home lacks, durably; return how many these are.

        Raises: LimitExceededError for too many of one manifest; StorageError, RemoteError.
        """
